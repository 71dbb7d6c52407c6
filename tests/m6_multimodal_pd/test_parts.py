"""Parts of one's own in m6's roles: what fits is used, what does not fit is refused, and a text model needs none."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import m5_chunked_prefill_spec
from m6_multimodal_pd import ConfigError, LLMEngine, ModelConfig, SamplingParams
from m6_multimodal_pd.multimodal.embedding_cache import EmbeddingCache
from m6_multimodal_pd.multimodal.encoder_budget import EncoderBudget
from m6_multimodal_pd.multimodal.media_reader import MediaReader
from m6_multimodal_pd.multimodal.vision_processor import ProcessedItem
from tests.m6_multimodal_pd.engines import MakeEngine, Recorder, counts, greedy, setting
from tests.m6_multimodal_pd.seeing import SHOWN, Theirs, asking

NEW_ROLES = {"media_reader", "embedding_cache", "encoder", "encoder_budget"}
SHORT = greedy(4)


def test_an_adder_without_a_budget_for_images_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"'prefill_adder'.* has no limit_encoding"):
        make_engine({"prefill_adder": m5_chunked_prefill_spec.PARTS["prefill_adder"]})


# --- what fits is used ------------------------------------------------------------------------------------------------


def test_a_reader_of_ones_own_reads_what_comes(make_engine: MakeEngine) -> None:
    """It shows another picture, whatever came."""
    asked: list[str] = []

    class Always(MediaReader):
        def process(self, part: Mapping[str, Any], what: str) -> ProcessedItem:
            asked.append(what)
            return super().process(SHOWN["a"] if part["type"] == "image" else part, what)

    engine = make_engine({"media_reader": Always}, **setting())
    plain = make_engine(**setting())
    assert engine.chat(asking("c", 1), SHORT).token_ids == plain.chat(asking("a", 1), SHORT).token_ids
    assert asked == ["image 0 of message 0"]
    conversation = [{"role": "system", "content": "Be brief."}, *asking("d", "v", "b")]
    engine.chat_prompt(conversation)
    assert asked[1:] == ["image 0 of message 1", "video 1 of message 1", "image 2 of message 1"]


class Forgetful(EmbeddingCache):
    """Keeps nothing: every picture is encoded again for each of its pieces."""

    def put(self, content: str, embeddings: Tensor, in_use: Collection[str], rid: str | None = None) -> bool:
        return False


def test_a_cache_that_keeps_nothing_costs_runs_and_no_token(make_engine: MakeEngine, their_model: Theirs) -> None:
    engine = make_engine({"embedding_cache": Forgetful}, **setting(max_num_batched_tokens=8))
    prompt = engine.chat_prompt(asking("c", "v", 1))
    assert engine.generate(prompt, SHORT).token_ids == their_model.answer(prompt).token_ids[:4]
    runs, items, hits = counts(engine)
    assert runs > 4 and items == runs and hits == 0


def test_a_budget_of_ones_own_says_how_far_a_prompt_goes(make_engine: MakeEngine, their_model: Theirs) -> None:
    """Not more than one picture a step, however small."""

    class OneItem(EncoderBudget):
        def __init__(self, *, max_tokens: int, **settings: Any) -> None:
            super().__init__(max_tokens=1, **settings)

    engine = make_engine({"encoder_budget": OneItem}, **setting(page_size=1))
    recorder = Recorder(engine.tracer)
    prompts = [engine.chat_prompt(asking(*parts)) for parts in (("d", 1), (2, "a", "b"))]
    outputs = engine.generate_batch(prompts, SHORT)
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        assert output.token_ids == their_model.answer(prompt).token_ids[:4]
    assert [run.num_tokens for run in recorder.events("encoder_run")] == [1, 9, 10]


# --- without eyes -----------------------------------------------------------------------------------------------------


def test_an_engine_on_a_text_model_makes_no_part_that_sees(tiny_directory: Path, make_m1: Any) -> None:
    """Of the encoder there is one, which has nothing to do."""

    class Refusing:
        options_key, merge_size = b"", 2

        def __init__(self, **settings: Any) -> None:
            raise AssertionError("there is nothing to see")

        def process(self, part: Any, what: str) -> Any: ...

        def most(self, req: Any, start: int, num_tokens: int) -> int: ...

        def take(self, req: Any, start: int, num_tokens: int) -> None: ...

    parts = {"media_reader": Refusing, "encoder_budget": Refusing}
    model = ModelConfig(model=tiny_directory, device="cpu", dtype="float32")
    with LLMEngine(model_config=model, parts=parts, **setting(max_num_batched_tokens=8)) as engine:
        prompts = [list(range(3, 33)), [5]]
        outputs = engine.generate_batch(prompts, SamplingParams(max_tokens=5, ignore_eos=True))
        wanted = [make_m1().generate(prompt, greedy(5)).token_ids for prompt in prompts]
        assert [output.token_ids for output in outputs.values()] == wanted
        assert counts(engine) == (0, 0, 0)
