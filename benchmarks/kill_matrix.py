"""Kills engines, each side in each state, and looks what becomes of everybody: `python -m benchmarks.kill_matrix`.

A prefill and a decode process work on requests of texts and pictures. When the trace of one of them says that a request
has come to a state, its process gets SIGKILL, on the spot. Then: is every caller answered, with the tokens that one
engine alone says, or with an error that has a type; how long does that take; does the other engine hold pages, or
anybody, when nobody is left; does a prompt that needs all of the memory between the two still get through; are there
segments of shared memory or processes that nobody owns. The other engine lives on from kill to kill, so what it loses
adds up. Writes `results/kill_matrix.json` after every kill and `results/kill_matrix.md` at the end; a run that was cut
off goes on where it was.

    python -m benchmarks.kill_matrix               20 times in each state
    python -m benchmarks.kill_matrix --times 2     a first look
    python -m benchmarks.kill_matrix --fresh       forget the earlier kills
"""

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import RESULTS, describe, environment, markdown_table
from m1_single_request.tracer import TraceRecord
from m6_multimodal_pd import (
    DEFAULT_MODEL,
    CacheConfig,
    EngineError,
    LLMEngine,
    SamplingParams,
    SchedulerConfig,
    TraceConfig,
)
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.runtime.shared_memory import segment_directory
from notebooks.shapes import Shape, picture

SEED = 1
NAME = "kill_matrix"
SIDES = ("prefill", "decode")
STATES = ("bootstrapping", "waiting for input", "transferring", "inflight", "success", "decoding")
LIMIT_S = 60.0
"""Whoever is not answered by then never is."""
NUM_FRAMES = 8
CONFIGS: dict[str, Any] = {
    "cache_config": CacheConfig(page_size=4, max_total_tokens=1024, debug=True),
    "scheduler_config": SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32),
}
"""Of every engine: audited after every step, and so small that prompts go in pieces and some must wait."""
PAGE_BYTES = 16 * 1024
WORDS = "the cache keeps keys and values of tokens that were computed before so that nobody computes them again".split()


# --- what is asked ----------------------------------------------------------------------------------------------------


def requests() -> list[tuple[list[dict[str, Any]], SamplingParams]]:
    """Conversations and what is asked of them: prompts of many chunks, one with a picture, one that draws."""
    found = []
    for number in range(6):
        words = " ".join(WORDS[(number + 5 * i) % len(WORDS)] for i in range(100 + 30 * number))
        content: Any = words
        if number == 2:
            content = [{"type": "image", "image": picture(Shape("big", "red", "star", "left"))}]
            content += [{"type": "text", "text": words}]
        drawn = {"temperature": 0.8, "seed": number} if number == 4 else {}
        params = SamplingParams(max_tokens=24 + 4 * number, ignore_eos=True, **drawn)
        found.append(([{"role": "user", "content": content}], params))
    return found


def last_request() -> tuple[list[dict[str, Any]], SamplingParams]:
    """One that takes most of the KV memory, and all frames of the memory between the engines many times."""
    words = " ".join(WORDS[7 * i % len(WORDS)] for i in range(500))
    return [{"role": "user", "content": words}], SamplingParams(max_tokens=4, ignore_eos=True)


# --- when to kill -----------------------------------------------------------------------------------------------------


class Killer:
    """A reader of the trace that kills the engine that says that so many requests have come to a state."""

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
        """The request that has come to the state on the side, by what its engine says."""
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
        """What it had said before it was killed, and had not come here."""
        if event.kind == "reported" and event.engine == self.killed and self.seen[-1] in event.rids:
            if self.state != "decoding":
                self.has_moved_on |= event.what in ("kv_poll_changed", "finish")
            elif self.side == "decode":  # a prefill engine has no part in it
                self.has_moved_on |= event.what == "finish"


# --- one kill ---------------------------------------------------------------------------------------------------------


class Matrix:
    """The group of engines, and what one engine alone says."""

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

    def kill(self, side: str, state: str, nth: int) -> dict[str, Any]:
        """Kill once; what has come of it."""
        engine, killer = self.engine, self.killer
        killer.arm(engine, side, state, nth)
        self.num_rounds += 1
        salt = f"round {self.num_rounds}"  # nothing of it is cached
        rids = [engine.add_request(prompt, params, cache_salt=salt) for prompt, params in self.asked[:-1]]
        answers, told_wrong = self._answers(rids)
        answered_at = time.monotonic()
        killer.engine = None
        found: dict[str, Any] = {"reached": killer.killed is not None}
        if killer.killed is None:
            return found
        kinds = [self._kind(answers.get(rid), tokens) for rid, tokens in zip(rids, self.expected, strict=False)]
        found |= {
            "still_there": not killer.has_moved_on,
            "answers": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "said_twice": told_wrong,
            "seconds_to_last_answer": round(answered_at - killer.killed_at, 3),
        }
        if "none" in kinds:
            self._begin_anew()
            return found
        return found | self._look_after(salt)

    def _answers(self, rids: list[str]) -> tuple[dict[str, Any], int]:
        """The last output of everybody, and how often one took back, or said again, what was said."""
        last: dict[str, Any] = {}
        told_wrong = 0
        deadline = time.monotonic() + LIMIT_S
        while self.engine.has_unfinished_requests() and time.monotonic() < deadline:
            for rid, output in self.engine.step().items():
                before = last.get(rid)
                if before is not None:
                    is_on = output.token_ids[: len(before.token_ids)] == before.token_ids
                    told_wrong += before.finished or not is_on or not output.text.startswith(before.text)
                last[rid] = output
        return {rid: output for rid, output in last.items() if output.finished}, told_wrong

    @staticmethod
    def _kind(output: Any, expected: Sequence[int]) -> str:
        if output is None:
            return "none"
        if output.error is None:
            return "same tokens" if output.token_ids == tuple(expected) else "other tokens"
        return "typed error" if isinstance(output.error, EngineError) else "other error"

    def _look_after(self, salt: str) -> dict[str, Any]:
        """Whether both engines are there again and hold nothing, and what else is left."""
        engine, router = self.engine, self.engine.engine_core.router
        deadline = time.monotonic() + LIMIT_S
        while len(router.members) < 2 and time.monotonic() < deadline:
            router.listen(0.05)
        found: dict[str, Any] = {"seconds_to_new_engine": round(time.monotonic() - self.killer.killed_at, 3)}
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
        found["leaked_segments"] = sum(
            name.startswith(f"stepwise-{links._group}") for name in os.listdir(segment_directory())
        )
        found["leaked_processes"] = len(own_processes() - {child.process.pid for child in links.children.values()})
        if found["later_request"] == "none":
            self._begin_anew()
        return found

    def _begin_anew(self) -> None:
        self.engine.close()
        self.engine = self._start()

    def close(self) -> dict[str, int]:
        """End the group; what is left of it then."""
        links = self.engine.engine_core.router.links
        self.engine.close()
        names = [name for name in os.listdir(segment_directory()) if name.startswith(f"stepwise-{links._group}")]
        return {"segments": len(names), "processes": len(own_processes())}


def own_processes() -> set[int]:
    """Children of this process."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(folder.name))
    return found


# --- all of them ------------------------------------------------------------------------------------------------------


def cells() -> Iterator[tuple[str, str]]:
    """All that can be killed: only a prefill engine has requests in flight."""
    return ((side, state) for side, state in product(SIDES, STATES) if (side, state) != ("decode", "inflight"))


def whom(state: str, number: int) -> int:
    """The how-manieth request that comes to a state is the one that counts: the first ones find room at once, so they
    are not in the first state for long."""
    return 5 + number % 2 if state == "bootstrapping" else 1 + number % 5


def leaks(kill: dict[str, Any]) -> int:
    """All that one kill has left behind."""
    return sum(value for name, value in kill.items() if name.startswith("leaked_")) + (not kill.get("flushed", True))


def tables(results: dict[str, Any]) -> str:
    """What a page includes."""
    rows = [(name, [kill for kill in kills if kill["reached"]]) for name, kills in results["kills"].items()]

    def of(kind: str, row: Any) -> str:
        return f"{sum(kill['answers'].get(kind, 0) for kill in row[1]):,}"

    def seconds(key: str, row: Any) -> str:
        values = [kill[key] for kill in row[1] if key in kill]
        return f"{statistics.median(values):.2f} / {max(values):.2f}" if values else "-"

    table = markdown_table(
        rows,
        {
            "killed, while a request is": lambda row: row[0],
            "kills": lambda row: f"{len(row[1])}",
            "it still was": lambda row: f"{sum(kill['still_there'] for kill in row[1])}",
            "same tokens": lambda row: of("same tokens", row),
            "typed error": lambda row: of("typed error", row),
            "anything else": lambda row: f"{sum(sum(others(kill).values()) for kill in row[1])}",
            "said twice": lambda row: f"{sum(kill['said_twice'] for kill in row[1])}",
            "last answer after, s": lambda row: seconds("seconds_to_last_answer", row),
            "leaks": lambda row: f"{sum(leaks(kill) for kill in row[1])}",
        },
    )
    end = results.get("after_close", {})
    note = (
        f"*Each kill with {len(requests())} requests at work; `same tokens` and the next columns count their answers. "
        "`It still was`: nothing that the engine had said before it died shows the request in a later state. Seconds "
        "are medians and the longest. Leaks: pages, requests, rooms, segments of shared memory and processes that were "
        "left, after a later request was answered and the caches were emptied. After the end of the group: "
        f"{end.get('segments', '?')} segments, {end.get('processes', '?')} processes. "
        f"{describe(results['environment'])}*"
    )
    marks = (("kill_matrix", table), ("kill_matrix_note", note))
    return "\n".join(f"<!-- --8<-- [start:{name}] -->\n{text}\n<!-- --8<-- [end:{name}] -->\n" for name, text in marks)


def others(kill: dict[str, Any]) -> dict[str, int]:
    """Answers that nobody should get."""
    return {kind: number for kind, number in kill["answers"].items() if kind not in ("same tokens", "typed error")}


def is_fine(kill: dict[str, Any]) -> bool:
    """Whether all is as it should be."""
    good = kill["reached"] and not others(kill) and not kill["said_twice"] and not leaks(kill)
    return bool(good and kill.get("later_request") == "same tokens")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{NAME}", description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20, help="kills per side and state")
    parser.add_argument("--fresh", action="store_true", help="forget the kills of an earlier run")
    parser.add_argument("--output", type=Path, default=RESULTS, help="a folder for everything that is written")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, write, and print the table. 1 if anything was not as it should be."""
    args, console = arguments(argv), Console(stderr=True)
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    args.output.mkdir(exist_ok=True, parents=True)
    path: Path = args.output / f"{NAME}.json"
    env = environment(model=Path(DEFAULT_MODEL), seed=SEED)
    results: dict[str, Any] = {"environment": env, "kills": {f"{side}, {state}": [] for side, state in cells()}}
    if path.exists() and not args.fresh:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if earlier["environment"] == env:
            results["kills"] |= {name: kills for name, kills in earlier["kills"].items() if name in results["kills"]}
    matrix = Matrix()
    try:
        for side, state in cells():
            kills = results["kills"][f"{side}, {state}"]
            while len(kills) < args.times:
                kill = matrix.kill(side, state, nth=whom(state, len(kills)))
                kills.append(kill)
                path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                if not is_fine(kill):
                    console.print(f"{side}, {state}, kill {len(kills)}: {kill}", style="bold red", highlight=False)
            console.print(f"{time.strftime('%H:%M:%S')} {side}, {state}: {len(kills)} kills", highlight=False)
    finally:
        results["after_close"] = matrix.close()
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = tables(results)
    (args.output / f"{NAME}.md").write_text(text, encoding="utf-8")
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    return int(not all(is_fine(kill) for kills in results["kills"].values() for kill in kills))


if __name__ == "__main__":
    raise SystemExit(main())
