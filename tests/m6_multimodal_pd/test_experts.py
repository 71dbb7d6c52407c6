"""Experts in an engine that guesses, overlaps steps, and computes prompts elsewhere: the tokens stay the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import m5_chunked_prefill_spec
from m3_paged_attention.attention import native_library
from m3_paged_attention.expert_events import ExpertsUsed
from m6_multimodal_pd import (
    CacheConfig,
    DisaggregationConfig,
    LLMEngine,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
    TraceConfig,
)
from m6_multimodal_pd.disaggregation.events import Reported
from m6_multimodal_pd.overlap.events import NormalOrder
from tests.equivalence.models import save_random_model
from tests.m3_paged_attention.test_experts import Kept
from tests.m6_multimodal_pd.seeing import Theirs, asking, save_seeing_model
from tests.m6_multimodal_pd.vl_models import EXPERTS

DRAFT = Path(m5_chunked_prefill_spec.__file__).parent / "checkpoints" / "tiny-qwen3-draft"
PROMPTS = [list(range(5, 30)), [7, 9, 11], list(range(100, 160))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", stop_ids=())


def tokens(directory: Path, *readers: Any, backend: str = "torch", experts: bool = False, **configs: Any) -> list[Any]:
    """The answers to `PROMPTS`."""
    model = ModelConfig(model=directory, device="cpu", dtype="float32", attention_backend=backend)
    trace = TraceConfig(readers=readers, experts=experts)
    with LLMEngine(model_config=model, trace_config=trace, **configs) as engine:
        outputs = engine.generate_batch(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True)).values()
        assert all(output.error is None for output in outputs)
        return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(directory: Path) -> list[Any]:
    return tokens(directory)


def test_a_dense_draft_model_guesses_for_a_sparse_target(directory: Path, alone: list[Any]) -> None:
    speculative = SpeculativeConfig(method="draft_model", model=DRAFT, num_speculative_tokens=3)
    assert tokens(directory, speculative_config=speculative) == alone


def with_equal_experts(directory: Path) -> Path:
    """The draft model, with four copies of each MLP as experts: the same function."""
    shutil.copytree(DRAFT, directory)
    tensors, sparse = load_file(directory / "model.safetensors"), dict[str, Any]()
    for name, tensor in tensors.items():
        before, is_mlp, after = name.partition(".mlp.")
        copies = [f"{before}.mlp.experts.{number}.{after}" for number in range(4)] if is_mlp else [name]
        sparse |= {copy: tensor.clone() for copy in copies}
        if after == "gate_proj.weight":
            sparse[f"{before}.mlp.gate.weight"] = torch.randn(4, tensor.shape[1])
    save_file(sparse, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text("utf-8"))
    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": config["intermediate_size"]}
    own |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True}
    (directory / "config.json").write_text(json.dumps(config | own), "utf-8")
    return directory


def test_what_a_dense_model_guesses_is_accepted_by_a_sparse_one_that_computes_the_same(tmp_path: Path) -> None:
    speculative = SpeculativeConfig(method="draft_model", model=DRAFT, num_speculative_tokens=3)
    model = ModelConfig(model=with_equal_experts(tmp_path / "equal"), device="cpu", dtype="float32")
    with LLMEngine(model_config=model, speculative_config=speculative) as engine:
        outputs = engine.generate_batch(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True)).values()
        assert engine.stats().acceptance_rate > 0.9
    assert [output.token_ids for output in outputs] == tokens(DRAFT)


# --- pictures ---------------------------------------------------------------------------------------------------------

ASKED: list[tuple[str | int, ...]] = [("a", 1), (2,), ("v", "b", 2), ("a", "a", 3)]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"scheduler_config": SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4)},
    "n-grams": {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=3)},
    "two engines": {"disaggregation_config": DisaggregationConfig(transport="in_process")},
    "overlap": {"scheduler_config": SchedulerConfig(enable_overlap=True)},
    "host memory": {"cache_config": CacheConfig(host_memory_bytes=2**20, max_total_tokens=256)},
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Theirs]:
    """A Qwen3-VL-MoE, as transformers saves it."""
    directory = save_seeing_model(tmp_path_factory.mktemp("vl_moe"), text=EXPERTS)
    return directory, Theirs(directory)


def seen(engine: LLMEngine, theirs: Theirs) -> None:
    """Ask about pictures, all at once; the answers are those of transformers."""
    prompts = [engine.chat_prompt(asking(*question)) for question in ASKED]
    outputs = engine.generate_batch(prompts, SamplingParams(max_tokens=8)).values()
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = theirs.answer(prompt).token_ids
        assert output.error is None and output.token_ids == expected[: len(output.token_ids)]
        assert len(output.token_ids) == min(8, len(expected)) or output.finish_reason == "stop"


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample(3)
def test_a_model_with_experts_that_sees_answers_as_transformers_does(
    seeing: tuple[Path, Theirs], way: str, backend: str
) -> None:
    if backend == "native" and native_library.obstacle():
        pytest.skip("no C++ compiler")
    directory, theirs = seeing
    model = ModelConfig(model=directory, device="cpu", dtype="float32", attention_backend=backend)
    with LLMEngine(model_config=model, **WAYS[way]) as engine:
        for _ in range(2):  # the second time from the caches
            seen(engine, theirs)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_weights_of_a_model_with_experts_that_sees_are_exchanged(
    seeing: tuple[Path, Theirs], tmp_path: Path, quantization: Any
) -> None:
    directory, theirs = seeing
    other = save_seeing_model(tmp_path / "other", text=EXPERTS)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor * 0.5 for name, tensor in weights.items()}, other / "model.safetensors")
    model = ModelConfig(model=other, device="cpu", dtype="float32", quantization=quantization)
    same = ModelConfig(model=directory, device="cpu", dtype="float32", quantization=quantization)
    with LLMEngine(model_config=model) as engine, LLMEngine(model_config=same) as wanted:
        engine.update_weights(directory)
        if quantization is None:
            seen(engine, theirs)
        prompts = [engine.chat_prompt(asking(*question)) for question in ASKED]
        found, expected = (
            each.generate_batch(prompts, SamplingParams(max_tokens=8)).values() for each in (engine, wanted)
        )
        assert [each.token_ids for each in found] == [each.token_ids for each in expected]


def test_each_of_several_engines_in_a_process_counts_its_own_steps(directory: Path) -> None:
    kept, group = Kept(), DisaggregationConfig(transport="in_process", prefill=2, decode=2)
    tokens(directory, kept, experts=True, disaggregation_config=group)
    of_engines = {
        what: {event.engine for event in kept.of(Reported) if event.what == what}
        for what in ("sampled", "experts_used")
    }
    assert of_engines["experts_used"] == of_engines["sampled"] and len(of_engines["sampled"]) > 2


def test_prompts_in_pieces_and_computed_by_another_engine(directory: Path, alone: list[Any]) -> None:
    group = DisaggregationConfig(transport="in_process")
    limits = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4)
    assert tokens(directory, disaggregation_config=group, scheduler_config=limits) == alone


def test_the_engines_of_a_group_report_how_many_tokens_each_expert_has(directory: Path) -> None:
    kept, group = Kept(), DisaggregationConfig(transport="in_process")
    tokens(directory, kept, experts=True, disaggregation_config=group)
    loads = [dict(event.facts)["loads"] for event in kept.of(Reported) if event.what == ExpertsUsed.kind_name()]
    assert loads and all(len(each) == 10 for each in loads)
    num_prompt_tokens = sum(map(len, PROMPTS))
    assert sum(map(sum, loads)) == 2 * 2 * (num_prompt_tokens + 11 * len(PROMPTS)), "two of each layer per token"


@pytest.mark.skipif(bool(native_library.obstacle()), reason="no C++ compiler")
def test_steps_on_a_cpu_do_not_overlap_and_the_trace_has_the_reason(directory: Path, alone: list[Any]) -> None:
    kept = Kept()
    overlap = SchedulerConfig(enable_overlap=True)
    assert tokens(directory, kept, backend="native", scheduler_config=overlap) == alone
    (event,) = kept.of(NormalOrder)
    assert "torch chooses the experts" in event.reason


def test_each_forward_of_the_target_is_counted_and_none_of_the_draft(directory: Path, alone: list[Any]) -> None:
    kept = Kept()
    speculative = SpeculativeConfig(method="draft_model", model=DRAFT, num_speculative_tokens=3)
    assert tokens(directory, kept, experts=True, speculative_config=speculative) == alone
    steps = [event for event in kept.events if event.kind == "batch"]
    assert len(kept.of(ExpertsUsed)) == len(steps) > 0
