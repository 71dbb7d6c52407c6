"""Engines whose steps are CUDA graphs: the same answers, and what starts, replaces and drops the graphs.

On the CPU, with graphs that are recorded (`recorded_graphs.py`). Natively: `test_gpu.py`.
"""

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from m1_single_request.trace_readers import Records
from m3_paged_attention.attention.torch_backend import TorchBackend
from m3_paged_attention.expert_events import ExpertsUsed
from m3_paged_attention.models.layers import MLP
from m6_multimodal_pd import ConfigError, DisaggregationConfig, LLMEngine, ModelConfig, TraceConfig
from m6_multimodal_pd.events import GraphsCaptured, GraphsUnavailable
from tests.equivalence.models import save_random_model
from tests.kernels import references
from tests.kernels.references import assert_close
from tests.m5_chunked_prefill_spec.conftest import draft_directory as draft_directory
from tests.m5_chunked_prefill_spec.engines import knowing
from tests.m6_multimodal_pd.engines import finish, greedy, runner_of, setting
from tests.m6_multimodal_pd.recorded_graphs import (
    GRAPH_BYTES,
    RecordedGraph,
    graphs_of_engines as graphs_of_engines,
    recorded_graphs as recorded_graphs,
    wanted_graphs as wanted_graphs,
)
from tests.m6_multimodal_pd.seeing import MOST_TOKENS, Theirs, asking
from tests.support.engines import ids

Graphs = list[RecordedGraph]
PROMPTS = [ids(9), ids(30, 100), ids(5, 300), ids(17, 500), ids(3, 700), ids(1, 900)]


@contextmanager
def serving(directory: Path, **more: Any) -> Iterator[tuple[LLMEngine, Records]]:
    """An engine for at most five requests at once, and its trace; `more` as for `setting`, or a configuration."""
    records, limits = Records(), {"max_num_seqs": 5, "max_num_batched_tokens": 64}
    trace = TraceConfig(readers=(records,), experts=more.pop("trace_experts", False))
    named = {name: more.pop(name) for name in ("model_config", "disaggregation_config", "parts") if name in more}
    configs = setting(**{**limits, **more})
    configs["model_config"] = ModelConfig(model=directory, device="cpu", dtype="float32")
    with LLMEngine(**{**configs, **named}, trace_config=trace) as engine:
        yield engine, records


def ask(engine: LLMEngine, prompts: Sequence[Any] = PROMPTS, max_tokens: int = 12) -> list[tuple[int, ...]]:
    """The answers to all prompts. They end one by one, so that batches of every size run."""
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(max_tokens - number), request_id=str(number))
    outputs = finish(engine)
    return [outputs[str(number)].token_ids for number in range(len(prompts))]


def answers_of(m1: Any, max_tokens: int = 12) -> list[tuple[int, ...]]:
    return [m1.generate(prompt, greedy(max_tokens - n)).token_ids for n, prompt in enumerate(PROMPTS)]


def replayed(graphs: Graphs) -> int:
    return sum(graph.num_replays for graph in graphs)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_decodes_are_replayed_and_prompts_are_not(tiny_directory: Path, graphs_of_engines: Graphs, m1: Any) -> None:
    with serving(tiny_directory) as (engine, records):
        ((_, captured),) = records.of(GraphsCaptured)
        assert (captured.model, captured.decode_sizes, captured.verify_sizes) == ("target", (1, 2, 4, 5), ())
        assert len(graphs_of_engines) == 4
        engine.generate(PROMPTS[1], greedy(1))
        assert replayed(graphs_of_engines) == 0
        assert ask(engine) == answers_of(m1)
        assert all(graph.num_replays > 0 for graph in graphs_of_engines)


def test_drafts_are_verified_in_graphs(tiny_directory: Path, graphs_of_engines: Graphs, m1: Any) -> None:
    """Rows of one token and of several, in one batch, with right and with wrong drafts."""
    answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers_of(m1), strict=True)}
    parts = {"proposer": knowing(answers, wrong_every=3)}
    with serving(tiny_directory, method="ngram", drafts=3, parts=parts) as (engine, records):
        ((_, captured),) = records.of(GraphsCaptured)
        assert captured.verify_sizes == (1, 2, 4, 8, 16, 20) and len(graphs_of_engines) == 10
        assert ask(engine) == list(answers.values())
        stats = engine.stats()
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        buckets = runner_of(engine).kv.step.limits.buckets()
        wide = [graph for graph, bucket in zip(graphs_of_engines, buckets, strict=True) if bucket.width == 4]
        assert len(wide) == 6 and replayed(wide) > 4


def test_a_draft_model_has_graphs_of_its_own(
    tiny_directory: Path, draft_directory: Path, graphs_of_engines: Graphs, m1: Any
) -> None:
    limits: dict[str, Any] = {"method": "draft_model", "drafts": 3, "draft_model": draft_directory}
    with serving(tiny_directory, **limits) as (engine, records):
        found = [event for _, event in records.of(GraphsCaptured)]
        assert [event.model for event in found] == ["target", "draft"]
        assert [event.decode_sizes for event in found] == [(1, 2, 4, 5)] * 2
        assert [event.verify_sizes for event in found] == [(1, 2, 4, 8, 16, 20), ()]
        assert ask(engine) == answers_of(m1)
        stats, of_target = engine.stats(), graphs_of_engines[:10]
        assert stats.num_accepted_tokens > 10
        assert replayed(graphs_of_engines[10:]) > replayed(of_target) > 0


def test_what_is_decoded_behind_pictures(
    seeing_directory: Path, their_model: Theirs, graphs_of_engines: Graphs
) -> None:
    """A token behind an image is not at the position of its index (M-RoPE). Steps with images run eagerly."""
    questions: list[tuple[str | int, ...]] = [("c", 1), (2,), ("v", "b", 2), ("a", "a", 3)]
    with serving(seeing_directory) as (engine, _):
        prompts = [engine.chat_prompt(asking(*question)) for question in questions]
        expected = [their_model.answer(prompt).token_ids for prompt in prompts]
        for number, prompt in enumerate(prompts):
            engine.add_request(prompt, greedy(MOST_TOKENS), request_id=str(number))
        outputs = finish(engine)
        assert [outputs[str(number)].token_ids for number in range(4)] == expected
        assert replayed(graphs_of_engines) >= MOST_TOKENS - 1


@pytest.mark.exhaustive
@pytest.mark.interpreter
def test_an_engine_on_the_triton_kernels(tiny_directory: Path, wanted_graphs: Graphs, m1: Any) -> None:
    """Few tokens, because they run in the interpreter: `test_graph_runner.py` has every bucket."""
    config = ModelConfig(model=tiny_directory, device="cpu", dtype="float32", attention_backend="triton")
    with serving(tiny_directory, max_num_seqs=2, model_config=config) as (engine, _):
        outputs = list(engine.generate_batch(PROMPTS[-2:], [greedy(4), greedy(3)]).values())
    for output, prompt in zip(outputs, PROMPTS[-2:], strict=True):
        assert output.token_ids == m1.generate(prompt, greedy(len(output.token_ids))).token_ids
    assert replayed(wanted_graphs) == 3


@pytest.mark.interpreter
def test_a_graph_of_the_triton_experts_holds_any_choice(recorded_graphs: Graphs) -> None:
    """It was captured with the choices of a warm-up, and they change from step to step."""
    pytest.importorskip("triton", reason="triton is not installed")
    from m3_paged_attention.attention.triton_backend import TritonBackend

    torch.manual_seed(0)
    gate_up, down = torch.randn(6 * 2 * 32, 64) / 8, torch.randn(6 * 64, 32) / 8
    layer, graph = TritonBackend().experts(gate_up, down, 6), torch.cuda.CUDAGraph()
    hidden, experts, weights = torch.zeros(20, 64), torch.zeros(20, 2, dtype=torch.int64), torch.zeros(20, 2)
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local"):
        out = layer(hidden, experts, weights)
    for spread in (6, 3, 2):  # of all experts, of three, all tokens with the same two
        chosen = torch.stack([torch.randperm(spread)[:2] for _ in range(20)])
        for place, value in ((hidden, torch.randn(20, 64)), (experts, chosen), (weights, torch.rand(20, 2))):
            place.copy_(value)
        graph.replay()
        assert_close(out, references.experts(hidden, experts, weights, gate_up, down, 6), references.EXPERTS)


def test_a_model_with_experts_answers_in_graphs_unless_its_choices_are_recorded(
    tmp_path: Path, graphs_of_engines: Graphs
) -> None:
    directory = save_random_model(tmp_path, "qwen3_moe", stop_ids=())
    with serving(directory, model_config=eager(directory)) as (engine, _):
        expected = ask(engine)
    with serving(directory) as (engine, records):
        assert ask(engine) == expected
        assert records.of(GraphsCaptured) and replayed(graphs_of_engines) > 0
    num_graphs = len(graphs_of_engines)
    with serving(directory, trace_experts=True) as (engine, records):
        assert ask(engine) == expected
        assert records.of(ExpertsUsed) and not records.of(GraphsCaptured)
    assert len(graphs_of_engines) == num_graphs


# --- start, change, end -----------------------------------------------------------------------------------------------


def test_new_weights_are_replayed_by_the_same_graphs(
    tiny_directory: Path, draft_directory: Path, graphs_of_engines: Graphs, m1: Any
) -> None:
    with serving(draft_directory, model_config=eager(draft_directory)) as (engine, _):
        of_others = ask(engine)
    assert of_others != answers_of(m1)
    with serving(tiny_directory) as (engine, records):
        ask(engine)
        step, before = runner_of(engine).kv.step, [graph.num_replays for graph in graphs_of_engines]
        engine.update_weights(draft_directory)
        assert runner_of(engine).kv.step is step
        assert len(records.of(GraphsCaptured)) == 1 and len(graphs_of_engines) == 4
        assert ask(engine) == of_others
        assert [graph.num_replays for graph in graphs_of_engines] == [2 * number for number in before]


def eager(directory: Path) -> ModelConfig:
    return ModelConfig(model=directory, device="cpu", dtype="float32", cuda_graphs=False)


def test_a_closed_engine_holds_no_graph_even_where_the_user_keeps_its_models(
    tiny_directory: Path, draft_directory: Path, graphs_of_engines: Graphs
) -> None:
    limits: dict[str, Any] = {"method": "draft_model", "draft_model": draft_directory}
    gc.disable()
    try:
        with serving(tiny_directory, **limits) as (engine, _):
            runner = runner_of(engine)
            _models = [runner.model, runner.draft_runner.model]
            memories = [runner.kv, runner.draft_runner.kv]
            alive = [weakref.ref(each) for kv in memories for each in (kv, kv.step)]
            del memories
        assert [each() for each in alive] == [None] * 4
    finally:
        gc.enable()
    engine.close()


def test_an_engine_that_only_computes_prompts_captures_none(
    tiny_directory: Path, graphs_of_engines: Graphs, m1: Any
) -> None:
    group = DisaggregationConfig(transport="in_process")
    with serving(tiny_directory, disaggregation_config=group) as (engine, _):
        engines: Any = engine.engine_core.router.links.engines  # type: ignore[attr-defined]
        steps = {name: each.core.executor.worker.model_runner.kv.step for name, each in engines.items()}
        assert steps["prefill-0"] is None and steps["decode-0"] is not None
        outputs = list(engine.generate_batch(PROMPTS, greedy(6)).values())
        assert [output.token_ids for output in outputs] == [m1.generate(p, greedy(6)).token_ids for p in PROMPTS]
        assert replayed(graphs_of_engines) > 0


# --- what cannot be captured ------------------------------------------------------------------------------------------


def test_a_step_that_asks_for_a_value_runs_eagerly_and_the_trace_says_why(
    tiny_directory: Path, graphs_of_engines: Graphs, m1: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = MLP.__call__

    def asking_mlp(self: MLP, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.abs().max().item() < 1e9 or hidden.isnan().any()
        return usual(self, hidden)

    monkeypatch.setattr(MLP, "__call__", asking_mlp)
    with serving(tiny_directory) as (engine, records):
        ((_, event),) = records.of(GraphsUnavailable)
        assert event.model == "target" and "not permitted when stream is capturing" in event.reason
        assert event.reason in event.explain()
        assert not records.of(GraphsCaptured)
        assert ask(engine) == answers_of(m1)
        assert replayed(graphs_of_engines) == 0


@pytest.mark.parametrize("nth", [1, 8], ids=["the largest", "one of the draft model"])
def test_graphs_that_find_no_memory_leave_their_model_eager(
    tiny_directory: Path, draft_directory: Path, graphs_of_engines: Graphs, m1: Any, monkeypatch: Any, nth: int
) -> None:
    """The one model, not the other."""
    made: list[int] = []

    class Full(torch.cuda.graph):  # type: ignore[misc]
        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            made.append(1)
            if len(made) == nth:
                raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "graph", Full)
    limits: dict[str, Any] = {"max_num_seqs": 2, "method": "draft_model", "draft_model": draft_directory}
    with serving(tiny_directory, **limits) as (engine, records):
        ((_, event),) = records.of(GraphsUnavailable)
        ((_, captured),) = records.of(GraphsCaptured)
        assert event.reason == "OutOfMemoryError: CUDA out of memory"
        assert (event.model, captured.model) == (("target", "draft") if nth < 8 else ("draft", "target"))
        assert ask(engine) == answers_of(m1)
        assert replayed(graphs_of_engines) > 0


def test_a_backend_that_plans_on_the_host_runs_eagerly(
    tiny_directory: Path, graphs_of_engines: Graphs, m1: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m6_multimodal_pd.model_loader.resolve", lambda name, device: TorchBackend())
    with serving(tiny_directory) as (engine, records):
        ((_, event),) = records.of(GraphsUnavailable)
        assert event.reason == "the torch backend reads lengths on the host, which a graph cannot"
        assert not graphs_of_engines
        assert ask(engine) == answers_of(m1)
        assert runner_of(engine)._graph_bytes() == 0


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_memory_of_graphs_is_measured_before_that_of_kv_is_sized(
    tiny_directory: Path, draft_directory: Path, graphs_of_engines: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real engine gave all that was free to KV, and had no memory left when it captured."""
    limits: dict[str, Any] = {"method": "draft_model", "draft_model": draft_directory}
    with serving(tiny_directory, **limits) as (engine, records):
        captured = [event.num_bytes for _, event in records.of(GraphsCaptured)]
        assert captured[0] > 11 * GRAPH_BYTES and captured[1] > 4 * GRAPH_BYTES
        runner, empty, sizes = runner_of(engine), torch.empty, []

        def noted(*size: Any, **kind: Any) -> torch.Tensor:
            made = empty(*size, **kind)
            sizes.append(made.nbytes)
            return made

        monkeypatch.setattr(torch, "empty", noted)
        with torch.inference_mode():
            runner.profile_run(64)
        assert sum(captured) in sizes
        assert ask(engine, PROMPTS[:2]), "the graphs of the engine are still there"


def test_costs_are_those_of_graphs(tiny_directory: Path, graphs_of_engines: Graphs) -> None:
    """Where steps are measured for `target_gap_ms`, those of one token are replayed, as in the engine."""
    with serving(tiny_directory) as (engine, _):
        runner_of(engine).measure_costs(8)
        assert replayed(graphs_of_engines) > 0


# --- configuration ----------------------------------------------------------------------------------------------------


def test_graphs_are_for_gpus_unless_named() -> None:
    assert not ModelConfig(device="cpu").wants_graphs and ModelConfig().cuda_graphs is None
    assert not ModelConfig(device="cpu", cuda_graphs=False).wants_graphs
    with pytest.raises(ConfigError, match="cuda_graphs=True needs a GPU, and the device is cpu"):
        ModelConfig(device="cpu", cuda_graphs=True)


def test_graphs_are_the_default_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert ModelConfig().wants_graphs and ModelConfig(device="cuda", cuda_graphs=True).wants_graphs
    assert not ModelConfig(cuda_graphs=False).wants_graphs
