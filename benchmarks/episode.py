"""One random life of an engine, with faults: an episode of `python -m benchmarks soak`.

An episode builds an engine alone, a group of processes, or a group whose engines are started by hand; submits texts and
pictures under n-gram speculation; aborts, drops streams, passes invalid values; kills engines, stops them with SIGSTOP,
continues some; then closes the engine, drops it, or exits with it open.
"""

import gc
import inspect
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import SEEING_MODEL, TEXT_MODEL
from benchmarks.processes import children
from benchmarks.texts import SMALL, image, text
from m6_multimodal_pd import (
    CacheConfig,
    DisaggregationConfig,
    EngineError,
    LLMEngine,
    SamplingParams,
    SpeculativeConfig,
)

CALM_S = {"stats": 2.0, "step": 2.0, "submit": 2.0, "abort": 2.0, "invalid": 2.0, "close": 5.0, "drop": 5.0}
"""Longest time of a call while all engines run, in seconds; 5 for all others."""
LOADING_S = {"build": 60.0, "update_weights": 15.0, "stop_profile": 15.0}
"""Calls that load a model or write a trace; these are not waits."""
BESIDE_STOPPED_S = 17.0
"""Longest time of a call beside a stopped process: 15 s until it counts as lost, and a margin."""
ANSWER_S = 90.0
"""Longest time until a request ends: 15 s to notice a stopped process, then a new one, up to twice."""


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


def questions() -> list[tuple[Any, SamplingParams]]:
    """Return conversations with their parameters: texts to repeat, pictures, both, greedy and drawn."""
    first, second = image(0, SMALL), image(1, SMALL)
    repeat = "Repeat this text:\nsee a green lamp and a green bird"
    contents: list[Any] = [
        repeat,
        [text(repeat), first],
        [first, second, text("What changed?")],
        [second, text("Describe the picture.")],
        "What is a KV cache?",
        " ".join(["the cache keeps keys and values of tokens"] * 12),
    ]
    found = []
    for number, content in enumerate(contents):
        drawn = {"temperature": 0.8, "seed": number} if number % 3 == 2 else {}
        params = SamplingParams(max_tokens=16 + 12 * number, ignore_eos=True, **drawn)
        found.append(([{"role": "user", "content": content}], params))
    return found


class Episode:
    """One random life of an engine, and its violations."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(f"episode {seed}")
        self.violations: list[str] = []
        self.actions: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.ends: Counter[str] = Counter()
        self.stopped: dict[int, float] = {}
        self.calm_from = 0.0
        self.asked: list[tuple[Any, SamplingParams, tuple[int, ...]]] = []
        self.running: dict[str, tuple[int, float]] = {}
        self.by_hand: list[subprocess.Popen[bytes]] = []
        self.may_record = False  # a call that ended in an error may have left some engines recording a profile

    def run(self, kind: str) -> None:
        """Live; leaves an open engine only if that is how the episode ends."""
        guess = SpeculativeConfig(method="ngram") if self.random.random() < 0.7 else SpeculativeConfig()
        cache = CacheConfig(page_size=self.random.choice([1, 4, 16]), max_total_tokens=2048, debug=True)
        shared: dict[str, Any] = {"speculative_config": guess, "cache_config": cache}
        with LLMEngine(**shared) as alone:
            for messages, params in questions():
                prompt = alone.chat_prompt(messages)
                self.asked.append((prompt, params, tuple(alone.generate(prompt, params).token_ids)))
        for _ in range(self.random.randint(1, 3)):
            self.may_record = False
            with self.timed("build"):
                engine = self._built(kind, shared)
            self._use(engine, self.random.uniform(5, 25), kind)
            self._end(engine)
            del engine
            self._check_children()

    # --- engines ------------------------------------------------------------------------------------------------------

    def _built(self, kind: str, shared: dict[str, Any]) -> Any:
        if kind == "alone":
            return LLMEngine(**shared)
        sizes = {"prefill": self.random.randint(1, 2), "decode": self.random.randint(1, 2)}
        if kind == "group":
            return LLMEngine(**shared, disaggregation_config=DisaggregationConfig(**sizes, max_restarts=100))
        folder = Path(tempfile.mkdtemp())
        program = [sys.executable, "-m", "m6_multimodal_pd.pd"]
        subprocess.run([*program, "keys", folder / "keys"], check=True, stdout=subprocess.DEVNULL)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        page = f"--page-size={shared['cache_config'].page_size}"
        for role, number in sizes.items():
            for _ in range(number):
                command = [*program, role, "--join", address, "--keys", folder / "keys", page, "--threads=1"]
                quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                self.by_hand.append(subprocess.Popen(command, **quiet, process_group=0))
        group = DisaggregationConfig(**sizes, address=address, key_file=folder / "keys")
        return LLMEngine(**shared, disaggregation_config=group)

    def _use(self, engine: Any, seconds: float, kind: str) -> None:
        actions: dict[Callable[[Any], None], int] = {
            self._submit: 30,
            self._step: 60,
            self._drop_stream: 6,
            self._abort: 6,
            self._invalid: 6,
            self._stats: 4,
            self._flush: 2,
            self._update_weights: 1,
            self._profile: 1,
        }
        if kind != "alone":
            actions |= {self._kill: 1, self._stop: 1, self._continue: 3}
        end = time.monotonic() + seconds
        while time.monotonic() < end and (kind == "alone" or children()):
            (action,) = self.random.choices(list(actions), list(actions.values()))
            self.actions[action.__name__.strip("_")] += 1
            action(engine)
        if self.random.random() < 0.7:
            deadline = time.monotonic() + ANSWER_S
            while engine.has_unfinished_requests() and time.monotonic() < deadline:
                self._step(engine)
            for rid in self.running:
                self.violations.append(f"{rid} has no end after {ANSWER_S:g} s")
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
        for process in self.by_hand:  # engines end by themselves when their router is gone; stopped ones cannot
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
        self.by_hand.clear()

    def _check_children(self) -> None:
        deadline = time.monotonic() + 5
        while (left := children()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            self.violations.append(f"processes left: {left}")

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
        calm = not was_stopped and not self.stopped and began > self.calm_from
        limit = LOADING_S.get(name, CALM_S.get(name, 5.0)) if calm else LOADING_S.get(name, 0.0) + BESIDE_STOPPED_S
        if name in ("stats", "step", "submit", "abort"):
            limit = CALM_S[name]
        self.seconds[name + ("" if calm else ", beside a fault")].append(took)
        if took > limit:
            self.violations.append(
                f"{name} took {took:.1f} s; {limit:g} s are allowed{'' if calm else ' beside a fault'}"
            )

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
                for path in engine.stop_profile():
                    if not path.is_file():
                        self.violations.append("stop_profile names a file that is not there")
                self.may_record = False

    # --- faults -------------------------------------------------------------------------------------------------------

    def _kill(self, engine: Any) -> None:
        self._signal(signal.SIGKILL)

    def _stop(self, engine: Any) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if found := children():
            pid = self.random.choice(found)
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            if number == signal.SIGSTOP:
                self.stopped[pid] = time.monotonic()
            self.calm_from = time.monotonic() + 3.0

    def _continue(self, engine: Any) -> None:
        for pid in list(self.stopped):
            if engine is None or self.random.random() < 0.2 or not Path(f"/proc/{pid}").exists():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                del self.stopped[pid]
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
