"""Ctrl-C at any moment: a step is whole or held, every answer is right, and nothing is lost or held in the end.

SIGINT is sent as Python code of the milestones begins or returns, at moments chosen at random, thousands of them. The
program that drives the engine catches `KeyboardInterrupt` and goes on. A second SIGINT in the same call, or another
exception that is no `Exception`, leaves a dead engine that can be closed.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

import m1_single_request
from m1_single_request import EngineClosedError, EngineDeadError, EngineError, PartError
from m1_single_request.held_interrupt import HeldInterrupt, set_handler
from tests.engine_contract.crowd import (
    NUM_TOKENS,
    PROMPTS,
    SEATS,
    Answers,
    MakeEngine,
    calls_of,
    check_the_rest,
    run,
    submit,
)
from tests.engine_contract.variants import WITH_M1, Variant, calling, each_of, failing_part
from tests.m6_multimodal_pd.pd_engines import Group
from tests.support.engines import EngineMaker, greedy, unfinished

pytestmark = pytest.mark.sample(3)

CHECKOUT = Path(m1_single_request.__file__).parents[1]
TOTALS = {
    *("num_steps", "num_finished", "num_prompt_tokens", "num_output_tokens"),  # m1
    *("useful_tokens", "padded_tokens", "num_preemptions"),  # m2, m3
    *("num_cached_tokens", "num_evicted_tokens", "num_retractions"),  # m4
    *("num_draft_tokens", "num_accepted_tokens", "num_verifications"),  # m5
    *("num_encoder_runs", "num_encoded_items", "num_encoded_tokens", "num_encoder_hits", "encoder_seconds"),  # m6
    "num_evicted_items",
}
MILESTONES = tuple(str(directory) for directory in CHECKOUT.glob("m[1-9]_*"))


@pytest.fixture(autouse=True)
def python_s_own_handler() -> Iterator[None]:
    """SIGINT raises `KeyboardInterrupt`; a test leaves the handler as it was."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    left = signal.signal(signal.SIGINT, before)
    assert left is signal.default_int_handler, "a call of the engine left its own handler behind"


variant = each_of(WITH_M1)
"""Every milestone, in each of its ways to run."""


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
        if is_ours and not self.has_sent and self._strikes():
            self.has_sent = True
            self.num_sent += 1
            signal.raise_signal(signal.SIGINT)

    def _strikes(self) -> bool:
        return self.rng.random() < 1 / self.every


class Bolt(Storm):
    """Sends one SIGINT: at the `at`th call or return inside the code of the milestones."""

    def __init__(self, at: int) -> None:
        super().__init__(seed=0, every=1)
        self.num_left = at

    def _strikes(self) -> bool:
        self.num_left -= 1
        return self.num_left == 0


def calm(storm: Storm, call: Callable[[], Any]) -> Any:
    """Make a call again until it is not interrupted; returns its result."""
    while True:
        with storm.rages():
            return call()


def keywords(engine: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and options of a request that is more than a prompt, as far as the milestone knows them."""
    return (
        {"n": 2} if type(engine).__module__ >= "m3" else {},
        {"cache_salt": "s"} if "cache_salt" in engine.request_options else {},
    )


def serve(engine: Any, storm: Storm) -> dict[str, Any]:
    """Serve the crowd through a storm, by every kind of call; returns the last outputs by their names in `PROMPTS`."""
    names = {calm(storm, lambda p=p, n=n: engine.add_request(PROMPTS[p], greedy(n))): p for p, n in NUM_TOKENS.items()}
    gone = calm(storm, lambda: engine.add_request([7, 8, 9], greedy(40)))
    params, options = keywords(engine)
    family = calm(storm, lambda: engine.add_request(PROMPTS["a"], greedy(NUM_TOKENS["a"], **params), **options))
    stream, streamed = calm(storm, lambda: engine.stream(PROMPTS["a"], greedy(NUM_TOKENS["a"]))), None
    last: dict[str, Any] = {}
    for number, _ in enumerate(unfinished(engine)):
        with storm.rages():
            for rid, output in engine.step().items():
                assert rid not in last or not last[rid].finished, "reported after its end"
                last[rid] = output
        if number == 2:
            calm(storm, lambda: engine.abort_request(gone))
        if number == 5:
            with storm.rages():
                engine.generate_batch([PROMPTS["b"], PROMPTS["c"]], greedy(2))
        if number % 2 and (streamed is None or not streamed.finished):
            with storm.rages():
                streamed = next(stream)
        for ask in (engine.stats, getattr(engine, "flush_cache", engine.stats)):
            with storm.rages():
                ask()
    assert last.pop(gone).finish_reason == "abort"
    answers = [answer.token_ids for answer in last.pop(family).outputs]
    of_names = {names[rid]: output for rid, output in last.items()}
    assert answers == [of_names["a"].token_ids] * params.get("n", 1)
    assert [streamed, *stream][-1].token_ids == answers[0]
    return of_names


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
    for every in (80, 160, 400):  # more often, and an arrival, of some 300 calls, is almost never whole
        engine, num_sent = weather(lambda: make_engine(seats=SEATS, budget=6), expected, rounds=20, every=every)
        assert num_sent > 100
        engine.step()
        variant.check_drained(engine)


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
    engine = interrupted_engine(variant, make_engine)
    with pytest.raises(KeyboardInterrupt):
        calls[call](engine)
    assert run(variant, engine) == {}
    assert engine.stats().num_finished == {"abort": 2 if call == "generate_batch" else 1}
    assert engine.generate(PROMPTS["a"], greedy(NUM_TOKENS["a"])).token_ids == expected["a"]


def test_an_interrupted_stream_can_be_read_on_and_loses_no_output(variant: Variant, make_engine: MakeEngine) -> None:
    def read(storm: Storm) -> list[tuple[Any, Any]]:
        outputs: list[Any] = []
        stream = make_engine(seats=SEATS).stream(PROMPTS["a"], greedy(12, logprobs=1))
        while not outputs or not outputs[-1].finished:
            with storm.rages():
                outputs.append(next(stream))
        assert list(stream) == []
        return [(output.token_ids, output.outputs[0].cumulative_logprob) for output in outputs]

    calm_answer = read(Storm(0, every=10**9))
    for seed in range(4):
        storm = Storm(seed, every=5)
        assert read(storm) == calm_answer and storm.num_sent > 10


class Interrupts:
    """Sends SIGINT, `num` times, when a method of a part has done its work the next time."""

    num = 0

    def after(self, base: Any, method: str) -> Any:
        """A class like `base` with this method."""
        original = getattr(base, method)

        def interrupted(part: Any, *arguments: Any, **keywords: Any) -> Any:
            result = original(part, *arguments, **keywords)
            num, self.num = self.num, 0
            for _ in range(num):
                signal.raise_signal(signal.SIGINT)
            return result

        return type("Interrupting", (base,), {method: interrupted})


@pytest.mark.parametrize("call", ["add_request", "stream"])
def test_an_interrupted_arrival_is_given_up_and_its_id_is_free(
    variant: Variant, make_engine: MakeEngine, expected: Answers, call: str
) -> None:
    interrupts = Interrupts()
    engine = make_engine({"scheduler": interrupts.after(variant.part("scheduler"), "add_request")}, seats=SEATS)
    params, options = keywords(engine)
    interrupts.num = 1
    with pytest.raises(KeyboardInterrupt):
        getattr(engine, call)(PROMPTS["a"], greedy(4, **params), request_id="late", **options)
    assert run(variant, engine) == {}
    assert engine.stats().num_finished == {"abort": 1}
    engine.add_request(PROMPTS["a"], greedy(NUM_TOKENS["a"]), request_id="late")
    assert run(variant, engine)["late"].token_ids == expected["a"]


@pytest.mark.parametrize("num", [1, 2])
def test_an_interrupted_flush_is_whole_or_leaves_a_dead_engine(
    variant: Variant, make_engine: MakeEngine, expected: Answers, num: int
) -> None:
    interrupts = Interrupts()
    engine = make_engine({"scheduler": interrupts.after(variant.part("scheduler"), "reset")}, seats=SEATS)
    if not hasattr(engine, "flush_cache"):
        assert variant.milestone < "m4"
        return
    assert engine.generate(PROMPTS["a"], greedy(NUM_TOKENS["a"])).token_ids == expected["a"]
    before, interrupts.num = engine.stats(), num
    with pytest.raises(KeyboardInterrupt):
        engine.flush_cache()
    assert not engine.stats().evictable_size
    if num == 2:
        check_dead(variant, engine, before)
    else:
        submit(engine)
        check_answers(run(variant, engine), expected)


def interrupted_engine(variant: Variant, make_engine: MakeEngine, *, times: int = 1, at: int = 2) -> Any:
    """An engine whose runner sends SIGINT, `times` times, at the `at`th step."""
    interrupt = interrupt_once(times=times, at=at)
    return make_engine({"model_runner": calling(variant, "model_runner", interrupt)}, seats=SEATS)


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
    engine = interrupted_engine(variant, make_engine)
    submit(engine)
    first = engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.stats().num_steps == 2
    outputs = engine.step()
    assert outputs.keys() >= first.keys() and engine.stats().num_steps == 3
    check_the_rest(variant, engine, first | outputs | run(variant, engine), expected, {})


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal: its screen, and what a program writes to."""
    ends = os.openpty()
    yield ends
    for descriptor in ends:
        os.close(descriptor)


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
def test_a_message_on_the_terminal_announces_that_the_step_goes_on(
    variant: Variant, make_engine: MakeEngine, terminal: tuple[int, int]
) -> None:
    """A long prefill: the first Ctrl-C has no visible effect until the step is over."""
    engine = interrupted_engine(variant, make_engine, at=1)
    screen, keyboard = terminal
    with as_stderr(keyboard), pytest.raises(KeyboardInterrupt):
        engine.generate(list(range(5, 105)), greedy(2))
    assert os.read(screen, 1000).split() == b"stopping after this step; press Ctrl-C again to stop now".split()


@pytest.mark.sample(2)
def test_a_file_in_place_of_the_terminal_gets_no_message(
    variant: Variant, make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = interrupted_engine(variant, make_engine, at=1)
    with (tmp_path / "stderr").open("wb") as file, as_stderr(file.fileno()), pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS["a"], greedy(2))
    assert (tmp_path / "stderr").read_bytes() == b""


@pytest.mark.sample(2)
def test_a_terminal_that_takes_no_output_costs_nothing(
    variant: Variant, make_engine: MakeEngine, expected: Answers, terminal: tuple[int, int]
) -> None:
    engine = interrupted_engine(variant, make_engine)
    submit(engine)
    _, keyboard = terminal
    os.set_blocking(keyboard, False)
    with suppress(BlockingIOError):
        while True:
            os.write(keyboard, b"x" * 1000)
    last = engine.step()
    with as_stderr(keyboard), pytest.raises(KeyboardInterrupt):
        engine.step()
    check_the_rest(variant, engine, last | run(variant, engine), expected, {})


def test_a_second_interrupt_on_the_way_out_of_a_call_is_a_keyboard_interrupt_and_the_next_one_too() -> None:
    """A pending signal is handled as the function begins that sets the handler back."""
    sent: list[int] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument is set_handler and len(sent) < 2:
            sent.append(1)
            signal.raise_signal(signal.SIGINT)

    def leave() -> None:
        with HeldInterrupt():
            sent.append(1)
            signal.raise_signal(signal.SIGINT)
            sys.setprofile(look)

    try:
        with pytest.raises(KeyboardInterrupt):
            leave()
    finally:
        sys.setprofile(None)
    assert len(sent) == 2 and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_stops_a_block_in_a_block_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), HeldInterrupt(), HeldInterrupt():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("two were held")


def test_an_asyncio_loop_is_woken_once_for_one_interrupt() -> None:
    calls: list[int] = []

    async def serve() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: calls.append(1))
        with HeldInterrupt():
            signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    asyncio.run(serve())
    assert calls == [1]


# --- the second one ---------------------------------------------------------------------------------------------------


def check_dead(variant: Variant, engine: Any, before: Any, *streams: Any) -> None:
    """Every call fails for it, nothing is held, and the totals are those after the last finished step."""
    for call in [*calls_of(engine), *(partial(next, stream) for stream in streams)]:
        with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
            call()
    assert not engine.has_unfinished_requests() and not engine.abort_request("a")
    after = engine.stats()
    assert (after.num_waiting, after.num_running, after.kv_tokens, after.kv_bytes) == (0, 0, 0, 0)
    for total in TOTALS & vars(after).keys():
        assert getattr(after, total) == getattr(before, total), total
    assert not list(variant.owners(engine))
    engine.close()
    assert not list(variant.owners(engine))


@pytest.mark.parametrize("at", [1, 3])
def test_a_second_interrupt_inside_a_step_stops_it_at_once_and_leaves_a_dead_engine(
    variant: Variant, make_engine: MakeEngine, at: int
) -> None:
    engine = interrupted_engine(variant, make_engine, times=2, at=at)
    submit(engine)
    stream = engine.stream(PROMPTS["a"], greedy(9))
    for _ in range(at - 1):
        engine.step()
    before = engine.stats()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    stream.mailbox.clear()
    check_dead(variant, engine, before, stream)


def test_a_second_interrupt_on_the_way_out_of_a_step_leaves_an_engine_that_can_be_closed(
    variant: Variant, make_engine: MakeEngine
) -> None:
    """At the beginning of each of the first functions that are called when the step is over."""
    for at in range(1, 7):
        engine = make_engine(seats=SEATS)
        submit(engine)
        interrupt_behind(engine.engine_core, at)
        try:
            engine.step()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        assert not engine.engine_core.is_changing
        engine.close()


def interrupt_behind(core: Any, at: int) -> None:
    """Send SIGINT at the end of `run_step`, and once more as the function begins that is called then as the `at`th."""
    run_step, left = core.run_step, [at]

    def look(frame: FrameType, event: str, argument: Any) -> None:
        left[0] -= event == "call"
        if not left[0]:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    def interrupted() -> Any:
        outputs = run_step()
        signal.raise_signal(signal.SIGINT)
        sys.setprofile(look)
        return outputs

    core.run_step = interrupted


def test_outputs_that_wait_do_not_hide_that_a_call_was_stopped(variant: Variant, make_engine: MakeEngine) -> None:
    interrupts = Interrupts()
    engine = make_engine({"scheduler": interrupts.after(variant.part("scheduler"), "update_from_output")}, seats=SEATS)
    submit(engine)
    stream = engine.stream(PROMPTS["a"], greedy(9))
    next(stream)  # the outputs of the others wait for `step`
    interrupts.num = 2
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            pass
    with pytest.raises(EngineDeadError):
        engine.step()


@pytest.mark.parametrize("role", ["output_processor", "sampler", "detokenizer"])
def test_a_part_that_raises_what_is_no_exception_leaves_a_dead_engine(
    variant: Variant, make_engine: MakeEngine, role: str
) -> None:
    """In the middle of outputs, between the forward and the update, or in the middle of the update."""
    methods = {"output_processor": "make_output", "sampler": "__call__", "detokenizer": "push"}
    stopped = failing_part(variant, role, methods[role], KeyboardInterrupt(), call=5)
    engine = make_engine({role: stopped}, seats=SEATS)
    submit(engine)
    before = engine.stats()
    with pytest.raises(KeyboardInterrupt):
        for _ in unfinished(engine):
            before = engine.stats()
            engine.step()
    check_dead(variant, engine, before)


@pytest.mark.parametrize(
    ("call", "method"),
    [
        (lambda engine, stream: engine.add_request([7, 8], greedy(1)), "add_request"),
        (lambda engine, stream: engine.abort_request("a"), "finish_requests"),
        (lambda engine, stream: stream.close(), "finish_requests"),
        (lambda engine, stream: engine.close(), "reset"),
    ],
    ids=["add_request", "abort_request", "stream.close", "close"],
)
def test_a_second_interrupt_inside_another_call_leaves_a_dead_engine_too(
    variant: Variant, make_engine: MakeEngine, call: Callable[[Any, Any], Any], method: str
) -> None:
    interrupts = Interrupts()
    engine = make_engine({"scheduler": interrupts.after(variant.part("scheduler"), method)}, seats=SEATS)
    submit(engine)
    stream = engine.stream(PROMPTS["a"], greedy(9))
    engine.step()
    before, interrupts.num = engine.stats(), 2
    with pytest.raises(KeyboardInterrupt):
        call(engine, stream)
    check_dead(variant, engine, before)


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
    engine = interrupted_engine(variant, make_engine, times=3)
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


def check_closed(engine: Any, stream: Any) -> None:
    assert not engine.has_unfinished_requests() and not engine.abort_request("a")
    for call in [*calls_of(engine), lambda: next(stream)]:
        with pytest.raises(EngineClosedError):
            call()
    engine.close()


def test_an_interrupt_inside_close_is_delivered_when_the_engine_is_closed(
    variant: Variant, make_engine: MakeEngine
) -> None:
    interrupts = Interrupts()
    engine = make_engine({"scheduler": interrupts.after(variant.part("scheduler"), "reset")}, seats=SEATS)
    submit(engine)
    stream = engine.stream(PROMPTS["a"], greedy(9))
    engine.step()
    interrupts.num = 1
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert not list(variant.owners(engine))
    check_closed(engine, stream)


def test_a_close_that_is_interrupted_anywhere_can_be_made_again(variant: Variant, make_engine: MakeEngine) -> None:
    for at in (1, 2, 4, 8, 12, 20, 35, 60, 100):
        engine, bolt = make_engine(seats=SEATS), Bolt(at)
        submit(engine)
        stream = engine.stream(PROMPTS["a"], greedy(9))
        engine.step()
        with bolt.rages():
            engine.close()
        engine.close()
        assert not list(variant.owners(engine))
        check_closed(engine, stream)


# --- a group of engines -----------------------------------------------------------------------------------------------


@pytest.fixture
def busy_group(tiny_directory: Path) -> Iterator[Group]:
    """A group in this process with the crowd inside; tokens have come."""
    with Group(tiny_directory, 1, 2) as group:
        submit(group.engine)
        group.until(lambda: bool(group.last))
        yield group


@pytest.mark.parametrize("call", ["step", "stats"])
def test_a_second_interrupt_leaves_a_dead_group(busy_group: Group, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, interrupts = busy_group.engine, Interrupts()
    stream, before = engine.stream(PROMPTS["a"], greedy(9)), engine.stats()
    with monkeypatch.context() as patch:
        patch.setattr(type(busy_group.router), "listen", interrupts.after(type(busy_group.router), "listen").listen)
        interrupts.num = 2
        with pytest.raises(KeyboardInterrupt):
            getattr(engine, call)()
    for later in [*calls_of(engine), lambda: list(stream)]:
        with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
            later()
    assert not engine.has_unfinished_requests() and not engine.abort_request("a")
    assert engine.stats().num_finished == before.num_finished
    busy_group.settle()


def test_after_a_close_of_a_group_that_was_stopped_no_call_reaches_an_engine(
    busy_group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket may be closed already."""
    engine, links = busy_group.engine, busy_group.router.links

    def stop() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(links, "close", stop)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
        patch.setattr(links, "send", lambda name, message: pytest.fail(f"{message} was sent to {name}"))
        engine.stats()
        for call in calls_of(engine):
            with pytest.raises(EngineError):
                call()
    engine.close()
    assert not busy_group.engines


def test_an_error_of_the_router_ends_all_requests_and_the_group_goes_on(
    busy_group: Group, expected: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(timeout_s: float) -> Any:
        raise RuntimeError("the router is broken")

    with monkeypatch.context() as patch:
        patch.setattr(busy_group.router, "listen", fail)
        outputs = busy_group.engine.step()
    unfinished_ones = [rid for rid in PROMPTS if rid not in busy_group.last or not busy_group.last[rid].finished]
    assert sorted(outputs) == sorted(unfinished_ones)
    assert all(isinstance(output.error, PartError) for output in outputs.values())
    assert all("the router is broken" in str(output.error) for output in outputs.values())
    busy_group.settle()
    busy_group.last.clear()
    submit(busy_group.engine)
    check_answers(busy_group.run(), expected)


def test_an_interrupt_inside_close_of_a_group_is_delivered_when_it_is_closed(
    busy_group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, interrupts = busy_group.engine, Interrupts()
    stream = engine.stream(PROMPTS["a"], greedy(9))
    with monkeypatch.context() as patch:
        patch.setattr(type(busy_group.router), "reset", interrupts.after(type(busy_group.router), "reset").reset)
        interrupts.num = 1
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    check_closed(engine, stream)
    assert not busy_group.engines
