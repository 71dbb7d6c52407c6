"""The engine that sees, on a CUDA device: transformers' tokens, alone and in a group, and weights that are replaced.

The steps of the Triton kernels are CUDA graphs here, unless a test says otherwise; what is recorded on a CPU in
`test_graphs.py` runs natively.
"""

import gc
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from m1_single_request.trace_readers import Records
from m3_paged_attention.attention.host_to_device import to_device
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.events import StepLimits
from m3_paged_attention.models.layers import MLP
from m6_multimodal_pd import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig, TraceConfig
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.events import Reported
from m6_multimodal_pd.events import GraphsCaptured, GraphsUnavailable
from m6_multimodal_pd.overlap.events import StepArrived, StepLaunched
from tests.equivalence.harness import check_answer, check_cuts
from tests.m5_chunked_prefill_spec.conftest import draft_directory as draft_directory
from tests.m6_multimodal_pd.engines import counts, greedy, runner_of, setting
from tests.m6_multimodal_pd.pd_engines import Listener
from tests.m6_multimodal_pd.seeing import MOST_TOKENS, Theirs, asking
from tests.m6_multimodal_pd.test_engine import QUESTIONS
from tests.support.engines import ids
from tests.support.profiled import step_with_copies

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(max_tokens=MOST_TOKENS, ignore_eos=True)
BACKENDS = ["torch", "triton"]


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """float32 means float32: no TF32 in the products that are compared."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
    gc.collect()
    torch.cuda.empty_cache()  # other processes need the memory of closed engines


def on_gpu(directory: Path, backend: Any, cuda_graphs: bool | None = None, **configs: Any) -> LLMEngine:
    settings: dict[str, Any] = {"device": "cuda", "attention_backend": backend, "cuda_graphs": cuda_graphs}
    config = ModelConfig(model=directory, dtype="float32", **settings)
    return LLMEngine(model_config=config, **{**setting(tokens=2048, debug=False), **configs})


def check_answers(engine: Any, theirs: Theirs, questions: Sequence[tuple[str | int, ...]]) -> None:
    prompts = [engine.chat_prompt(asking(*question)) for question in questions]
    references = [theirs.answer(prompt) for prompt in prompts]
    outputs = list(engine.generate_batch(prompts, PARAMS).values())
    for reference, output, question in zip(references, outputs, questions, strict=True):
        assert output.error is None
        check_answer(reference, output.token_ids, str(question))
    check_cuts(references)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pictures_clips_and_texts_are_answered_as_by_transformers(
    seeing_directory: Path, their_model: Theirs, backend: str
) -> None:
    with on_gpu(seeing_directory, backend) as engine:
        check_answers(engine, their_model, list(QUESTIONS.values()))
        runs, items, _ = counts(engine)
        assert 0 < runs < items
        check_answers(engine, their_model, list(QUESTIONS.values()))
        assert engine.stats().kv_tokens == 0


@pytest.mark.parametrize("transport", ["in_process", "shared_memory"])
def test_two_engines_on_one_device_answer_as_one(seeing_directory: Path, their_model: Theirs, transport: Any) -> None:
    group, records = DisaggregationConfig(transport=transport), Records()
    trace = TraceConfig(readers=(records,))
    with on_gpu(seeing_directory, "auto", disaggregation_config=group, trace_config=trace) as engine:
        check_answers(engine, their_model, list(QUESTIONS.values()))
    paths = [event.text for _, event in records.of(Reported) if event.what == "path_chosen"]
    path = "GPU memory" if transport == "shared_memory" else "host memory"
    assert paths and all(f"goes through {path}" in text for text in paths), paths


@pytest.mark.parametrize("transport", ["in_process", "shared_memory"])
def test_two_engines_of_default_sizes_divide_one_device(tiny_directory: Path, transport: Any) -> None:
    listener = Listener()
    configs = {"cache_config": CacheConfig(), "scheduler_config": SchedulerConfig()}
    group = DisaggregationConfig(transport=transport)
    trace = TraceConfig(readers=(listener,))
    with on_gpu(tiny_directory, "auto", disaggregation_config=group, trace_config=trace, **configs) as engine:
        assert len(engine.generate(PROMPTS[1], greedy(8)).token_ids) == 8
    sizes = [dict(event.facts) for event in listener.told("kv_sized")]
    total = torch.cuda.mem_get_info()[1]
    assert [sized["total_bytes"] for sized in sizes] == [total // 2] * 2
    assert sum(int(sized["num_bytes"]) for sized in sizes) <= 0.9 * total


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_engines_of_a_group_on_two_devices_answer_as_one(seeing_directory: Path, their_model: Theirs) -> None:
    config = ModelConfig(model=seeing_directory, dtype="float32")
    group = DisaggregationConfig(devices="cuda:0,cuda:1")
    limits = setting(tokens=2048, debug=False)
    with LLMEngine(model_config=config, disaggregation_config=group, **limits) as engine:
        check_answers(engine, their_model, list(QUESTIONS.values()))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_engine_on_the_second_gpu_uses_no_memory_of_the_first(seeing_directory: Path, their_model: Theirs) -> None:
    before = torch.cuda.memory_allocated(0)
    config = ModelConfig(model=seeing_directory, dtype="float32", device="cuda:1")
    limits = setting(tokens=2048, debug=False, target_gap_ms=50.0, cost_table=None)
    with LLMEngine(model_config=config, **limits) as engine:
        check_answers(engine, their_model, list(QUESTIONS.values()))
        engine.update_weights(seeing_directory)
        check_answers(engine, their_model, list(QUESTIONS.values())[:3])
        assert torch.cuda.memory_allocated(0) == before and torch.cuda.current_device() == 0


def test_limits_follow_from_the_device(tiny_directory: Path) -> None:
    records = Records()
    configs = {"cache_config": CacheConfig(), "scheduler_config": SchedulerConfig()}
    with on_gpu(tiny_directory, "auto", **configs, trace_config=TraceConfig(readers=(records,))) as engine:
        ((_, limits),) = records.of(StepLimits)
        assert limits.max_num_seqs in (256, 512) and limits.max_num_batched_tokens >= 2048
        assert limits.total_bytes == torch.cuda.get_device_properties(0).total_memory
        prompts = [ids(20, 7 * number) for number in range(limits.max_num_seqs)]
        assert all(output.error is None for output in engine.generate_batch(prompts, greedy(20)).values())


def test_an_engine_sizes_its_memory_and_loads_other_weights(seeing_directory: Path, their_model: Theirs) -> None:
    cache = CacheConfig(gpu_memory_utilization=0.2)
    records = Records()
    with on_gpu(seeing_directory, "auto", cache_config=cache, trace_config=TraceConfig(readers=(records,))) as engine:
        check_answers(engine, their_model, list(QUESTIONS.values())[:3])
        engine.update_weights(seeing_directory)
        check_answers(engine, their_model, list(QUESTIONS.values())[:3])
        assert [event.num_bytes > 0 for _, event in records.of(GraphsCaptured)] == [True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_overlapped_steps_answer_as_the_normal_loop(seeing_directory: Path, their_model: Theirs, backend: str) -> None:
    records, limits = Records(), setting(tokens=2048, debug=False, enable_overlap=True)
    with on_gpu(seeing_directory, backend, **limits, trace_config=TraceConfig(readers=(records,))) as engine:
        check_answers(engine, their_model, list(QUESTIONS.values()))
        check_answers(engine, their_model, list(QUESTIONS.values()))
    assert all(event.is_async for _, event in records.of(StepLaunched))
    assert any(event.device_ms > event.waited_ms for _, event in records.of(StepArrived))


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every replay of a graph."""
    seen: list[Any] = []
    replay = torch.cuda.CUDAGraph.replay

    def noted(self: torch.cuda.CUDAGraph) -> None:
        seen.append(self)
        replay(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", noted)
    return seen


PROMPTS = [list(range(5, 5 + length)) for length in (9, 30, 5, 17, 3)]


def texts_of(engine: LLMEngine) -> list[tuple[int, ...]]:
    """The answers to texts that end one by one, so that batches of every size run."""
    params = [greedy(12 - number) for number in range(len(PROMPTS))]
    return [output.token_ids for output in engine.generate_batch(PROMPTS, params).values()]


@pytest.mark.parametrize("most", [1, 5, 12])
@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
def test_replayed_steps_give_the_tokens_of_eager_ones(
    tiny_directory: Path, method: Any, most: int, replays: list[Any]
) -> None:
    limits = setting(most, method=method, tokens=2048, debug=False, draft_model=tiny_directory)
    with on_gpu(tiny_directory, "triton", cuda_graphs=False, **limits) as engine:
        expected = texts_of(engine)
        assert not replays and runner_of(engine).kv.step is None
    with on_gpu(tiny_directory, "triton", **limits) as engine:
        assert texts_of(engine) == expected
        assert texts_of(engine) == expected
        assert len(replays) > 10 and len(set(map(id, replays))) > (most > 1)


def test_new_weights_are_replayed_where_the_old_ones_were(
    tiny_directory: Path, draft_directory: Path, replays: list[Any]
) -> None:
    limits = setting(5, tokens=2048, debug=False)
    with on_gpu(draft_directory, "triton", **limits) as engine:
        expected = texts_of(engine)
    with on_gpu(tiny_directory, "triton", **limits) as engine:
        assert texts_of(engine) != expected
        model, step = runner_of(engine).model, runner_of(engine).kv.step
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.update_weights(draft_directory)
        assert torch.cuda.max_memory_allocated() - before <= model.embedding.nbytes
        assert runner_of(engine).model is model and runner_of(engine).kv.step is step
        replays.clear()
        assert texts_of(engine) == expected
        assert replays


def test_a_replay_allocates_nothing_and_moves_nothing(tiny_directory: Path) -> None:
    with on_gpu(tiny_directory, "triton", **setting(5, method="ngram", drafts=2, tokens=2048, debug=False)) as engine:
        step: Any = runner_of(engine).kv.step
        tensors = (*step.inputs.tensors(), step.output)
        addresses = [tensor.data_ptr() for tensor in tensors]
        device = torch.device("cuda")
        for lens in ([1], [1, 1, 1], [3, 2, 1], [3, 3, 3, 3, 3]):
            total = sum(lens)
            tables, slots = np.zeros((len(lens), 2), dtype=np.int32), np.zeros(total, dtype=np.int64)
            layout = to_device(AttentionMetadata.build(lens, [4] * len(lens), tables, slots), device)
            tokens = layout.slot_mapping
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            with torch.inference_mode():
                assert step(tokens, tokens, layout).shape[0] == total
            torch.cuda.synchronize()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert [tensor.data_ptr() for tensor in tensors] == addresses


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlapped"])
def test_a_decode_step_waits_for_its_tokens_and_for_nothing_else(tiny_directory: Path, overlap: bool) -> None:
    params = [greedy(12), greedy(12, temperature=1.0, seed=1), greedy(12, logprobs=2), greedy(12)]
    with on_gpu(tiny_directory, "triton", **setting(5, tokens=2048, debug=False, enable_overlap=overlap)) as engine:
        for prompt, own in zip(PROMPTS, params, strict=False):
            engine.add_request(prompt, own)
        for _ in range(4):
            engine.step()
        try:
            with warnings.catch_warnings():  # torch warns once that the mode is a prototype
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # The tokens, the flags of unusable rows, and five columns of log-probabilities, all behind the last launch. An
        # overlapped step waits for one event, which is no synchronisation to torch.
        expected = [0] if overlap else range(2, 8)
        assert len(waits) in expected, [str(wait.message) for wait in waits]


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlapped"])
@pytest.mark.parametrize("own", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 1}], ids=["greedy", "drawn"])
def test_a_replayed_decode_is_one_copy_from_the_host(
    tiny_directory: Path, replays: list[Any], own: dict[str, Any], overlap: bool
) -> None:
    limits = setting(5, tokens=2048, debug=False, enable_overlap=overlap)
    with on_gpu(tiny_directory, "triton", **limits) as engine:
        for prompt in PROMPTS[:3]:
            engine.add_request(prompt, greedy(16, **own))
        for _ in range(6):
            engine.step()
        replays.clear()
        assert [step_with_copies(engine)[1] for _ in range(4)] == [1] * 4
        assert len(replays) == 4


def test_a_step_that_cannot_be_captured_leaves_the_device_usable(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_gpu(tiny_directory, "triton", cuda_graphs=False) as engine:
        expected = texts_of(engine)
    usual = MLP.__call__

    def asking_mlp(self: MLP, hidden: torch.Tensor) -> torch.Tensor:
        hidden.sum().item()
        return usual(self, hidden)

    monkeypatch.setattr(MLP, "__call__", asking_mlp)
    records, stream = Records(), torch.cuda.current_stream()
    with on_gpu(tiny_directory, "triton", trace_config=TraceConfig(readers=(records,))) as engine:
        ((_, event),) = records.of(GraphsUnavailable)
        assert "captur" in event.reason and torch.cuda.current_stream() == stream
        assert texts_of(engine) == expected


def test_kv_takes_what_the_graphs_leave(tiny_directory: Path, replays: list[Any]) -> None:
    """Nearly all memory is named, and the graphs are captured behind the KV memory: they must find theirs."""
    records, cache = Records(), CacheConfig(gpu_memory_utilization=0.97)
    limits = {**setting(64, debug=False), "cache_config": cache, "trace_config": TraceConfig(readers=(records,))}
    with on_gpu(tiny_directory, "triton", **limits) as engine:
        assert records.of(GraphsCaptured) and not records.of(GraphsUnavailable)
        free, total = torch.cuda.mem_get_info()
        assert total - free <= 0.975 * total
        texts_of(engine)
        assert replays
