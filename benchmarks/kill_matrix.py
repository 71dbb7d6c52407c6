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
import time
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

from rich.console import Console

from benchmarks.engines import SEEING_MODEL
from benchmarks.lesson import Lesson, Parts, Size
from benchmarks.processes import children, segments
from benchmarks.texts import SMALL, image, text
from m1_single_request.tracer import TraceRecord
from m6_multimodal_pd import CacheConfig, EngineError, LLMEngine, SamplingParams, SchedulerConfig, TraceConfig
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig

NAME, AFTER_CLOSE = "kill_matrix", "after_close"
SIDES = ("prefill", "decode")
STATES = ("bootstrapping", "waiting for input", "transferring", "inflight", "success", "decoding")
Row = dict[str, Any]
LIMIT_S = 60.0
"""A request without an answer by then has none."""
NUM_FRAMES = 8
CONFIGS: dict[str, Any] = {
    "cache_config": CacheConfig(page_size=4, max_total_tokens=1024, debug=True),
    "scheduler_config": SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
}
"""Of every engine: audited after every step, and so small that prompts go in pieces and some must wait."""
PAGE_BYTES = 16 * 1024
WORDS = "the cache keeps keys and values of tokens that were computed before so that nobody computes them again".split()


# --- requests ----------------------------------------------------------------------------------------------------


def requests() -> list[tuple[list[Row], SamplingParams]]:
    """Return conversations and their parameters: prompts of many chunks, one with a picture, one sampled at random."""
    found = []
    for number in range(6):
        words = " ".join(WORDS[(number + 5 * i) % len(WORDS)] for i in range(100 + 30 * number))
        content: Any = words
        if number == 2:
            content = [image(0, SMALL), text(words)]
        drawn = {"temperature": 0.8, "seed": number} if number == 4 else {}
        params = SamplingParams(max_tokens=24 + 4 * number, ignore_eos=True, **drawn)
        found.append(([{"role": "user", "content": content}], params))
    return found


def last_request() -> tuple[list[Row], SamplingParams]:
    """Return one that takes most of the KV memory, and all frames of the memory between the engines many times."""
    words = " ".join(WORDS[7 * i % len(WORDS)] for i in range(500))
    return [{"role": "user", "content": words}], SamplingParams(max_tokens=4, ignore_eos=True)


# --- when to kill -----------------------------------------------------------------------------------------------------


class Killer:
    """A trace reader that kills an engine when it reports that a number of requests has come to a state."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.side = self.state = ""
        self.left = 0
        self.named: dict[str, str] = {}
        """By request: the engine of the chosen side."""
        self.seen: list[str] = []
        """Requests that came to the state, each once."""
        self.killed: str | None = None
        self.killed_at = 0.0
        self.is_lost = False
        self.has_moved_on = False
        """Whether the request, at that engine, had gone on before it was killed."""
        self.num_results: dict[str, int] = {}

    def arm(self, engine: Any, side: str, state: str, nth: int) -> None:
        """Kill at the nth request that comes to this state on this side."""
        self.__init__()  # type: ignore[misc]
        self.engine, self.side, self.state, self.left = engine, side, state, nth

    def read(self, record: TraceRecord) -> None:
        """Take one record."""
        event: Any = record.event
        if event.kind == "request_routed":
            self.named[event.rid] = getattr(event, self.side, "")
        if event.kind == "engine_lost" and event.name == self.killed:
            self.is_lost = True
        if self.killed is not None:
            self._look_behind(event)
            return
        if self.engine is None:
            return
        rid = self._comes_to_state(event)
        if rid is not None and rid not in self.seen:
            self.seen.append(rid)
            if len(self.seen) == self.left:
                self._kill(self.named[rid])

    def close(self) -> None:
        """Nothing to do."""

    def _comes_to_state(self, event: Any) -> str | None:
        """Return the request that has come to the state on the side, by the event of its engine."""
        if self.state == "decoding":
            if event.kind != "result":
                return None
            self.num_results[event.rid] = self.num_results.get(event.rid, 0) + 1
            return event.rid if self.num_results[event.rid] == 4 else None
        if event.kind != "reported" or len(event.rids) != 1 or self.named.get(event.rids[0]) != event.engine:
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

    def _kill(self, name: str) -> None:
        os.kill(self.engine.engine_core.router.links.children[name].process.pid, signal.SIGKILL)
        self.killed, self.killed_at = name, time.monotonic()

    def _look_behind(self, event: Any) -> None:
        """Check the events that the engine sent before it was killed, and that arrive only now."""
        if event.kind == "reported" and event.engine == self.killed and self.seen[-1] in event.rids:
            if self.state != "decoding":
                self.has_moved_on |= event.what in ("kv_poll_changed", "finish")
            elif self.side == "decode":  # a prefill engine has no part in it
                self.has_moved_on |= event.what == "finish"


# --- one kill ---------------------------------------------------------------------------------------------------------


class Matrix:
    """The group of engines, and the tokens of one engine alone."""

    def __init__(self) -> None:
        self.killer = Killer()
        self.num_rounds = 0
        asked = [*requests(), last_request()]
        with LLMEngine(**CONFIGS) as alone:
            self.asked = [(alone.chat_prompt(messages), params) for messages, params in asked]
            prompts, params = zip(*self.asked, strict=True)
            self.expected = [output.token_ids for output in alone.generate_batch(prompts, params).values()]
        self.engine = self._start()

    def _start(self) -> Any:
        return LLMEngine(
            **CONFIGS,
            trace_config=TraceConfig(readers=(self.killer,)),
            disaggregation_config=DisaggregationConfig(
                max_restarts=10**6, transfer_buffer_bytes=NUM_FRAMES * PAGE_BYTES
            ),
        )

    def kill(self, side: str, state: str, nth: int) -> Row:
        """Kill once; return what followed."""
        engine, killer = self.engine, self.killer
        killer.arm(engine, side, state, nth)
        self.num_rounds += 1
        salt = f"round {self.num_rounds}"  # nothing of it is cached
        rids = [engine.add_request(prompt, params, cache_salt=salt) for prompt, params in self.asked[:-1]]
        answers, repeated = self._answers(rids)
        answered_at = time.monotonic()
        killer.engine = None
        found: Row = {"reached": killer.killed is not None}
        if killer.killed is None:
            return found
        kinds = [self._kind(answers.get(rid), tokens) for rid, tokens in zip(rids, self.expected, strict=False)]
        found |= {
            "still_there": not killer.has_moved_on,
            "answers": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "said_twice": repeated,
            "seconds_to_last_answer": round(answered_at - killer.killed_at, 3),
        }
        if "none" in kinds:
            self._begin_anew()
            return found
        return found | self._look_after(salt)

    def _answers(self, rids: list[str]) -> tuple[Row, int]:
        """Return the last output of each request, and the number of outputs that took back or repeated another one."""
        last: Row = {}
        repeated = 0
        deadline = time.monotonic() + LIMIT_S
        while self.engine.has_unfinished_requests() and time.monotonic() < deadline:
            for rid, output in self.engine.step().items():
                before = last.get(rid)
                if before is not None:
                    is_on = output.token_ids[: len(before.token_ids)] == before.token_ids
                    repeated += before.finished or not is_on or not output.text.startswith(before.text)
                last[rid] = output
        return {rid: output for rid, output in last.items() if output.finished}, repeated

    @staticmethod
    def _kind(output: Any, expected: Sequence[int]) -> str:
        if output is None:
            return "none"
        if output.error is None:
            return "same tokens" if output.token_ids == tuple(expected) else "other tokens"
        return "typed error" if isinstance(output.error, EngineError) else "other error"

    def _look_after(self, salt: str) -> Row:
        """Return whether both engines are there again and hold nothing, and everything else that is left."""
        engine, router = self.engine, self.engine.engine_core.router
        deadline = time.monotonic() + LIMIT_S
        while len(router.members) < 2 and time.monotonic() < deadline:
            router.listen(0.05)
        found: Row = {"seconds_to_new_engine": round(time.monotonic() - self.killer.killed_at, 3)}
        prompt, params = self.asked[-1]
        began = time.monotonic()
        later = engine.add_request(prompt, params, cache_salt=salt)
        answers, _ = self._answers([later])
        found["later_request"] = self._kind(answers.get(later), self.expected[-1])
        found["later_request_seconds"] = round(time.monotonic() - began, 3)
        found["flushed"] = engine.flush_cache()
        stats = engine.engine_core.call_all("stats")
        found["leaked_tokens"] = sum(own["max_total_tokens"] - own["available_size"] for own in stats.values())
        found["leaked_requests"] = sum(own["num_running"] + own["num_waiting"] for own in stats.values())
        found["leaked_rooms"] = len(router.attempts) + sum(len(member.rooms) for member in router.members.values())
        links = router.links
        found["leaked_segments"] = len(segments(links._group))
        found["leaked_processes"] = len(set(children()) - {child.process.pid for child in links.children.values()})
        if found["later_request"] == "none":
            self._begin_anew()
        return found

    def _begin_anew(self) -> None:
        self.engine.close()
        self.engine = self._start()

    def close(self) -> dict[str, int]:
        """End the group; return what is left of it."""
        links = self.engine.engine_core.router.links
        self.engine.close()
        return {"segments": len(segments(links._group)), "processes": len(children())}


# --- all of them ------------------------------------------------------------------------------------------------------


def nth_request(state: str, number: int) -> int:
    """Return the number of the request that counts, of those that come to a state: the first ones find room at once,
    so they are not in the first state for long."""
    return 5 + number % 2 if state == "bootstrapping" else 1 + number % 5


def kills_of(matrix: Matrix, side: str, state: str, times: int) -> Row:
    """Kill in one state, and return all kills with their row in the table."""
    kills = []
    for number in range(times):
        kills.append(matrix.kill(side, state, nth=nth_request(state, number)))
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
    matrix = cache(Matrix)
    cells = [(side, state) for side, state in product(SIDES, STATES) if (side, state) != ("decode", "inflight")]
    kills = {
        f"{side}, {state}": lambda side=side, state=state: kills_of(matrix(), side, state, size.rounds)
        for side, state in cells
    }
    return kills | {AFTER_CLOSE: lambda: matrix().close()}


LESSON = Lesson(
    NAME,
    parts,
    model=SEEING_MODEL,
    rounds=20,
    threads=1,
    is_fine=lambda parts: all(is_fine(kill) for name in parts if name != AFTER_CLOSE for kill in parts[name]["kills"]),
)
