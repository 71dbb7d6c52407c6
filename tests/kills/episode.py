"""One random life of an engine, with faults: an episode of `python -m tests.kills.soak`.

An episode builds an engine alone, a group of processes, or a group whose engines are started by hand; submits texts and
pictures under n-gram speculation; aborts, drops streams, passes invalid values; kills engines, stops them with SIGSTOP,
continues some; then closes the engine, drops it, or exits with it open.
"""

import gc
import inspect
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import SEEING_MODEL, TEXT_MODEL
from m6_multimodal_pd import (
    CacheConfig,
    DisaggregationConfig,
    EngineError,
    LLMEngine,
    SamplingParams,
    SpeculativeConfig,
)
from m6_multimodal_pd.disaggregation.runtime.credentials import write_keys
from tests.kills.requests import requests
from tests.m6_multimodal_pd.processes import by_hand, eventually, free_address, is_alive, own_engines

SHORT = ("stats", "step", "submit", "abort")
"""Calls that take at most 2 seconds, also beside a fault."""
CALM_S = {"invalid": 2.0} | dict.fromkeys(SHORT, 2.0)
"""Longest time of a call while all engines run, in seconds; 5 for all others."""
LOADING_S = {"build": 60.0, "update_weights": 15.0, "stop_profile": 15.0}
"""Calls that load a model or write a trace; these are not waits."""
BESIDE_STOPPED_S = 17.0
"""Longest time of a call beside a stopped process: 15 s until it counts as lost, and a margin."""
ANSWER_S = 90.0
"""Longest time until a request ends: 15 s to notice a stopped process, then a new one, up to twice."""
ACTIONS = dict(submit=30, step=60, drop_stream=6, abort=6, invalid=6, stats=4, flush=2, update_weights=1, profile=1)
FAULTS = {"kill": 1, "stop": 1, "continue": 3}
"""Actions and their weights; faults are for engines that are processes."""


def stop_profile(engine: Any) -> None:
    """Invalid where no profile is recorded."""
    engine.stop_profile()


INVALID: tuple[Callable[[Any], Any], ...] = (
    lambda engine: engine.generate("", SamplingParams(max_tokens=2)),
    lambda engine: engine.generate([10**9]),
    lambda engine: engine.generate("a", SamplingParams(max_tokens=10**30)),
    lambda engine: engine.generate("a", SamplingParams(top_k=10**30)),
    lambda engine: engine.generate("a", request_id="\ud800"),
    lambda engine: engine.generate("a", cache_salt="\ud800"),
    lambda engine: engine.generate("a", cache_salt=np.zeros(9)),
    lambda engine: engine.chat([{"role": "user", "content": "x" * 10_000_000}]),
    lambda engine: engine.chat([{"role": "user", "content": [{"type": "image", "image": b"no picture"}]}]),
    lambda engine: engine.update_weights(object()),
    lambda engine: engine.update_weights(str(TEXT_MODEL)),
    lambda engine: engine.start_profile("a\0b"),
    stop_profile,
)


class Episode:
    """One random life of an engine, and its violations."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(f"episode {seed}")
        self.violations: list[str] = []
        self.actions: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.ends: Counter[str] = Counter()
        self.stopped: set[int] = set()
        self.calm_from = 0.0
        self.asked: list[tuple[Any, SamplingParams, tuple[int, ...]]] = []
        self.running: dict[str, tuple[int, float]] = {}
        self.by_hand = ExitStack()
        self.may_record = False  # a call that ended in an error may have left some engines recording a profile

    def run(self, kind: str) -> None:
        """Live; leaves an open engine only if that is how the episode ends."""
        guess = SpeculativeConfig(method="ngram") if self.random.random() < 0.7 else SpeculativeConfig()
        cache = CacheConfig(page_size=self.random.choice([1, 4, 16]), max_total_tokens=2048, debug=True)
        shared: dict[str, Any] = {"speculative_config": guess, "cache_config": cache}
        with LLMEngine(**shared) as alone:
            for messages, params in requests():
                prompt = alone.chat_prompt(messages)
                self.asked.append((prompt, params, tuple(alone.generate(prompt, params).token_ids)))
        for _ in range(self.random.randint(1, 3)):
            self.may_record = False
            with self.timed("build"):
                engine = self._built(kind, shared)
            self._use(engine, self.random.uniform(5, 25), ACTIONS if kind == "alone" else ACTIONS | FAULTS)
            self._end(engine)
            del engine
            if not eventually(lambda: not own_engines(), 5.0):
                self.violations.append(f"processes left: {own_engines()}")

    # --- engines ------------------------------------------------------------------------------------------------------

    def _built(self, kind: str, shared: dict[str, Any]) -> Any:
        if kind == "alone":
            return LLMEngine(**shared)
        sizes = {"prefill": self.random.randint(1, 2), "decode": self.random.randint(1, 2)}
        if kind == "group":
            return LLMEngine(**shared, disaggregation_config=DisaggregationConfig(**sizes, max_restarts=100))
        folder = self.by_hand.enter_context(tempfile.TemporaryDirectory())
        address, keys = free_address(), Path(folder) / "keys"
        write_keys(keys)
        limits = (f"--page-size={shared['cache_config'].page_size}", "--max-total-tokens=2048")
        for role in ("prefill", "decode"):
            for _ in range(sizes[role]):
                self.by_hand.enter_context(by_hand(role, address, keys, sizes=limits))
        return LLMEngine(**shared, disaggregation_config=DisaggregationConfig(**sizes, address=address, key_file=keys))

    def _use(self, engine: Any, seconds: float, actions: dict[str, int]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and ("kill" not in actions or own_engines()):
            (action,) = self.random.choices(list(actions), list(actions.values()))
            self.actions[action] += 1
            getattr(self, f"_{action}")(engine)
        if self.random.random() < 0.7:
            deadline = time.monotonic() + ANSWER_S
            while engine.has_unfinished_requests() and time.monotonic() < deadline:
                self._step(engine)
            self.violations += [f"{rid} has no end after {ANSWER_S:g} s" for rid in self.running]
        self.running.clear()

    def _end(self, engine: Any) -> None:
        how = self.random.choice(["close", "drop"])
        self.actions[how] += 1
        if how == "close":
            with self.timed("close"):
                engine.close()
        self.hold = [engine]  # a cycle, as a notebook's last traceback makes them
        self.hold.append(self.hold)
        del engine
        with self.timed("drop"):
            del self.hold
            gc.collect()
        self._continue(None)
        self.by_hand.close()  # engines end by themselves when their router is gone; stopped ones cannot

    # --- calls --------------------------------------------------------------------------------------------------------

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure a call; it may raise an `EngineError`, within its time."""
        was_stopped = bool(self.stopped)
        began = time.monotonic()
        try:
            yield
        except EngineError as error:
            self.ends[f"{name}: {type(error).__name__}"] += 1
            if len(str(error)) > 2000:
                self.violations.append(f"{name}: a message of {len(str(error))} characters")
        except Exception as error:
            self.violations.append(f"{name}: {error!r}"[:1000])
        took = time.monotonic() - began
        is_calm = not was_stopped and not self.stopped and began > self.calm_from
        beside = "" if is_calm else ", beside a fault"
        if is_calm or name in SHORT:
            limit = LOADING_S.get(name, CALM_S.get(name, 5.0))
        else:
            limit = LOADING_S.get(name, 0.0) + BESIDE_STOPPED_S
        self.seconds[name + beside].append(took)
        if took > limit:
            self.violations.append(f"{name}{beside} took {took:.1f} s; {limit:g} s are allowed")

    def _submit(self, engine: Any) -> None:
        if len(self.running) > 12:
            return
        which = self.random.randrange(len(self.asked))
        prompt, params, _ = self.asked[which]
        with self.timed("submit"):
            self.running[engine.add_request(prompt, params)] = which, time.monotonic()

    def _step(self, engine: Any) -> None:
        outputs: dict[str, Any] = {}
        with self.timed("step"):
            outputs = engine.step()
        for rid, output in outputs.items():
            if output.finished:
                self._check(rid, output)

    def _check(self, rid: str, output: Any) -> None:
        which, began = self.running.pop(rid)
        self.seconds["request"].append(time.monotonic() - began)
        if output.error is not None:
            self.ends[type(output.error).__name__] += 1
            if not isinstance(output.error, EngineError):
                self.violations.append(f"a request ended with {output.error!r}"[:1000])
            return
        self.ends[output.finish_reason] += 1
        expected = self.asked[which][2]
        got = tuple(output.token_ids)
        if got != (expected if output.finish_reason != "abort" else expected[: len(got)]):
            self.violations.append(f"question {which}: tokens {got} in place of {expected}"[:1000])

    def _drop_stream(self, engine: Any) -> None:
        prompt, params, expected = self.random.choice(self.asked)
        with self.timed("stream"):
            stream = engine.stream(prompt, params)
            if self.random.random() < 0.5 and not self.stopped and time.monotonic() > self.calm_from:
                output = next(stream)
                if output.error is None and tuple(output.token_ids) != expected[: len(output.token_ids)]:
                    self.violations.append(f"a stream: tokens {output.token_ids} in place of {expected}"[:1000])
            del stream

    def _abort(self, engine: Any) -> None:
        with self.timed("abort"):
            engine.abort_request(self.random.choice([*self.running, "unknown"]))

    def _invalid(self, engine: Any) -> None:
        call = self.random.choice(INVALID)
        if self.may_record and call is stop_profile:
            return
        with self.timed("invalid"):
            call(engine)
            self.violations.append(f"{inspect.getsource(call).strip()} was accepted")

    def _stats(self, engine: Any) -> None:
        with self.timed("stats"):
            engine.stats()

    def _flush(self, engine: Any) -> None:
        with self.timed("flush"):
            engine.flush_cache()

    def _update_weights(self, engine: Any) -> None:
        with self.timed("update_weights"):
            engine.update_weights(SEEING_MODEL)

    def _profile(self, engine: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.may_record = True
            with self.timed("start_profile"):
                engine.start_profile(folder)
            for _ in range(5):
                self._step(engine)
            with self.timed("stop_profile"):
                if not all(path.is_file() for path in engine.stop_profile()):
                    self.violations.append("stop_profile names a file that is not there")
                self.may_record = False

    # --- faults -------------------------------------------------------------------------------------------------------

    def _kill(self, engine: Any) -> None:
        self._signal(self._one_of(own_engines()), signal.SIGKILL)

    def _stop(self, engine: Any) -> None:
        stopped = self._one_of(own_engines())
        self._signal(stopped, signal.SIGSTOP)
        self.stopped |= set(stopped)

    def _continue(self, engine: Any) -> None:
        """Continue some of the stopped engines; without an engine, all."""
        going = [pid for pid in self.stopped if engine is None or self.random.random() < 0.2 or not is_alive(pid)]
        self._signal(going, signal.SIGCONT)
        self.stopped -= set(going)

    def _one_of(self, pids: list[int]) -> list[int]:
        return [self.random.choice(pids)] if pids else []

    def _signal(self, pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            self.calm_from = time.monotonic() + 3.0

    def report(self, kind: str) -> dict[str, Any]:
        """The episode as plain data."""
        return {
            "seed": self.seed,
            "kind": kind,
            "actions": dict(self.actions),
            "ends": dict(self.ends),
            "seconds": {name: [len(all_), statistics.median(all_), max(all_)] for name, all_ in self.seconds.items()},
            "violations": [f"{number} x {what}" for what, number in Counter(self.violations).items()],
        }
