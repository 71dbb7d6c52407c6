"""What an m6 engine can be told of pictures: checked when it is said, and used for what it says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from m6_multimodal_pd import (
    ConfigError,
    DisaggregationConfig,
    InvalidMediaError,
    LLMEngine,
    ModelConfig,
    MultimodalConfig,
    SamplingParams,
    SchedulerConfig,
)
from tests.m6_multimodal_pd.engines import MakeEngine, Recorder, counts, greedy, runner_of, setting
from tests.m6_multimodal_pd.seeing import SIDE, asking, picture
from tests.support.wrong_values import INFINITE, NAN, Wrong, check_refused, each_of

LIMITS = ("max_items", "max_file_bytes", "max_image_pixels", "max_video_frames", "max_video_pixels")
OPTIONAL = ("min_pixels", "max_pixels", "encoder_budget")
WHOLE = (*LIMITS, *OPTIONAL, "embedding_cache_bytes")
NOT_WHOLE: tuple[Any, ...] = (0, -1, 1.5, 16.0, "16", True, NAN)


WRONG: Wrong = {
    MultimodalConfig: {
        **{name: NOT_WHOLE if name in OPTIONAL else (*NOT_WHOLE, None) for name in WHOLE},
        "url_timeout_s": (0, -2.0, NAN, INFINITE, "10", True, None),
        "num_media_processes": (-1, 65, 1.5, "1", True, None, NAN),
    },
    DisaggregationConfig: {"max_message_bytes": (0, 300, 16_383)},
    ModelConfig: {"cuda_graphs": (0, 1, "yes", "auto", NAN)},
    SchedulerConfig: {"enable_overlap": ("yes", 1, 0.0)},
}


@each_of(WRONG)
def test_a_wrong_value_is_refused_with_its_name(make: Any, name: str, value: Any) -> None:
    """An engine whose report of itself does not fit into a message would be lost by it."""
    check_refused(make, name, value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_items": 0}, "max_items=0 is not valid: Expected `int` >= 1"),
        ({"min_pixels": 101, "max_pixels": 100}, "min_pixels=101 is more than max_pixels=100"),
        ({"allowed_url_schemes": "https"}, r"='https' must be a tuple of names, such as \('https',\)"),
        ({"allowed_url_schemes": {"https": True}}, "allowed_url_schemes=.* must be a tuple"),
        ({"allowed_url_schemes": ("ftp",)}, "allowed_url_schemes: 'ftp' is not one of file, http, https"),
        ({"allowed_url_schemes": ("https", "data")}, "'data' is not one of"),
        ({"allowed_url_schemes": (None,)}, "None is not one of"),
    ],
    ids=str,
)
def test_the_message_says_what_is_valid(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MultimodalConfig(**values)


def test_what_is_right_is_accepted() -> None:
    for name in WHOLE:
        assert MultimodalConfig(**{name: 1})
    for name in OPTIONAL:  # left to the model
        assert getattr(MultimodalConfig(**{name: None}), name) is None
    assert MultimodalConfig(min_pixels=100, max_pixels=100) and DisaggregationConfig(max_message_bytes=16_384)
    assert MultimodalConfig(url_timeout_s=1) and MultimodalConfig(url_timeout_s=0.25)
    for schemes in ((), ("file",), ("http", "https", "file"), ["https"], frozenset({"https"})):
        assert MultimodalConfig(allowed_url_schemes=schemes)  # type: ignore[arg-type]


def test_a_tower_on_a_gpu_may_do_more_in_a_step_unless_it_is_told_otherwise() -> None:
    assert MultimodalConfig().budget("cpu") < MultimodalConfig().budget("cuda")
    assert MultimodalConfig(encoder_budget=7).budget("cpu") == MultimodalConfig(encoder_budget=7).budget("cuda") == 7


# --- what fits together, once the model is known ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [
        {"encoder_budget": 7},
        {"embedding_cache_bytes": 10**9},
        {"min_pixels": 4096},
        {"allowed_url_schemes": ("https",)},
        {"max_items": 3},
        {"num_media_processes": 1},
    ],
    ids=lambda limits: next(iter(limits)),
)
def test_limits_of_pictures_are_refused_where_a_model_reads_only(tiny_directory: Path, limits: dict[str, Any]) -> None:
    model = ModelConfig(model=tiny_directory, device="cpu", dtype="float32")
    name = next(iter(limits))
    with pytest.raises(ConfigError, match=f"^{name}=.* has no effect: .* takes texts only"):
        LLMEngine(model_config=model, **setting(multimodal=limits))
    LLMEngine(model_config=model, **setting(multimodal={name: getattr(MultimodalConfig(), name)})).close()


@pytest.mark.parametrize(("budget", "capacity", "tokens"), [(10**12, 20 * 768, 16), (9, 20 * 768, 9), (5, 768, 1)])
def test_what_a_step_may_encode_is_tried_within_what_the_cache_can_hold(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, budget: int, capacity: int, tokens: int
) -> None:
    engine: Any = make_engine(**setting(multimodal={"encoder_budget": budget, "embedding_cache_bytes": capacity}))
    runner: Any = runner_of(engine)
    tried: list[int] = []
    tower = runner.encoder.tower

    def encode(items: Any) -> None:
        tried.extend(tower.num_tokens(grid) for _, grid in items)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(tower, "encode", encode)
    with pytest.raises(ConfigError, match=f"encoder_budget={budget} do not fit together"):
        runner.profile_run(1)
    assert tried == [tokens]


# --- every field does what it says ------------------------------------------------------------------------------------


def tokens_of(engine: Any, width: int, height: int) -> int:
    """Tokens of a grey picture of this size."""
    image = picture("size", 8, 8).resize((width, height))
    prompt = engine.chat_prompt([{"role": "user", "content": [{"type": "image", "image": image}]}])
    return int(prompt.multimodal_inputs.mm_items[0].num_tokens)


def test_pixels_are_held_between_the_limits_that_were_given(make_engine: MakeEngine) -> None:
    plain = make_engine(**setting())
    bounded = make_engine(**setting(multimodal={"min_pixels": 16 * SIDE**2, "max_pixels": 25 * SIDE**2}))
    assert [tokens_of(plain, side, side) for side in (SIDE, 4 * SIDE, 8 * SIDE)] == [1, 16, 64]
    assert [tokens_of(bounded, side, side) for side in (SIDE, 4 * SIDE, 8 * SIDE)] == [16, 16, 25]


def test_a_picture_that_becomes_too_much_is_refused_before_it_is_enlarged(make_engine: MakeEngine) -> None:
    """In whole it would take terabytes."""
    limits = {"min_pixels": 10**12, "max_pixels": 10**12, "embedding_cache_bytes": 10**6}
    engine = make_engine(**setting(multimodal=limits))
    says = "image 0 of message 0: 8 x 8 pixels become 15,625,000,000 tokens, .* has room for 1,302: raise embedding_"
    with pytest.raises(InvalidMediaError, match=says):
        engine.chat(asking("d"), greedy(1))


def test_a_request_that_is_exactly_at_its_limits_is_taken(make_engine: MakeEngine) -> None:
    limits = {"max_items": 2, "max_image_pixels": 576, "embedding_cache_bytes": 9 * 768}
    engine = make_engine(**setting(multimodal=limits))
    assert engine.chat(asking("a", "d"), greedy(1)).finish_reason == "length"


def test_where_prompts_are_whole_all_their_pictures_are_encoded_at_once(make_engine: MakeEngine) -> None:
    """A prompt that may not be cut cannot wait for a budget in its middle."""
    engine = make_engine(**setting(enable_chunked_prefill=False, multimodal={"encoder_budget": 1}))
    recorder = Recorder(engine.tracer)
    outputs = engine.generate_batch([asking("a", "c", 1), asking("b")], SamplingParams(max_tokens=2))
    assert all(output.error is None for output in outputs.values())
    assert [run.num_tokens for run in recorder.events("encoder_run")] == [29, 10]
    assert counts(engine)[0] == 2
