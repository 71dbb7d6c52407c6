"""Experts in an engine that guesses, overlaps steps, and computes prompts elsewhere: the tokens stay the same."""

from pathlib import Path
from typing import Any

import pytest

import m5_chunked_prefill_spec
from m3_paged_attention.attention import native_library
from m3_paged_attention.expert_events import ExpertsUsed
from m6_multimodal_pd import (
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
