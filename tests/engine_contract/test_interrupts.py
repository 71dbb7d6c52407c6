"""Ctrl-C at any moment: a step is whole or held, every answer is right, and nothing is lost or held in the end.

SIGINT is sent as Python code of the milestones begins or returns, at moments chosen at random, thousands of them. The
program that drives the engine catches `KeyboardInterrupt` and goes on. A second SIGINT in the same call, or another
exception that is no `Exception`, leaves a dead engine that can be closed.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

import m1_single_request
from m1_single_request import EngineDeadError
from tests.engine_contract.crowd import (
    NUM_TOKENS,
    PROMPTS,
    SEATS,
    Answers,
    MakeEngine,
    answers_of,
    calls_of,
    check_the_rest,
    run,
    submit,
)
from tests.engine_contract.variants import Variant, calling
from tests.m6_multimodal_pd.pd_engines import Group
from tests.support.engines import EngineMaker, greedy, unfinished

CHECKOUT = Path(m1_single_request.__file__).parents[1]
MILESTONES = tuple(str(directory) for directory in CHECKOUT.glob("m[1-9]_*"))


@pytest.fixture(autouse=True)
def python_s_own_handler() -> Iterator[None]:
    """SIGINT raises `KeyboardInterrupt`; a test leaves the handler as it was."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    left = signal.signal(signal.SIGINT, before)
    assert left is signal.default_int_handler, "a call of the engine left its own handler behind"


@pytest.fixture
def expected(make_m1: Any) -> Answers:
    """The tokens of every answer without an interrupt."""
    return answers_of(make_m1)


# --- at random moments ------------------------------------------------------------------------------------------------


class Storm:
    """Sends SIGINT at a call or return inside the code of the milestones: once in each block, or not at all."""

    def __init__(self, seed: int, every: int) -> None:
        """`every`: the number of calls and returns between two SIGINTs, on average."""
        self.rng, self.every, self.num_sent, self.has_sent = Random(seed), every, 0, False

    @contextmanager
    def rages(self) -> Iterator[None]:
        self.has_sent = False
        sys.setprofile(self._look)
        try:
            yield
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        is_ours = event in ("call", "c_return") and frame.f_code.co_filename.startswith(MILESTONES)
        if is_ours and not self.has_sent and self.rng.random() < 1 / self.every:
            self.has_sent = True
            self.num_sent += 1
            signal.raise_signal(signal.SIGINT)


def calm(engine: Any, storm: Storm, call: Callable[[], Any]) -> Any:
    """Make a call again until it is not interrupted; returns its result."""
    while True:
        with storm.rages():
            return call()


def serve(engine: Any, storm: Storm) -> dict[str, Any]:
    """Serve the crowd through a storm, by every kind of call; returns the last outputs by their names in `PROMPTS`."""
    names = {
        calm(engine, storm, lambda p=p, n=n: engine.add_request(PROMPTS[p], greedy(n))): p
        for p, n in NUM_TOKENS.items()
    }
    gone = calm(engine, storm, lambda: engine.add_request([7, 8, 9], greedy(40)))
    stream, streamed = calm(engine, storm, lambda: engine.stream(PROMPTS["a"], greedy(NUM_TOKENS["a"]))), None
    last: dict[str, Any] = {}
    for number, _ in enumerate(unfinished(engine)):
        if number == 3:
            calm(engine, storm, lambda: engine.abort_request(gone))
        with storm.rages():
            for rid, output in engine.step().items():
                assert rid not in last or not last[rid].finished, "reported after its end"
                last[rid] = output
        if number % 2 and (streamed is None or not streamed.finished):
            with storm.rages():
                streamed = next(stream)
    assert last.pop(gone).finish_reason == "abort"
    assert streamed is not None and [*[streamed], *stream][-1].finished
    return {names[rid]: output for rid, output in last.items()}


def check_answers(last: dict[str, Any], expected: Answers) -> None:
    """Every request has ended, with its tokens."""
    assert last.keys() == PROMPTS.keys()
    for name, output in last.items():
        assert (output.finish_reason, output.error, output.token_ids) == ("length", None, expected[name]), name


def weather(make: Callable[[], Any], expected: Answers, *, rounds: int, every: int) -> tuple[Any, int]:
    """Serve the crowd `rounds` times with one engine; returns the engine and the number of SIGINTs."""
    engine, storm = make(), Storm(5, every)
    for _ in range(rounds):
        check_answers(serve(engine, storm), expected)
    return engine, storm.num_sent


def test_interrupts_at_random_moments_change_no_answer_and_leave_nothing(
    variant: Variant, make_engine: MakeEngine, expected: Answers
) -> None:
    engine, num_sent = weather(lambda: make_engine(seats=SEATS, budget=6), expected, rounds=2, every=120)
    assert num_sent > 40
    engine.step()
    variant.check_drained(engine)
    assert run(variant, engine) == {}


@pytest.mark.exhaustive
def test_thousands_of_interrupts_change_no_answer_and_leave_nothing(
    variant: Variant, make_engine: MakeEngine, expected: Answers
) -> None:
    for every in (40, 400):
        engine, num_sent = weather(lambda: make_engine(seats=SEATS, budget=6), expected, rounds=20, every=every)
        assert num_sent > 100
        engine.step()
        variant.check_drained(engine)


def test_interrupts_at_random_moments_do_m1_no_harm(loaded_m1: Any, expected: Answers) -> None:
    make = EngineMaker(m1_single_request, loaded_m1)
    engine, num_sent = weather(make, expected, rounds=3, every=100)
    assert num_sent > 60
    engine.engine_core.scheduler.check_invariants()
    assert engine.stats().kv_tokens == 0
    make.check()


def test_interrupts_at_random_moments_do_a_group_of_engines_no_harm(tiny_directory: Path, expected: Answers) -> None:
    with Group(tiny_directory, 1, 2) as group:
        _, num_sent = weather(lambda: group.engine, expected, rounds=2, every=250)
        assert num_sent > 40
        group.engine.step()
        group.check_drained()


@pytest.mark.parametrize("call", ["generate", "generate_batch", "stream"])
def test_an_interrupted_call_for_answers_gives_up_its_requests(
    variant: Variant, make_engine: MakeEngine, expected: Answers, call: str
) -> None:
    calls: dict[str, Callable[[Any], Any]] = {
        "generate": lambda engine: engine.generate(PROMPTS["a"], greedy(9)),
        "generate_batch": lambda engine: engine.generate_batch([PROMPTS["a"], PROMPTS["b"]], greedy(9)),
        "stream": lambda engine: list(engine.stream(PROMPTS["a"], greedy(9))),
    }
    runner = calling(variant, "model_runner", interrupt_once())
    engine = make_engine({"model_runner": runner}, seats=SEATS)
    with pytest.raises(KeyboardInterrupt):
        calls[call](engine)
    assert run(variant, engine) == {}
    assert engine.stats().num_finished == {"abort": 2 if call == "generate_batch" else 1}
    assert engine.generate(PROMPTS["a"], greedy(NUM_TOKENS["a"])).token_ids == expected["a"]


def interrupt_once(*, times: int = 1, at: int = 2) -> Callable[[Any, Any], None]:
    """Send SIGINT, `times` times, at the `at`th step."""
    steps: list[int] = []

    def interrupt(part: Any, starts: Any) -> None:
        steps.append(1)
        for _ in range(times if len(steps) == at else 0):
            signal.raise_signal(signal.SIGINT)

    return interrupt


# --- what a user sees -------------------------------------------------------------------------------------------------


def test_a_step_ends_before_its_interrupt_is_delivered_and_its_outputs_come_with_the_next_call(
    variant: Variant, make_engine: MakeEngine, expected: Answers
) -> None:
    engine = make_engine({"model_runner": calling(variant, "model_runner", interrupt_once())}, seats=SEATS)
    submit(engine)
    first = engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.stats().num_steps == 2
    outputs = engine.step()
    assert outputs.keys() >= first.keys() and engine.stats().num_steps == 3
    check_the_rest(variant, engine, first | outputs | run(variant, engine), expected, {})


@contextmanager
def as_stderr(descriptor: int) -> Iterator[None]:
    """Put another file in the place of the process's stderr."""
    kept = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@pytest.mark.sample(2)
def test_a_terminal_is_told_that_the_step_goes_on(variant: Variant, make_engine: MakeEngine) -> None:
    """A long prefill: the first Ctrl-C has no visible effect until the step is over."""
    engine = make_engine({"model_runner": calling(variant, "model_runner", interrupt_once(at=1))})
    master, slave = os.openpty()
    with as_stderr(slave), pytest.raises(KeyboardInterrupt):
        engine.generate(list(range(5, 105)), greedy(2))
    assert os.read(master, 1000).split() == b"stopping after this step; press Ctrl-C again to stop now".split()
    os.close(master)
    os.close(slave)


@pytest.mark.sample(2)
def test_a_file_in_place_of_the_terminal_gets_no_message(
    variant: Variant, make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine({"model_runner": calling(variant, "model_runner", interrupt_once(at=1))})
    with (tmp_path / "stderr").open("wb") as file, as_stderr(file.fileno()), pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS["a"], greedy(2))
    assert (tmp_path / "stderr").read_bytes() == b""


# --- the second one ---------------------------------------------------------------------------------------------------


def check_dead(variant: Variant, engine: Any, before: Any) -> None:
    """Every call says so, nothing is held, and the totals are those after the last finished step."""
    for call in calls_of(engine):
        with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
            call()
    assert not engine.has_unfinished_requests() and not engine.abort_request("a")
    after = engine.stats()
    assert (after.num_waiting, after.num_running, after.kv_tokens, after.kv_bytes) == (0, 0, 0, 0)
    for total in ("num_steps", "num_finished", "num_prompt_tokens", "num_output_tokens"):
        assert getattr(after, total) == getattr(before, total), total
    assert not list(variant.owners(engine))
    engine.close()
    assert not list(variant.owners(engine))


@pytest.mark.parametrize("at", [1, 3])
def test_a_second_interrupt_inside_a_step_stops_it_at_once_and_leaves_a_dead_engine(
    variant: Variant, make_engine: MakeEngine, at: int
) -> None:
    engine = make_engine(
        {"model_runner": calling(variant, "model_runner", interrupt_once(times=2, at=at))}, seats=SEATS
    )
    submit(engine)
    for _ in range(at - 1):
        engine.step()
    before = engine.stats()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    check_dead(variant, engine, before)


@pytest.mark.parametrize("role", ["output_processor", "sampler"])
def test_a_part_that_raises_what_is_no_exception_leaves_a_dead_engine(
    variant: Variant, make_engine: MakeEngine, role: str
) -> None:
    """In the middle of outputs, or between the forward and the update."""
    base, method = variant.part(role), {"output_processor": "make_output", "sampler": "__call__"}[role]
    calls: list[int] = []

    def interrupted(part: Any, *arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return getattr(base, method)(part, *arguments, **keywords)

    engine = make_engine({role: type("Interrupted", (base,), {method: interrupted})}, seats=SEATS)
    submit(engine)
    before = engine.stats()
    with pytest.raises(KeyboardInterrupt):
        for _ in unfinished(engine):
            before = engine.stats()
            engine.step()
    check_dead(variant, engine, before)


@pytest.mark.sample(3)
def test_a_rejected_request_kills_nothing(variant: Variant, make_engine: MakeEngine, expected: Answers) -> None:
    engine = make_engine(seats=SEATS)
    submit(engine)
    for prompt in ("", [10**9], [1.5]):
        with pytest.raises(m1_single_request.InvalidPromptError):
            engine.add_request(prompt, greedy(1))
    check_the_rest(variant, engine, run(variant, engine), expected, {})


# --- handlers, threads, close -----------------------------------------------------------------------------------------


@pytest.mark.sample(3)
def test_a_handler_of_the_program_is_called_once_after_the_step_and_at_once_by_a_second_interrupt(
    variant: Variant, make_engine: MakeEngine, expected: Answers
) -> None:
    """As with asyncio, whose handler raises nothing: the step goes on to its end."""
    inside, seen = [False], []

    def before_forward(part: Any, starts: Any) -> None:
        inside[0] = True
        send(part, starts)
        inside[0] = False

    for times in (1, 2):
        send = interrupt_once(times=times)
        engine = make_engine({"model_runner": calling(variant, "model_runner", before_forward)}, seats=SEATS)
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(inside[0]))
        submit(engine)
        check_the_rest(variant, engine, run(variant, engine), expected, {})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert seen == [False, True]


@pytest.mark.sample(2)
def test_a_program_that_ignores_interrupts_is_not_interrupted(
    variant: Variant, make_engine: MakeEngine, expected: Answers
) -> None:
    engine = make_engine({"model_runner": calling(variant, "model_runner", interrupt_once(times=3))}, seats=SEATS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    submit(engine)
    last = run(variant, engine)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    check_the_rest(variant, engine, last, expected, {})


@pytest.mark.sample(2)
def test_an_engine_of_another_thread_leaves_interrupts_to_the_main_thread(
    variant: Variant, load: Callable[..., Any], expected: Answers
) -> None:
    found: dict[str, Any] = {}

    def work() -> None:
        with EngineMaker(variant.package, load(variant.package, variant.part("model_loader")))(
            variant.parts(), **variant.limits(SEATS, None, None)
        ) as engine:
            submit(engine)
            found.update(run(variant, engine))

    thread = threading.Thread(target=work)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    thread.join()
    check_answers(found, expected)


@pytest.mark.sample(3)
def test_an_interrupted_close_frees_everything(variant: Variant, make_engine: MakeEngine) -> None:
    engine = make_engine(seats=SEATS)
    submit(engine)
    engine.step()
    storm = Storm(3, every=1)
    with storm.rages():
        engine.close()
    assert storm.num_sent
    engine.close()
    assert not list(variant.owners(engine)) and not engine.has_unfinished_requests()
