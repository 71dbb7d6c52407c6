"""A crowd in which everything happens, and Ctrl-C before any line of one of its steps.

Who goes on as if nothing had been finds that nobody is lost, and that no token is doubled or wrong. A milestone brings
its crowd, its modules, and what must hold of its memory in the end.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from types import FrameType, ModuleType
from typing import Any

from m1_single_request import SamplingParams
from tests.support.engines import greedy, unfinished
from tests.testbed.interrupts import Interrupt, interrupted

ABORT_AT = 6
"""The step before which the request called "gone" is aborted."""


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """Requests that come at once. Among them are a "family" of `n > 1` and a request called "gone"."""

    asked: Mapping[str, tuple[list[int], SamplingParams]]
    make: Callable[[], Any]
    """An engine without requests."""
    check_end: Callable[[Any], None]
    """What must hold of the engine when all work is done."""
    after: Callable[[Any], None] = lambda engine: None
    """Called after the step that was interrupted."""

    def start(self) -> Any:
        """An engine to which all have come."""
        engine = self.make()
        for rid, (prompt, params) in self.asked.items():
            engine.add_request(prompt, params, request_id=rid)
        return engine

    def expected(self, m1: Any) -> dict[str, list[tuple[int, ...]]]:
        """The tokens of every answer, if it is asked for alone."""
        found = {}
        for rid, (prompt, params) in self.asked.items():
            seeds = [params.seed if params.seed is None else params.seed + i for i in range(params.n)]
            found[rid] = [m1.generate(prompt, replace(params, n=1, seed=seed)).token_ids for seed in seeds]
        return found

    def lines_of_each_step(self, engine: Any, modules: list[ModuleType]) -> list[int]:
        """Run to the end; how many lines each step has."""
        found: list[int] = []
        for _ in unfinished(engine):
            if len(found) == ABORT_AT:
                engine.abort_request("gone")
            with counted(modules) as lines:
                engine.step()
            found.append(lines[0])
        return found

    def serve(self, engine: Any, step: int, line: int, modules: list[ModuleType]) -> tuple[dict[str, Any], Interrupt]:
        """Run to the end, with one interrupt; the last outputs, and where it was."""
        last: dict[str, Any] = {}
        interrupt = Interrupt()
        for number, _ in enumerate(unfinished(engine)):
            if number == ABORT_AT:
                engine.abort_request("gone")
            outputs: dict[str, Any] = {}
            if number == step:
                with interrupted(line, modules) as interrupt:
                    outputs = engine.step()
                self.after(engine)
            else:
                outputs = engine.step()
                engine.engine_core.scheduler.check_invariants()
            assert not any(last[rid].finished for rid in outputs.keys() & last.keys()), "reported after its end"
            last |= outputs
        return last, interrupt

    def check(self, engine: Any, last: dict[str, Any], expected: dict[str, list[tuple[int, ...]]]) -> None:
        """Everybody has ended with the right tokens, and the engine is as good as new."""
        assert last.keys() == self.asked.keys() and all(output.finished for output in last.values())
        for rid, output in last.items():
            assert output.error is None, (rid, output.error)
            for completion, whole in zip(output.outputs, expected[rid], strict=True):
                assert completion.token_ids == whole[: len(completion.token_ids)], rid
                assert completion.finish_reason == ("abort" if rid == "gone" else "length") or rid == "gone"
                assert completion.token_ids == whole or rid == "gone", rid
        ended = sum(engine.stats().num_finished.values())
        assert ended in (len(self.asked) - 1, len(self.asked)), "one may miss in the totals"
        again = engine.generate(*self.asked["family"])
        assert [completion.token_ids for completion in again.outputs] == expected["family"]
        self.check_end(engine)

    def check_interrupts(self, m1: Any, modules: list[ModuleType], *, cases: int, seed: str) -> Any:
        """So many interrupts, each of another engine, step and line; returns an engine that had none."""
        expected = self.expected(m1)
        first = self.start()
        num_lines = self.lines_of_each_step(first, modules)
        rng = Random(seed)
        places = set()
        for _ in range(cases):
            step = rng.randrange(len(num_lines))
            engine = self.start()
            last, interrupt = self.serve(engine, step, rng.randint(1, num_lines[step]), modules)
            places.add(interrupt.where)
            try:
                self.check(engine, last, expected)
            except Exception as error:
                message = f"after an interrupt of step {step} before {interrupt.where}: {error!r}"
                raise AssertionError(message) from error
            engine.close()
        assert None not in places and len(places) > cases / 2
        return first


@contextmanager
def counted(modules: list[ModuleType]) -> Iterator[list[int]]:
    """How many lines of `modules` the block runs."""
    files, lines = {str(module.__file__) for module in modules}, [0]

    def trace_lines(frame: FrameType, event: str, argument: Any) -> Any:
        lines[0] += event == "line"
        return trace_lines

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: trace_lines if frame.f_code.co_filename in files else None)
    try:
        yield lines
    finally:
        sys.settrace(before)


def check_told_once(make: Callable[[], Any], modules: list[ModuleType], check_drained: Callable[[Any], None]) -> None:
    """Who was told of its end is not told again if the next step is interrupted at one of its first lines."""
    for line in range(1, 16):
        engine = make()
        engine.add_request([5], greedy(1, n=2), request_id="ends")
        engine.add_request([6], greedy(4), request_id="goes on")
        last: dict[str, Any] = {}
        while "ends" not in last or not last["ends"].finished:
            last |= engine.step()
        with interrupted(line, modules) as interrupt:
            engine.step()
        assert interrupt.where is not None
        for _ in unfinished(engine):
            outputs = engine.step()
            assert "ends" not in outputs, f"after an interrupt before {interrupt.where}"
            last |= outputs
        assert len(last["goes on"].token_ids) == 4
        check_drained(engine)
