"""One step in flight: when outputs come, what an ended request keeps, and what breaks while a step is on its way."""

import ctypes
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from m1_single_request import DEFAULT_MODEL as TEXT_MODEL
from m1_single_request.events import StepDone
from m1_single_request.output_events import Sampled
from m1_single_request.sampler import Sampler
from m1_single_request.stop_checker import StopChecker, StopVerdict
from m1_single_request.trace_readers import Records
from m3_paged_attention.attention import native_library
from m3_paged_attention.models.decoder import Decoder
from m4_radix_cache.mem_cache.native_thread import NativeThread
from m4_radix_cache.new_token_ratio import NewTokenRatio
from m5_chunked_prefill_spec.events import Batch
from m5_chunked_prefill_spec.scheduler import Scheduler
from m6_multimodal_pd import (
    CacheConfig,
    ConfigError,
    EngineDeadError,
    ForwardError,
    KVCapacityError,
    LLMEngine,
    ModelConfig,
    PartError,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
    TraceConfig,
)
from m6_multimodal_pd.engine_core import EngineCore
from m6_multimodal_pd.model_runner import ModelRunner
from m6_multimodal_pd.overlap import engine_core
from m6_multimodal_pd.overlap.events import NormalOrder, StepArrived, StepLaunched
from m6_multimodal_pd.overlap.launcher import ForwardOutput, Launcher
from tests.equivalence.forced_retraction import ForcedRetractionInPieces
from tests.m4_radix_cache.engines import cached_len, ids
from tests.m6_multimodal_pd.engines import MakeEngine, check_drained, check_flushed, greedy, runner_of, setting
from tests.m6_multimodal_pd.late_launcher import LateLauncher
from tests.m6_multimodal_pd.test_speculation import make_drafting as make_drafting
from tests.support.engines import held

FEW = 200
PROMPTS = {"a": [5, 6, 7], "b": [8, 9, 10, 11], "c": [12, 13]}


class BreakingLauncher(LateLauncher):
    """Raises what it is told to when a forward has ended."""

    due: Exception | BaseException | None = None

    def _read(self, launched: ForwardOutput) -> None:
        super()._read(launched)
        if self.due is not None:
            error, BreakingLauncher.due = self.due, None
            raise error


@pytest.fixture(autouse=True)
def late_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core.OverlapEngineCore, "launcher_class", BreakingLauncher)
    monkeypatch.setattr(BreakingLauncher, "due", None)


def overlapped(make_engine: MakeEngine, **limits: Any) -> Any:
    return make_engine(**setting(8, **{"tokens": FEW, "enable_overlap": True} | limits))


def ask(engine: Any, params: SamplingParams | None = None, **prompts: list[int]) -> None:
    for rid, prompt in (prompts or PROMPTS).items():
        engine.add_request(prompt, params or greedy(6), request_id=rid)


def calls(engine: Any) -> Iterator[dict[str, Any]]:
    """The outputs of each call of `step`, to the end."""
    for _ in range(FEW):
        if not engine.has_unfinished_requests():
            return
        yield engine.step()
        engine.engine_core.check_invariants()
    raise AssertionError("it does not come to an end")


def wanted(make_engine: MakeEngine, params: SamplingParams | None = None) -> dict[str, Any]:
    """What the normal loop answers."""
    engine: Any = make_engine(**setting(8, tokens=FEW))
    ask(engine, params)
    return {rid: output for outputs in calls(engine) for rid, output in outputs.items()}


# --- when outputs come ------------------------------------------------------------------------------------------------


def test_each_call_returns_the_step_before_and_the_last_one_two(make_engine: MakeEngine) -> None:
    engine = overlapped(make_engine)
    ask(engine, a=PROMPTS["a"])
    lengths = [[len(output.outputs[0].token_ids) for output in outputs.values()] for outputs in calls(engine)]
    assert lengths == [[], [1], [2], [3], [4], [6]]
    assert engine.stats().num_steps == 6
    check_drained(engine)


def test_a_step_is_launched_before_the_tokens_of_the_one_before_have_arrived(make_engine: MakeEngine) -> None:
    engine, records = overlapped(make_engine), Records()
    engine.tracer.attach(records)
    ask(engine)
    list(calls(engine))
    order = [(r.step, r.event.kind) for r in records if r.event.kind in ("step_launched", "step_arrived", "step_done")]
    last = engine.stats().num_steps
    for step in range(1, last):  # the first one has prompts
        arrived, booked = order.index((step, "step_arrived")), order.index((step, "step_done"))
        launched = order.index((step + 1, "step_launched"))
        assert arrived < launched < booked if step == 1 else launched < arrived < booked
    assert [step for step, kind in order if kind == "step_done"] == list(range(1, last + 1))
    launched = records.of(StepLaunched)
    assert [event.behind for _, event in launched] == [None, *range(1, last)]
    assert [event.waited_for is None for _, event in launched] == [True, False, *[True] * (last - 2)]
    assert all(event.num_futures == event.num_tokens == 3 for _, event in launched[1:])
    assert len(records.of(StepArrived)) == last


def test_what_is_aborted_with_nothing_in_flight_ends_in_a_step_of_its_own(make_engine: MakeEngine) -> None:
    engine = overlapped(make_engine)
    ask(engine)
    assert engine.abort_request("a")
    outputs = engine.step()
    assert [(rid, output.finish_reason) for rid, output in outputs.items()] == [("a", "abort")]
    rest = [dict(outputs) for outputs in calls(engine)]
    assert all("a" not in outputs for outputs in rest) and rest[-1].keys() == {"b", "c"}
    check_drained(engine)


def test_a_prefix_that_is_computed_in_flight_is_not_computed_again(make_engine: MakeEngine) -> None:
    cached = []
    for overlap in (False, True):
        engine = make_engine(**setting(8, 128, tokens=FEW * 4, page_size=4, enable_overlap=overlap))
        for number in range(3):
            engine.add_request([*range(100, 200), number], greedy(4))
        list(calls(engine))
        cached.append(engine.stats().num_cached_tokens)
    assert cached[0] == cached[1] > 100


# --- ends that nobody could foresee -----------------------------------------------------------------------------------


def test_the_id_of_an_ended_request_is_free_while_its_last_step_is_in_flight(make_engine: MakeEngine) -> None:
    """Also if that step fails: the error is not that of the second request."""
    answers = wanted(make_engine, greedy(12))
    stop = answers["a"].token_ids[3]
    engine = overlapped(make_engine)
    engine.add_request(PROMPTS["a"], SamplingParams(max_tokens=12, stop_token_ids=[stop]), request_id="a")
    engine.add_request(PROMPTS["b"], greedy(12), request_id="b")
    steps = calls(engine)
    while "a" not in (outputs := next(steps)) or not outputs["a"].finished:
        pass
    drawn = SamplingParams(max_tokens=6, temperature=1.0, seed=5, frequency_penalty=0.5, ignore_eos=True)
    engine.add_request(PROMPTS["c"], drawn, request_id="a")
    BreakingLauncher.due = RuntimeError("too late for the first one")
    last = {rid: output for outputs in steps for rid, output in outputs.items()}
    engine = make_engine(**setting(8, tokens=FEW))
    assert last["a"].error is None and last["a"].token_ids == engine.generate(PROMPTS["c"], drawn).token_ids
    assert last["b"].error is not None


def test_those_of_a_prompt_that_is_retracted_behind_its_last_piece_are_there_once(make_engine: MakeEngine) -> None:
    found = []
    for parts in ({}, {"scheduler": ForcedRetractionInPieces}):
        engine = make_engine(parts, **setting(8, 16, tokens=FEW, enable_overlap=bool(parts)))
        ask(engine, greedy(30), b=PROMPTS["b"])
        for number in range(9):
            prompt = list(range(100 + number, 117 + 3 * number))
            ask(engine, SamplingParams(max_tokens=4, prompt_logprobs=1, temperature=0), **{f"a{number}": prompt})
        last = {rid: output for outputs in calls(engine) for rid, output in outputs.items()}
        found.append({rid: output.prompt_logprobs for rid, output in last.items()})
    assert engine.stats().num_retractions > 5
    assert found[0] == found[1]


def test_as_many_drafts_are_accepted_as_in_the_normal_loop(make_drafting: Any) -> None:
    """So the draft model reads the KV of the right tokens, also where drafts before them were wrong."""
    found = []
    for overlap in (False, True):
        engine = make_drafting(**setting(8, 96, method="draft_model", drafts=3, page_size=4, enable_overlap=overlap))
        ask(engine, greedy(30))
        outputs = {rid: output for outputs in calls(engine) for rid, output in outputs.items()}
        stats = engine.stats()
        found.append(({rid: o.token_ids for rid, o in outputs.items()}, stats.num_accepted_tokens))
        assert 5 < stats.num_accepted_tokens < stats.num_draft_tokens - 5
        check_drained(engine)
    (said, num_accepted), (said_late, num_accepted_late) = found
    assert said == said_late
    assert abs(num_accepted - num_accepted_late) <= len(PROMPTS), "the last step of an answer may have fewer drafts"


def test_each_request_that_leaves_is_said_once_and_an_idle_engine_expects_nothing_of_it(
    make_engine: MakeEngine,
) -> None:
    engine, records = overlapped(make_engine), Records()
    engine.tracer.attach(records)
    for number, (rid, prompt) in enumerate(PROMPTS.items()):
        ask(engine, greedy(3 + number), **{rid: prompt})
    ask(engine, greedy(9), d=[7, 7])
    list(calls(engine))
    batches = [event for _, event in records.of(Batch)]
    assert [rid for event in batches for rid in event.left] == ["a", "b", "c"]
    assert [event.num_running for event in batches] == [4, 4, 4, 3, 2, 1, 1, 1, 1], "no request that ends waits"
    assert engine.engine_core.scheduler.new_token_ratio.value == NewTokenRatio().value


class OneTokenMore(StopChecker):
    """Lets a request have one token more than it asked for."""

    def check(self, sequence: Any, new_token_ids: Any) -> StopVerdict:
        verdict = super().check(sequence, new_token_ids)
        is_over = len(sequence.output_token_ids) + len(new_token_ids) > sequence.sampling_params.max_tokens
        return verdict if is_over else StopVerdict(len(new_token_ids))


def test_a_stop_checker_of_ones_own_decides_where_a_request_ends(make_engine: MakeEngine) -> None:
    found = []
    for overlap in (False, True):
        engine = make_engine({"stop_checker": OneTokenMore}, **setting(8, tokens=FEW, enable_overlap=overlap))
        ask(engine, greedy(3), a=PROMPTS["a"])
        ask(engine, greedy(6), b=PROMPTS["b"])
        found.append({rid: output.token_ids for outputs in calls(engine) for rid, output in outputs.items()})
    assert found[0] == found[1] and [len(found[1][rid]) for rid in "ab"] == [4, 7]


def test_a_request_that_outgrows_the_memory_gets_its_token_in_flight_first(make_engine: MakeEngine) -> None:
    lengths = []
    for overlap in (False, True):
        engine = make_engine(**setting(8, tokens=16, page_size=4, enable_overlap=overlap))
        ask(engine, greedy(40), a=PROMPTS["a"])
        *_, last = calls(engine)
        assert isinstance(last["a"].error, KVCapacityError)
        lengths.append(len(last["a"].token_ids))
        check_flushed(engine)
    assert lengths[0] == lengths[1]


# --- what breaks in flight --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 4])
def test_a_forward_that_fails_ends_the_requests_of_its_step_and_no_others(make_engine: MakeEngine, call: int) -> None:
    answers = wanted(make_engine)
    engine, error = overlapped(make_engine), RuntimeError("the device dropped it")
    last: dict[str, Any] = {}
    ask(engine, a=PROMPTS["a"], b=PROMPTS["b"])
    for number, outputs in enumerate(calls(engine), start=1):
        last |= outputs
        if number == call:
            ask(engine, c=PROMPTS["c"])  # in no step yet
            BreakingLauncher.due = error
    assert {rid: output.error for rid, output in last.items()} == {"a": error, "b": error, "c": None}
    assert last["c"].token_ids == answers["c"].token_ids
    for rid in ("a", "b"):
        assert answers[rid].token_ids[: len(last[rid].token_ids)] == last[rid].token_ids
    check_drained(engine)
    ask(engine)
    again = {rid: output.token_ids for outputs in calls(engine) for rid, output in outputs.items()}
    assert again == {rid: output.token_ids for rid, output in answers.items()}
    check_flushed(engine)


@pytest.mark.parametrize("has_ended", [False, True], ids=["all run", "one has ended"])
def test_an_error_while_a_step_is_scheduled_ends_all_in_the_step_that_was_in_flight(
    make_engine: MakeEngine, has_ended: bool
) -> None:
    stop = wanted(make_engine)["a"].token_ids[2]
    engine, records = overlapped(make_engine), Records()
    engine.tracer.attach(records)
    ask(engine, SamplingParams(max_tokens=6, stop_token_ids=[stop], ignore_eos=True))
    core, scheduler = engine.engine_core, engine.engine_core.scheduler
    while core.in_flight is None or bool(core.late.ended) != has_ended:
        engine.step()
    running = set(scheduler.requests)
    scheduler.composer, composer = None, scheduler.composer
    outputs = engine.step()
    assert outputs.keys() == running and all(isinstance(o.error, PartError) for o in outputs.values())
    assert held(engine) == 0 and engine.engine_core.in_flight is None
    scheduler.composer = composer
    ask(engine)
    assert all(output.error is None for outputs in calls(engine) for output in outputs.values())
    done = [step for step, _ in records.of(StepDone)]
    assert done == list(range(1, engine.stats().num_steps + 1))
    check_flushed(engine)


def lost(*_: Any) -> None:
    raise torch.AcceleratorError("gone")


@pytest.mark.parametrize("error", [torch.AcceleratorError("gone"), EngineDeadError("gone")])
def test_a_device_lost_in_flight_ends_all_and_the_engine(
    make_engine: MakeEngine, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = overlapped(make_engine)
    ask(engine)
    engine.step()
    BreakingLauncher.due = error
    monkeypatch.setattr(engine.engine_core.launcher, "wait", lost)
    last = {rid: output for outputs in calls(engine) for rid, output in outputs.items()}
    assert last.keys() == PROMPTS.keys() and all(isinstance(o.error, EngineDeadError) for o in last.values())
    assert held(engine) == 0 and engine.engine_core.in_flight is None
    with pytest.raises(EngineDeadError):
        engine.add_request([1])
    engine.close()


class EventOfGPU:
    """In place of `torch.cuda.Event`: notes what is waited for."""

    log: list[str] = []  # noqa: RUF012

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.number = self.log.count("made")
        self.log.append("made")

    def record(self) -> None:
        self.log.append(f"recorded {self.number}")

    def synchronize(self) -> None:
        self.log.append(f"waited {self.number}")

    def elapsed_time(self, other: "EventOfGPU") -> float:
        assert self.number + 1 == other.number
        return 2.0


def test_on_a_gpu_a_step_is_waited_for_by_its_own_event(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step behind it, which is queued already, is not."""
    monkeypatch.setattr(torch.cuda, "Event", EventOfGPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(LateLauncher, "on_thread", 0.0)
    monkeypatch.setattr(EventOfGPU, "log", [])
    answers = wanted(make_engine)
    engine, records = overlapped(make_engine), Records()
    engine.tracer.attach(records)
    monkeypatch.setattr(engine.engine_core.launcher, "is_cuda", True)
    ask(engine)
    last = {rid: output.token_ids for outputs in calls(engine) for rid, output in outputs.items()}
    assert last == {rid: output.token_ids for rid, output in answers.items()}
    assert [event.device_ms for _, event in records.of(StepArrived)] == [2.0] * 6
    waits = [name for name in EventOfGPU.log if name.startswith("waited")]
    assert waits == [f"waited {number}" for number in range(1, 12, 2)]


def test_an_interrupt_while_a_step_is_in_flight_leaves_a_dead_engine_that_holds_nothing(
    make_engine: MakeEngine,
) -> None:
    engine = overlapped(make_engine)
    ask(engine)
    engine.step()
    BreakingLauncher.due = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert held(engine) == 0 and engine.engine_core.in_flight is None and not engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError):
        engine.step()
    engine.close()


def test_an_error_behind_the_end_of_a_request_takes_its_output_not_away(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last call books two steps; here the second one breaks."""
    engine = overlapped(make_engine)
    ask(engine, greedy(2), a=PROMPTS["a"])
    ask(engine, greedy(3), b=PROMPTS["b"])
    engine.step()
    engine.step()
    late, update = engine.engine_core.late, engine.engine_core.late.update
    updates: list[Any] = []

    def breaking(*step: Any) -> Any:
        updates.append(step)
        if len(updates) == 2:
            raise RuntimeError("the second update")
        return update(*step)

    monkeypatch.setattr(late, "update", breaking)
    outputs = engine.step()
    assert outputs["a"].finish_reason == "length" and isinstance(outputs["b"].error, PartError)
    assert len(updates) == 2 and not engine.has_unfinished_requests() and held(engine) == 0
    stats = engine.stats()
    assert stats.num_steps == 3 and stats.num_finished == {"length": 1, "error": 1}
    assert stats.num_prompt_tokens == len(PROMPTS["a"]) + len(PROMPTS["b"])


class OddSampler(Sampler):
    """Gives the second row what is no token."""

    def choose(self, logits: Any, metadata: Any) -> Any:
        tokens = super().choose(logits, metadata)
        if len(tokens) == 3:
            tokens[1] = -5
        return tokens


def test_what_is_no_token_ends_its_request_alone_and_is_no_input(make_engine: MakeEngine) -> None:
    answers = wanted(make_engine)
    engine = make_engine({"sampler": OddSampler}, **setting(8, tokens=FEW, enable_overlap=True))
    ask(engine)
    last = {rid: output for outputs in calls(engine) for rid, output in outputs.items()}
    assert isinstance(last["b"].error, PartError) and not last["b"].token_ids
    for rid in ("a", "c"):
        assert (last[rid].error, last[rid].token_ids) == (None, answers[rid].token_ids)
    assert engine.engine_core.launcher.future_map.tokens.min() >= 0
    check_drained(engine)


def test_a_request_in_pieces_that_has_ended_has_no_next_piece(make_engine: MakeEngine) -> None:
    """It keeps its row until its last piece has arrived. Nobody may retract it for that row, or wait for its end."""
    engine = make_engine(**setting(8, 8, tokens=128, page_size=1, schedule="prefill_first", enable_overlap=True))
    ask(engine, greedy(20), a=PROMPTS["a"], b=PROMPTS["b"])
    for _ in range(3):
        engine.step()
    engine.add_request(list(range(20, 60)), greedy(5), request_id="long")
    core, error = engine.engine_core, RuntimeError("the piece is lost")
    for _ in range(3):
        engine.step()
    assert core.in_flight.step.batch.rids == ["long"] and core.scheduler.chunked_req is not None
    BreakingLauncher.due = error
    outputs = engine.step()
    assert outputs["long"].error is error and [req.rid for req in core.late.ended] == ["long"]
    assert core.scheduler.chunked_req is None
    last = {rid: output for outputs in calls(engine) for rid, output in outputs.items()}
    assert {rid: output.error for rid, output in last.items()} == {"a": None, "b": None}
    check_drained(engine)


# --- on a thread of the native backend --------------------------------------------------------------------------------

native = pytest.mark.skipif(native_library.obstacle() is not None, reason=str(native_library.obstacle()))


def native_engine(
    overlap: bool, *readers: Any, parts: dict[str, Any] | None = None, quantization: Any = None, **scheduler: Any
) -> Any:
    model: Any = {"dtype": "float32", "attention_backend": "native", "quantization": quantization}
    return LLMEngine(
        parts=parts,
        model_config=ModelConfig(model=TEXT_MODEL, device="cpu", **model),
        scheduler_config=SchedulerConfig(enable_overlap=overlap, **scheduler),
        cache_config=CacheConfig(max_total_tokens=2000, debug=True),
        trace_config=TraceConfig(readers=readers),
    )


@pytest.fixture
def real_launcher(late_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()


@native
def test_engines_are_closed_at_any_moment_and_end_their_thread(real_launcher: None) -> None:
    for number in range(6):
        engine = native_engine(True)
        engine.add_request("a long story", greedy(40))
        for _ in range(number):
            engine.step()
        thread = engine.engine_core.launcher.thread
        engine.close()
        engine.close()
        assert thread.is_closed and thread.wait() == 0 and held(engine) == 0


@native
def test_the_memory_that_a_call_writes_outlives_it_also_where_close_is_interrupted(
    real_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = native_engine(True)
    engine.add_request("a long story", greedy(40))
    engine.step()
    launcher: Any = engine.engine_core.launcher
    memory, alive, close = weakref.ref(runner_of(engine).kv), [], launcher.close

    def interrupted() -> None:
        raise KeyboardInterrupt

    def closing() -> None:
        alive.append(memory() is not None)
        close()

    monkeypatch.setattr(launcher, "wait", interrupted)
    monkeypatch.setattr(launcher, "close", closing)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert alive == [True]


@native
def test_an_engine_that_nobody_closes_ends_its_thread(real_launcher: None) -> None:
    engine = native_engine(True)
    engine.add_request("a long story", greedy(40))
    engine.step()
    thread = engine.engine_core.launcher.thread
    assert engine.engine_core.in_flight is not None and not thread.is_closed
    del engine
    gc.collect()
    assert thread.is_closed


@native
def test_a_profile_begins_and_ends_when_no_step_is_in_flight(
    real_launcher: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, wait = list[Any](), Launcher.wait
    monkeypatch.setattr(Launcher, "wait", lambda launcher: waits.append(wait(launcher)))
    with native_engine(True) as engine:
        expected = engine.generate("a long story", greedy(9)).token_ids
        rid = engine.add_request("a long story", greedy(9))
        outputs = engine.step() | engine.step()
        waits.clear()
        engine.start_profile(tmp_path)
        assert len(waits) == 1
        outputs |= engine.step()
        (file,) = engine.stop_profile()
        assert len(waits) == 2 and file.is_file()
        while engine.has_unfinished_requests():
            outputs |= engine.step()
        assert outputs[rid].token_ids == expected


@pytest.mark.exhaustive
@native
def test_python_may_end_while_a_step_is_in_flight(real_launcher: None) -> None:
    program = """
from m1_single_request import DEFAULT_MODEL
from m6_multimodal_pd import LLMEngine, ModelConfig, SchedulerConfig
engine = LLMEngine(model_config=ModelConfig(model=DEFAULT_MODEL), scheduler_config=SchedulerConfig(enable_overlap=True))
engine.add_request("a long story")
engine.step()
assert engine.engine_core.in_flight is not None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


@native
def test_logits_on_the_thread_that_are_not_finite_are_the_error_of_the_normal_loop(real_launcher: None) -> None:
    errors, records = [], Records()
    for overlap in (False, True):
        with native_engine(overlap, records) as engine:
            engine.add_request("a long story", greedy(40), request_id="a")
            engine.step()
            engine.step()
            runner_of(engine).model.norm.fill_(float("nan"))
            last = {rid: output for outputs in calls(engine) for rid, output in outputs.items()}
            errors.append(last["a"].error)
    assert [type(error) for error in errors] == [ForwardError] * 2 and str(errors[0]) == str(errors[1])
    assert records.of(StepLaunched)[-1][1].is_async and all(event.token_id >= 0 for _, event in records.of(Sampled))


@native
def test_quantized_layers_and_output_layer_run_on_the_thread(real_launcher: None) -> None:
    answers, records = [], Records()
    for overlap in (False, True):
        with native_engine(overlap, records, quantization="int8") as engine:
            answers.append(engine.generate("a long story", greedy(12)).token_ids)
            assert runner_of(engine).model.head.kind == 1
    assert answers[0] == answers[1] and records.of(StepLaunched)[-1][1].is_async


class OwnForward(ModelRunner):
    def forward(self, batch: Any) -> Any:
        return -super().forward(batch)


class OwnModel(Decoder):
    def forward(self, *step: Any) -> Any:
        return -super().forward(*step)


class OwnChoice(Sampler):
    def choose(self, logits: Any, metadata: Any) -> Any:
        return super().choose(-logits, metadata)


OWN: dict[str, dict[str, Any]] = {"runner": {"model_runner": OwnForward}, "choice": {"sampler": OwnChoice}}


@native
@pytest.mark.parametrize("part", ["runner", "choice", "model", "head"])
def test_the_thread_leaves_nothing_out_that_a_user_has_put_around_a_forward(real_launcher: None, part: str) -> None:
    said = []
    for overlap in (False, True):
        with native_engine(overlap, parts=OWN.get(part)) as engine:
            model: Any = runner_of(engine).model
            if part == "model":
                model.__class__ = OwnModel
            elif part == "head":
                head = model.head
                model.head = lambda hidden: -head(hidden)  # noqa: B023
            said.append(engine.generate("a long story", greedy(8)))
    assert said[0].error is None and said[0].token_ids == said[1].token_ids


@native
@pytest.mark.parametrize(
    ("params", "parts", "reason"),
    [
        (greedy(9), None, None),
        (greedy(9, logprobs=1), None, "on a CPU the host chooses tokens that are not simply the best ones"),
        (greedy(9), OWN["choice"], "a part of the user's chooses its tokens"),
    ],
)
def test_the_trace_says_why_the_host_chooses_the_tokens(
    real_launcher: None, params: Any, parts: Any, reason: Any
) -> None:
    records = Records()
    with native_engine(True, records, parts=parts) as engine:
        engine.generate("a long story", params)
    first, second, *decodes = (event.waited_for for _, event in records.of(StepLaunched))
    assert first is None and second == "its prompts join the prefix cache first"
    assert len(decodes) == 7 and set(decodes) == {reason}


class Slow:
    """The native library, with a call that takes as many microseconds as its argument is large."""

    def __init__(self, library: Any) -> None:
        self.library, self.usleep = library, ctypes.CDLL(None).usleep

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)


class Interrupted(Slow):
    """After a launch Ctrl-C comes, before Python has the number of the call."""

    def thread_launch(self, *call: Any) -> int:
        self.library.thread_launch(*call)
        raise KeyboardInterrupt


@native
def test_a_call_whose_launch_was_interrupted_is_waited_for() -> None:
    """It reads memory that is freed then."""
    thread: Any = NativeThread(2)
    thread._library = Interrupted(thread._library)
    with pytest.raises(KeyboardInterrupt):
        thread.launch("usleep", 60_000)
    assert thread.wait() > 0.055
    thread.close()


@native
def test_a_thread_that_is_closed_while_another_one_uses_it_ends_its_calls_first() -> None:
    """When Python ends, for example, and a daemon thread still steps."""
    thread: Any = NativeThread(2)
    thread._library = Slow(thread._library)
    number, began = thread.launch("usleep", 60_000), time.perf_counter()
    closing = threading.Thread(target=thread.close)
    closing.start()
    while not thread.is_closed:
        time.sleep(0.001)
    assert thread.wait(number) > 0.055 and time.perf_counter() - began > 0.055
    with pytest.raises(EngineDeadError):
        thread.launch("usleep", 0)
    closing.join()
    assert thread.wait() == 0


@native
def test_a_step_on_the_host_begins_when_those_on_the_thread_have_ended(
    real_launcher: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the memory of all steps, and give it its newest tokens."""
    with native_engine(True, max_num_batched_tokens=1000) as engine:
        engine.add_request("a long story", greedy(40))
        engine.step()
        engine.step()
        launcher: Any = engine.engine_core.launcher
        thread, compute, waited = launcher.thread, launcher._compute, list[float]()
        monkeypatch.setattr(thread, "_library", Slow(thread._library))

        def noted(launched: ForwardOutput) -> None:
            waited.append(time.perf_counter() - began)
            compute(launched)

        monkeypatch.setattr(launcher, "_compute", noted)
        began = time.perf_counter()
        thread.launch("usleep", 60_000)
        engine.add_request([7] * 600, greedy(2))  # more than the one call takes
        engine.step()
        assert len(waited) == 1 and waited[0] > 0.055


# --- where steps do not overlap ---------------------------------------------------------------------------------------


@native
@pytest.mark.parametrize(
    ("backend", "guesses", "reason"),
    [
        ("torch", {}, "the torch backend has no thread"),
        ("native", {"method": "ngram"}, "drafts continue the newest tokens"),
    ],
)
def test_the_trace_says_why_steps_do_not_overlap_and_answers_are_the_same(
    real_launcher: None, backend: Any, guesses: dict[str, Any], reason: str
) -> None:
    said, records = [], Records()
    for overlap in (False, True):
        with LLMEngine(
            model_config=ModelConfig(model=TEXT_MODEL, device="cpu", dtype="float32", attention_backend=backend),
            scheduler_config=SchedulerConfig(enable_overlap=overlap),
            cache_config=CacheConfig(max_total_tokens=500),
            speculative_config=SpeculativeConfig(**guesses),
            trace_config=TraceConfig(readers=(records,)),
        ) as engine:
            engine.add_request("go on", greedy(3))
            outputs = engine.step()
            assert outputs, "the first call returns a token"
            said.append(engine.generate("go on", greedy(9)).token_ids)
    assert said[0] == said[1]
    ((_, event),) = records.of(NormalOrder)
    assert event.reason.startswith(reason) and event.reason in event.explain()


class OwnScheduler(Scheduler):
    def update_from_output(self, batch: Any, output: Any) -> Any:
        return super().update_from_output(batch, output)


class OwnRunner(ModelRunner):
    def execute_model(self, batch: Any) -> Any:
        return super().execute_model(batch)


@pytest.mark.parametrize("parts", [{"scheduler": OwnScheduler}, {"model_runner": OwnRunner}])
def test_parts_with_verbs_of_their_own_are_called_in_the_normal_order(
    make_engine: MakeEngine, parts: dict[str, Any]
) -> None:
    engine = make_engine(parts, **setting(enable_overlap=True))
    assert str(*parts) in engine.engine_core.obstacle
    ask(engine)
    assert engine.step().keys() == PROMPTS.keys()


def test_an_engine_core_of_ones_own_does_not_overlap(make_engine: MakeEngine) -> None:
    class Own(EngineCore):
        pass

    with pytest.raises(ConfigError, match="enable_overlap=True has no effect on an engine_core"):
        make_engine({"engine_core": Own}, **setting(enable_overlap=True))
    engine = make_engine({"engine_core": Own}, **setting())
    assert type(engine.engine_core) is Own


def test_kv_that_a_step_in_flight_computes_is_not_cached_when_its_request_is_preempted(make_engine: MakeEngine) -> None:
    """That step may fail. With drafts not even its tokens are known."""
    limits = setting(1, page_size=1, policy="priority", priority_preemption=True, enable_overlap=True)
    with make_engine(**limits) as engine:
        engine.add_request(ids(6), greedy(20), request_id="low")
        for _ in range(4):
            engine.step()
        req = engine.engine_core.scheduler.requests["low"]
        arrived = req.kv_committed_len
        engine.add_request(ids(5, first=90), greedy(2), request_id="high", priority=20)
        engine.step()
        assert engine.stats().num_preemptions == 1 and req.seqlen == arrived + 2, "its token came when it was waiting"
        assert cached_len(engine, [*req.origin_input_ids, *req.output_ids]) == arrived
        while engine.has_unfinished_requests():
            engine.step()
