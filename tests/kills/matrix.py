"""Kill engines of a group, each side in each state, and check what follows: answers, times, and what is left.

A prefill and a decode process work on requests of texts and pictures. When the trace of one of them reports that a
request has come to a state, its process gets SIGKILL. Then: is every caller answered, with the tokens of one engine
alone, or with a typed error; how long does that take; does the other engine hold pages or requests when none is left;
does a prompt that needs all of the memory between the two still get through; are there segments of shared memory or
processes without an owner. The other engine lives on from kill to kill, so what it loses adds up.
"""

import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any

from rich.console import Console

from benchmarks import lesson
from benchmarks.engines import SEEING_MODEL
from benchmarks.lesson import Lesson, Parts, Size
from benchmarks.texts import message
from m1_single_request.trace_readers import Records
from m1_single_request.tracer import TraceRecord
from m6_multimodal_pd import EngineError, LLMEngine, SamplingParams, TraceConfig
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from tests.kills.requests import Asked, requests, words
from tests.m6_multimodal_pd.engines import setting
from tests.m6_multimodal_pd.processes import Callers, has_both, left_of, links_of, own_engines, segments

NAME, AFTER_CLOSE = "kill_matrix", "after_close"
SIDES = ("prefill", "decode")
STATES = ("bootstrapping", "waiting for input", "transferring", "inflight", "success", "decoding")
Row = dict[str, Any]
CONFIGS = setting(8, 32, tokens=1024)
"""Of every engine: audited after every step, and so small that prompts go in pieces and some must wait."""
TRANSFER_BYTES = 8 * 16 * 1024
"""Memory between the two engines: eight pages."""
LAST: Asked = [message(words(500, step=7))], SamplingParams(max_tokens=4, ignore_eos=True)
"""A request that takes most of the KV memory, and all of the memory between the engines many times."""


# --- one kill ---------------------------------------------------------------------------------------------------------


class Kill:
    """A trace reader that kills an engine of one side when the nth request comes to a state there."""

    def __init__(self, engine: Any, side: str, state: str, nth: int) -> None:
        self.engine, self.side, self.state, self.nth = engine, side, state, nth
        self.name_of: dict[str, str] = {}
        """By request: its engine of the side."""
        self.seen: list[str] = []
        """Requests that came to the state, each once."""
        self.num_results = Counter[str]()
        self.killed: str | None = None
        self.killed_at = 0.0
        self.has_moved_on = False
        """Whether the request, at that engine, had gone on before it was killed."""

    def read(self, record: TraceRecord) -> None:
        """Take one record."""
        event: Any = record.event
        if event.kind == "request_routed":
            self.name_of[event.rid] = getattr(event, self.side, "")
        if self.killed is not None:
            self._look_behind(event)
        elif (rid := self._arrived(event)) is not None and rid not in self.seen:
            self.seen.append(rid)
            if len(self.seen) == self.nth:
                self.killed = self.name_of[rid]
                os.kill(links_of(self.engine).children[self.killed].process.pid, signal.SIGKILL)
                self.killed_at = time.monotonic()

    def close(self) -> None:
        """Nothing to do."""

    def _arrived(self, event: Any) -> str | None:
        """Return the request that has come to the state on the side, by the event of its engine."""
        if self.state == "decoding":
            if event.kind != "result":
                return None
            self.num_results[event.rid] += 1
            return event.rid if self.num_results[event.rid] == 4 else None
        if event.kind != "reported" or len(event.rids) != 1 or self.name_of.get(event.rids[0]) != event.engine:
            return None
        chunk = event.what in ("chunk_sent", "chunk_received")
        is_there = {
            "bootstrapping": event.what == "request_added",
            "waiting for input": event.what == "kv_poll_changed" and "-> waiting for input" in event.text,
            "transferring": chunk and "the last ones" not in event.text,
            "inflight": chunk and "the last ones" in event.text,
            "success": event.what == "kv_poll_changed" and "-> success" in event.text,
        }
        return event.rids[0] if is_there[self.state] else None

    def _look_behind(self, event: Any) -> None:
        """Check the events that the engine sent before it was killed, and that arrive only now."""
        if event.kind == "reported" and event.engine == self.killed and self.seen[-1] in event.rids:
            if self.state != "decoding":
                self.has_moved_on |= event.what in ("kv_poll_changed", "finish")
            elif self.side == "decode":  # a prefill engine has no part in it
                self.has_moved_on |= event.what == "finish"


class Matrix:
    """The group of engines, and the tokens of one engine alone."""

    def __init__(self) -> None:
        self.num_rounds = 0
        with LLMEngine(**CONFIGS) as alone:
            self.expected = [answer.token_ids for answer in Callers(alone, [*requests(), LAST]).answers().values()]
        self.engine = self._start()

    def _start(self) -> Any:
        return LLMEngine(
            **CONFIGS,
            trace_config=TraceConfig(readers=(Records(),)),  # engines report their events if somebody reads them
            disaggregation_config=DisaggregationConfig(max_restarts=10**6, transfer_buffer_bytes=TRANSFER_BYTES),
        )

    def kill(self, side: str, state: str, nth: int) -> Row:
        """Kill once; return what followed."""
        kill = Kill(self.engine, side, state, nth)
        self.num_rounds += 1
        self.engine.tracer.attach(kill)
        kinds, repeated = self._answers(requests(), self.expected)
        answered_at = time.monotonic()
        self.engine.tracer.detach(kill)
        found: Row = {"reached": kill.killed is not None}
        if kill.killed is not None:
            found |= {
                "still_there": not kill.has_moved_on,
                "answers": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
                "said_twice": repeated,
                "seconds_to_last_answer": round(answered_at - kill.killed_at, 3),
            }
            if "none" not in kinds:
                has_both(self.engine)
                found |= {"seconds_to_new_engine": round(time.monotonic() - kill.killed_at, 3)} | self._look_after()
        if "none" in kinds or found.get("later_request") == "none":
            self.engine.close()
            self.engine = self._start()
        return found

    def _answers(self, asked: Sequence[Asked], expected: Sequence[Any]) -> tuple[list[str], int]:
        """Return the kind of each request's answer, and the number of outputs that were repeated or taken back."""
        callers = Callers(self.engine, asked, cache_salt=f"round {self.num_rounds}")  # nothing of it is cached
        with suppress(AssertionError):  # some have no answer
            callers.step_until(lambda: not self.engine.has_unfinished_requests())
        return list(map(kind_of, callers.told.values(), expected)), callers.num_repeated()

    def _look_after(self) -> Row:
        """Return whether a later request is answered, and everything that is left on either engine."""
        began = time.monotonic()
        (kind,), _ = self._answers([LAST], self.expected[-1:])
        row = {"later_request": kind, "later_request_seconds": round(time.monotonic() - began, 3)}
        flushed = self.engine.flush_cache()
        return row | {"flushed": flushed} | {f"leaked_{name}": n for name, n in left_of(self.engine).items()}

    def close(self) -> dict[str, int]:
        """End the group; return what is left of it."""
        group = links_of(self.engine)._group
        self.engine.close()
        return {"segments": len(segments(group)), "processes": len(own_engines())}


def kind_of(outputs: Sequence[Any], expected: Sequence[int]) -> str:
    """Return the kind of an answer: its tokens, its error, or none."""
    if not outputs or not outputs[-1].finished:
        return "none"
    if (error := outputs[-1].error) is None:
        return "same tokens" if outputs[-1].token_ids == expected else "other tokens"
    return "typed error" if isinstance(error, EngineError) else "other error"


# --- all of them ------------------------------------------------------------------------------------------------------


def nth_request(state: str, number: int) -> int:
    """Return the number of the request that counts, of those that come to a state: the first ones find room at once,
    so they are not in the first state for long."""
    return 5 + number % 2 if state == "bootstrapping" else 1 + number % 5


def kills_of(matrix: Matrix, side: str, state: str, times: int) -> Row:
    """Kill in one state, and return all kills with their row in the table."""
    kills = []
    for number in range(times):
        kills.append(matrix.kill(side, state, nth_request(state, number)))
        if not is_fine(kills[-1]):
            Console(stderr=True).print(f"{side}, {state}, kill {number + 1}: {kills[-1]}", style="bold red")
    return {"row": row_of(kills), "kills": kills}


def leaks(kill: Row) -> int:
    """Return the number of things that one kill has left behind."""
    return sum(value for name, value in kill.items() if name.startswith("leaked_")) + (not kill.get("flushed", True))


def others(kill: Row) -> int:
    """Return the number of answers that no caller should get."""
    return sum(number for kind, number in kill["answers"].items() if kind not in ("same tokens", "typed error"))


def is_fine(kill: Row) -> bool:
    """Return whether everything is as it should be."""
    good = kill["reached"] and not others(kill) and not kill["said_twice"] and not leaks(kill)
    return bool(good and kill.get("later_request") == "same tokens")


def row_of(kills: list[Row]) -> Row:
    """Return the row of a state in the table."""
    reached = [kill for kill in kills if kill["reached"]]
    seconds = [kill["seconds_to_last_answer"] for kill in reached]
    return {
        "kills": len(reached),
        "still_there": sum(kill["still_there"] for kill in reached),
        "same": sum(kill["answers"].get("same tokens", 0) for kill in reached),
        "typed": sum(kill["answers"].get("typed error", 0) for kill in reached),
        "others": sum(map(others, reached)),
        "twice": sum(kill["said_twice"] for kill in reached),
        "seconds": f"{statistics.median(seconds):.2f} / {max(seconds):.2f}" if seconds else "-",
        "leaks": sum(map(leaks, reached)),
    }


def parts(size: Size) -> Parts:
    """Return every side and state (only a prefill engine has the state `inflight`), and the end of the group."""
    matrix, times = cache(Matrix), 1 if size.quick else size.rounds
    cells = [(side, state) for side, state in product(SIDES, STATES) if (side, state) != ("decode", "inflight")]
    kills = {
        f"{side}, {state}": lambda side=side, state=state: kills_of(matrix(), side, state, times)
        for side, state in cells
    }
    return kills | {AFTER_CLOSE: lambda: matrix().close()}


def all_fine(found: Row) -> bool:
    """Return whether every kill is fine, and nothing was left at the end."""
    kills = [kill for name, part in found.items() if name != AFTER_CLOSE for kill in part["kills"]]
    return all(map(is_fine, kills)) and not any(found.get(AFTER_CLOSE, {}).values())


LESSON = Lesson(NAME, parts, model=SEEING_MODEL, rounds=20, threads=1, is_fine=all_fine)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if a kill was not fine."""
    return lesson.Command("python -m tests.kills.matrix", sys.modules[__name__], argv).run()


if __name__ == "__main__":
    raise SystemExit(main())
