"""Models of real shapes on a laptop: length and precision are fitted to the machine, or an error names what is missing.

The shapes are those of Qwen3's config.json files. Most tests need only what decides about memory: the layers, KV heads
and positions are the model's, all other sizes are small, so that an engine starts in a second.
"""

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from m1_single_request import DEFAULT_MODEL as TEXT_MODEL, ConfigError, ModelLoadError
from m1_single_request.model_loader import SUPPORTED_ARCHITECTURES, describe
from m6_multimodal_pd import DEFAULT_MODEL as SEEING_MODEL, SamplingParams
from tests.support.engines import Recorder

MILESTONES = ["m3_paged_attention", "m4_radix_cache", "m5_chunked_prefill_spec", "m6_multimodal_pd"]
each_milestone = pytest.mark.parametrize("milestone", MILESTONES, ids=[name[:2] for name in MILESTONES])
CPU, GIB = torch.device("cpu"), 2**30
COMMON = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
TEXTS = {
    "Qwen3-0.6B": (1024, 28, 16, 3072, True),
    "Qwen3-1.7B": (2048, 28, 16, 6144, True),
    "Qwen3-8B": (4096, 36, 32, 12_288, False),
}
"""By model: hidden size, layers, heads, intermediate size, and whether the embedding is the output layer."""
NARROW = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "vocab_size": 4096}
"""What does not matter to the KV, small."""


def copied(model: Path, directory: Path, change: Any) -> Path:
    """A checkpoint that ships without its weights, its config.json changed."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors", "README.md", "*.png"))
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def text_model(directory: Path, name: str = "Qwen3-0.6B", **changes: Any) -> Path:
    """A directory like that of a Qwen3, without weights."""
    hidden, layers, heads, inner, is_tied = TEXTS[name]
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "tie_word_embeddings": is_tied,
        "dtype": "bfloat16",
    }
    sizes |= COMMON | changes
    sizes |= {"layer_types": ["full_attention"] * sizes["num_hidden_layers"]}
    return copied(TEXT_MODEL, directory / name, lambda config: config.update(sizes))


def seeing_model(directory: Path, **changes: Any) -> Path:
    """A directory like that of Qwen3-VL-2B-Instruct, without weights."""

    def change(config: dict[str, Any]) -> None:
        rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
        sizes = {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144}
        config["text_config"] |= (
            COMMON | sizes | {"max_position_embeddings": 262_144, "rope_parameters": rope} | changes
        )
        wide = config["text_config"]["hidden_size"]
        if "hidden_size" not in changes:
            config["vision_config"] |= {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096}
            config["vision_config"] |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]}
        config["vision_config"]["out_hidden_size"] = wide

    return copied(SEEING_MODEL, directory / "Qwen3-VL-2B", change)


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`laptop(gib)`: a machine with so much memory, all of it free."""

    def has(gib: float) -> None:
        for place in ("m3_paged_attention.kv_cache_config", "m3_paged_attention.model_loader"):
            monkeypatch.setattr(f"{place}.available_memory", lambda device: int(gib * GIB), raising=False)
        monkeypatch.setattr("m3_paged_attention.kv_cache_config.physical_memory", lambda: int(gib * GIB), raising=False)

    has(8)
    return has


def started(milestone: str, model: Path, *, settings: Any = None, reader: Any = None, **config: Any) -> Any:
    """An engine with the defaults, and random weights."""
    package = importlib.import_module(milestone)
    settings = {"trace_config": package.TraceConfig(readers=(reader,) if reader else ()), **(settings or {})}
    values = {"model": model, "load_format": "dummy", "device": "cpu", "dtype": "bfloat16"} | config
    return package.LLMEngine(model_config=package.ModelConfig(**values), **settings)


def described(model: Path, **config: Any) -> Any:
    """What is read of a model before its weights."""
    from m3_paged_attention import ModelConfig

    architectures = (*SUPPORTED_ARCHITECTURES, "Qwen3VLForConditionalGeneration")
    choice = ModelConfig(**{"model": model, "load_format": "dummy", "device": "cpu"} | config)
    return describe(choice, architectures)


# --- the length -------------------------------------------------------------------------------------------------------


@each_milestone
def test_a_model_of_more_positions_than_there_is_memory_for_starts_with_the_longest_that_fits(
    milestone: str, tmp_path: Path, laptop: Any
) -> None:
    """A quarter of 8 GiB has room for 18,724 tokens of 112 KiB, and these fill 1,170 pages of 16."""
    package, reader = importlib.import_module(milestone), Recorder()
    with started(milestone, text_model(tmp_path, **NARROW), reader=reader) as engine:
        assert engine.stats().max_model_len == 18_720
        started_event, sized = reader.events("engine_started")[0], reader.events("kv_sized")[0]
        assert (started_event.max_model_len, sized.max_model_len) == (18_720, 18_720)
        assert "A request has at most 18,720 tokens, of 40,960" in started_event.explain()
        with pytest.raises(package.InvalidRequestError, match="max_model_len is 18720"):
            engine.add_request([5] * 18_720)
        params = package.SamplingParams(max_tokens=2, ignore_eos=True)
        assert len(engine.generate([5, 6, 7], params).token_ids) == 2


def test_the_model_of_the_readme_starts(tmp_path: Path, laptop: Any) -> None:
    """262,144 positions, of which each needs 112 KiB."""
    model = seeing_model(tmp_path, **NARROW | {"hidden_size": 256})
    with started("m6_multimodal_pd", model) as engine:
        assert engine.stats().max_model_len == 18_720
        answer = engine.chat([{"role": "user", "content": "What is a KV cache?"}], SamplingParams(max_tokens=2))
        assert answer.finish_reason in ("length", "stop")


@each_milestone
def test_an_answer_ends_at_the_fitted_length(milestone: str, tmp_path: Path) -> None:
    """As the stop checker, the rows of slots and the guesses know it."""
    package = importlib.import_module(milestone)
    model = text_model(tmp_path, **NARROW | {"num_hidden_layers": 1, "max_position_embeddings": 4096})
    memory = {"cache_config": package.CacheConfig(kv_cache_memory_bytes=4096 * (1024 + 16 + 7))}
    with started(milestone, model, settings=memory) as engine:
        assert engine.stats().max_model_len == 1024
        output = engine.generate([5, 6, 7] * 340, package.SamplingParams(max_tokens=99, ignore_eos=True))
        assert (len(output.token_ids), output.finish_reason) == (4, "length")


def test_where_blocks_are_swapped_the_default_leaves_room_for_as_many_on_the_host(tmp_path: Path, laptop: Any) -> None:
    from m3_paged_attention import SchedulerConfig

    settings = {"scheduler_config": SchedulerConfig(preemption_mode="swap")}
    with started("m3_paged_attention", text_model(tmp_path, **NARROW), settings=settings) as engine:
        assert engine.stats().max_model_len == 11_696, "512 MiB, and half of what a quarter of 8 GiB has besides"


@pytest.mark.sample(1)
@pytest.mark.parametrize("milestone", MILESTONES[2:], ids=["m5", "m6"])
def test_a_draft_model_of_fewer_positions_limits_the_length_and_not_what_fits(
    milestone: str, tmp_path: Path, laptop: Any
) -> None:
    package, sizes = importlib.import_module(milestone), NARROW | {"num_hidden_layers": 1}
    target = text_model(tmp_path / "target", **sizes | {"max_position_embeddings": 262_144})
    lengths = []
    for positions in (4096, 40_960):
        draft = text_model(tmp_path / str(positions), **sizes | {"max_position_embeddings": positions})
        guesses = package.SpeculativeConfig(method="draft_model", model=draft)
        memory = package.CacheConfig(kv_cache_memory_bytes=2 * 4096 * (8192 + 16))
        with started(milestone, target, settings={"speculative_config": guesses, "cache_config": memory}) as engine:
            lengths.append(engine.stats().max_model_len)
    assert lengths == [4096, 8192]
    with pytest.raises(ConfigError, match="max_model_len=50000 is more than the 40960 positions of"):
        started(milestone, target, max_model_len=50_000, settings={"speculative_config": guesses})


@each_milestone
def test_a_length_that_is_named_is_never_changed(milestone: str, tmp_path: Path, laptop: Any) -> None:
    model = text_model(tmp_path, **NARROW)
    with pytest.raises(ConfigError, match=r"max_model_len=40960 needs 2,560 blocks .*max_model_len of at most 18,720"):
        started(milestone, model, max_model_len=40_960)
    with started(milestone, model, max_model_len=512) as engine:
        assert engine.stats().max_model_len == 512, "shorter than any that is taken without being named"


@each_milestone
def test_less_than_1024_tokens_are_not_taken_unless_they_are_named_or_all_that_the_model_takes(
    milestone: str, tmp_path: Path
) -> None:
    package = importlib.import_module(milestone)
    memory = {"cache_config": package.CacheConfig(kv_cache_memory_bytes=4096 * (1024 + 15))}
    model = text_model(tmp_path, **NARROW | {"num_hidden_layers": 1})
    with pytest.raises(
        ConfigError, match=r"1,024 tokens, the least .* needs 64 blocks .*max_model_len of at most 1,008"
    ):
        started(milestone, model, settings=memory)
    short = text_model(tmp_path / "short", **NARROW | {"num_hidden_layers": 1, "max_position_embeddings": 1000})
    with started(milestone, short, settings=memory) as engine:
        assert engine.stats().max_model_len == 1000


@each_milestone
def test_the_model_that_ships_has_its_whole_length(milestone: str) -> None:
    with importlib.import_module(milestone).LLMEngine() as engine:
        assert engine.stats().max_model_len == 4096


# --- the memory -------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not show what a process holds")
@each_milestone
def test_an_idle_engine_does_not_hold_its_kv_memory(milestone: str) -> None:
    package = importlib.import_module(milestone)
    with package.LLMEngine() as engine:
        engine.generate("What is a KV cache?", package.SamplingParams(max_tokens=2))
    before = resident_bytes()
    with package.LLMEngine(cache_config=package.CacheConfig(kv_cache_memory_bytes=GIB)):
        assert resident_bytes() - before < GIB // 4


def full_of_nan(runner: Any) -> type:
    """A model runner whose KV memory, and its draft model's, holds NaN wherever nothing was written."""

    class Filled(runner):  # type: ignore[misc]
        def initialize_kv_cache(self, kv_cache_config: Any) -> None:
            super().initialize_kv_cache(kv_cache_config)
            draft = getattr(self, "draft_runner", None)
            for kv in (self.kv, *([] if draft is None else [draft.kv])):
                kv.blocks.fill_(torch.nan)

    return Filled


INTERPRETED = pytest.param("triton", marks=[pytest.mark.interpreter, pytest.mark.exhaustive])


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["native", "torch", INTERPRETED])
@each_milestone
def test_what_the_kv_memory_held_before_changes_no_token(milestone: str, backend: str, tmp_path: Path) -> None:
    """Prompts of several lengths, so that padding and the ends of pages are read: together, then from the cache."""
    from tests.support.engines import save_tiny_model

    package, model = importlib.import_module(milestone), save_tiny_model(tmp_path)
    prompts = [list(range(5, 5 + length)) for length in (1, 15, 16, 33)] + [list(range(5, 38))]
    params = package.SamplingParams(max_tokens=6, ignore_eos=True)
    config = package.ModelConfig(model=model, device="cpu", dtype="float32", attention_backend=backend)
    answers = []
    for parts in ({}, {"model_runner": full_of_nan(package.LLMEngine.parts["model_runner"])}):
        with package.LLMEngine(model_config=config, parts=parts) as engine:
            rounds = [engine.generate_batch(prompts, params).values() for _ in range(1 if backend == "triton" else 2)]
            answers.append([output.token_ids for outputs in rounds for output in outputs])
    assert answers[0] == answers[1] and all(len(tokens) == 6 for tokens in answers[1])


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_guesses_do_not_read_what_the_kv_memory_held_before(method: Any) -> None:
    from m6_multimodal_pd import LLMEngine, SamplingParams, SpeculativeConfig

    prompts = ["What is a KV cache?", "Repeat this text:\nsee a green lamp and a green bird", "What is prefill?"]
    answers = []
    for parts in ({}, {"model_runner": full_of_nan(LLMEngine.parts["model_runner"])}):
        config = SpeculativeConfig(method=method)
        with LLMEngine(TEXT_MODEL, parts=parts, speculative_config=config) as engine:
            outputs = engine.generate_batch(prompts, SamplingParams(max_tokens=16)).values()
            answers.append(([output.token_ids for output in outputs], engine.stats().num_accepted_tokens))
    assert answers[0] == answers[1] and answers[0][1]


@pytest.mark.parametrize(("name", "needed"), [("Qwen3-8B", "15.3"), ("Qwen3-1.7B", "3.2"), ("Qwen3-VL-2B", "4.0")])
@each_milestone
def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(
    milestone: str, name: str, needed: str, tmp_path: Path, laptop: Any
) -> None:
    if name == "Qwen3-VL-2B":
        milestone = "m6_multimodal_pd"
    laptop(3)
    model = seeing_model(tmp_path) if name == "Qwen3-VL-2B" else text_model(tmp_path, name)
    with pytest.raises(
        ModelLoadError, match=rf"they need {needed}\d? GiB as bfloat16, and 3.0 GiB of cpu memory is available"
    ):
        started(milestone, model)


# --- the precision ----------------------------------------------------------------------------------------------------


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`packs(yes)`: whether this machine multiplies bfloat16."""
    return lambda yes: monkeypatch.setattr("m1_single_request.precision.can_pack", lambda dtype, device: yes)


@pytest.mark.parametrize(
    ("device", "named", "can_pack", "chosen"),
    [
        ("cpu", "bfloat16", True, "bfloat16"),  # a large model keeps it where the CPU multiplies it
        ("cpu", "bfloat16", False, "float32"),
        *[("cpu", named, True, "float32") for named in ("float32", "float16", None)],
        *[("cuda", named, False, named) for named in ("bfloat16", "float16")],
        *[("cuda", named, False, "bfloat16") for named in ("float32", None)],
    ],
)
def test_a_large_model_has_the_precision(
    device: str,
    named: str | None,
    can_pack: bool,
    chosen: str,
    tmp_path: Path,
    packs: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packs(can_pack)
    monkeypatch.setattr("m3_paged_attention.ModelConfig.torch_device", lambda self: torch.device(device))
    for name in TEXTS:
        model = text_model(tmp_path, name, dtype=named)
        assert described(model).dtype == getattr(torch, chosen)
        assert described(model, dtype="float32").dtype == torch.float32, "what the user names is never changed"
    if device == "cuda":
        assert described(text_model(tmp_path / "small", dtype=named, **NARROW)).dtype == getattr(torch, chosen)


def test_a_large_model_with_a_vision_tower_keeps_its_precision_too(tmp_path: Path, packs: Any) -> None:
    packs(True)
    assert described(seeing_model(tmp_path)).dtype == torch.bfloat16


@pytest.mark.parametrize("milestone", ["m1_single_request", "m2_continuous_batching", *MILESTONES])
def test_the_models_that_ship_are_computed_in_float32_on_a_cpu(milestone: str, packs: Any) -> None:
    packs(True)
    package, reader = importlib.import_module(milestone), Recorder()
    with package.LLMEngine(trace_config=package.TraceConfig(readers=(reader,))):
        assert reader.events("engine_started")[0].dtype == "float32"


@each_milestone
def test_the_event_names_float16_that_became_float32(milestone: str, tmp_path: Path) -> None:
    reader, model = Recorder(), text_model(tmp_path, dtype="float16", **NARROW | {"num_hidden_layers": 1})
    with started(milestone, model, dtype="auto", reader=reader):
        event = reader.events("engine_started")[0]
    assert event.dtype == "float32" and "as float32 (config.json names float16)" in event.explain()


@pytest.mark.parametrize("milestone", MILESTONES[2:], ids=["m5", "m6"])
def test_a_draft_model_is_computed_in_its_target_s_precision(milestone: str) -> None:
    """Which is chosen by the target's size, and a draft model is small."""
    package = importlib.import_module(milestone)
    load, precisions = package.LLMEngine.parts["model_loader"], []

    def loading(config: Any, kv_cache_dtype: Any) -> Any:
        """As if the first of them, the target, were large."""
        loaded = load(config if precisions else package.ModelConfig(model=TEXT_MODEL, device="cpu", dtype="bfloat16"))
        precisions.append(loaded.dtype)
        return loaded

    with package.LLMEngine(
        model_config=package.ModelConfig(model=TEXT_MODEL, device="cpu"),
        parts={"model_loader": loading},
        speculative_config=package.SpeculativeConfig(method="draft_model"),
    ):
        assert precisions == [torch.bfloat16, torch.bfloat16]


# --- whole ------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("milestone", ["m3_paged_attention", "m6_multimodal_pd"])
def test_qwen3_of_its_real_size_starts_with_the_defaults_and_answers(
    milestone: str, tmp_path: Path, laptop: Any, packs: Any
) -> None:
    laptop(24)
    packs(True)
    package, reader = importlib.import_module(milestone), Recorder()
    with started(milestone, text_model(tmp_path), dtype="auto", reader=reader) as engine:
        assert (engine.stats().max_model_len, reader.events("engine_started")[0].dtype) == (37_440, "bfloat16")
        params = package.SamplingParams(max_tokens=2, ignore_eos=True)
        assert len(engine.generate([5, 6, 7], params).token_ids) == 2
