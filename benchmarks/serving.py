"""Drives an engine through a workload and records the arrival of every request and of every token.

`serve` is the one loop of all measurements of streams: requests arrive while others run. `answer` hands in everything
at once, as a batch. Both work with the engines of every milestone and checkout.
"""

import gc
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from benchmarks.workloads import Request, Workload


@dataclass
class Served:
    """One run of a workload: times in seconds since its start, one entry for each request."""

    arrived: list[float]
    times: list[list[float]]
    """Arrival of each output token of each request."""
    outputs: list[Any]
    """The last output of each request."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """Duration of each step of the engine, and number of requests that it changed."""
    seconds: float = 0.0
    counts: dict[str, int | float] = field(default_factory=dict)
    """Changes of the engine's totals: `num_steps`, `num_prompt_tokens`, ..."""

    @property
    def answers(self) -> list[tuple[int, ...]]:
        """Return the tokens of each answer."""
        return [tuple(output.token_ids) for output in self.outputs]

    @property
    def metrics(self) -> list[Any]:
        """Return the engine's metrics of each request."""
        return [output.metrics for output in self.outputs]

    def gaps(self, number: int | None = None) -> list[float]:
        """Return the seconds between two tokens of each of the first `number` requests, or of all."""
        return [after - before for times in self.times[:number] for before, after in pairwise(times)]

    def ttfts(self, first: int = 0) -> list[float]:
        """Return the seconds from arrival to the first token of each request from `first` on."""
        return [times[0] - at for at, times in zip(self.arrived[first:], self.times[first:], strict=True)]


def request_params(engine: Any, request: Request) -> Any:
    """Return sampling parameters for a request, of the engine's own class."""
    package = importlib.import_module(type(engine.config).__module__.partition(".")[0])
    return package.SamplingParams(max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)


def encoded(engine: Any, prompt: Any, *, continues: bool = False) -> Any:
    """Return a prompt as the engine takes it: messages become token ids, with their pictures; so does a text that
    `continues` other tokens, without special tokens before it."""
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        return engine.chat_prompt(prompt)
    if continues and isinstance(prompt, str):
        return engine.engine_core.input_processor.encode(prompt, add_special_tokens=False)
    return prompt


def totals(engine: Any) -> dict[str, int | float]:
    """Return the numbers among the engine's statistics."""
    return {name: value for name, value in vars(engine.stats()).items() if isinstance(value, int | float)}


def prepared(engine: Any, flush: bool) -> dict[str, int | float]:
    """Empty the prefix cache, where there is one, and return the engine's totals."""
    if flush and hasattr(engine, "flush_cache"):
        engine.flush_cache()
    gc.collect()
    return totals(engine)


def answer(engine: Any, work: Workload, *, flush: bool = True) -> Served:
    """Answer all requests as one batch. Raises the error of a request that failed."""
    prompts = [encoded(engine, request.prompt) for request in work.requests]
    params = [request_params(engine, request) for request in work.requests]
    before = prepared(engine, flush)
    begin = time.perf_counter()
    outputs = list(engine.generate_batch(prompts, params, progress=False).values())
    served = Served([0.0] * len(outputs), [], outputs, seconds=time.perf_counter() - begin)
    return _checked(served, before, engine)


def serve(engine: Any, work: Workload, *, flush: bool = True) -> Served:
    """Answer the requests as they arrive, from an empty cache if `flush`. Raises the error of a request that failed."""
    service = Service(engine, work)
    before = prepared(engine, flush)
    return _checked(service.run(), before, engine)


def _checked(served: Served, before: dict[str, int | float], engine: Any) -> Served:
    for output in served.outputs:
        if output.error is not None:
            raise output.error
    served.counts = {name: value - before[name] for name, value in totals(engine).items() if name.startswith("num_")}
    return served


class Service:
    """The requests of one workload at one engine."""

    def __init__(self, engine: Any, work: Workload) -> None:
        self.engine, self.work = engine, work
        self.prompts = [encoded(engine, r.prompt, continues=r.after is not None) for r in work.requests]
        self.params = [request_params(engine, request) for request in work.requests]
        number = len(work.requests)
        self.served = Served([0.0] * number, [[] for _ in range(number)], [None] * number)
        self.pending = list(range(number))
        self.number_of: dict[str, int] = {}
        self.num_there = 0
        """Number of requests that have arrived and not ended."""
        self.streams = [i for i, r in enumerate(work.requests) if r.at == 0.0 and r.after is None]

    def run(self) -> Served:
        """Answer all requests."""
        self.begin = time.perf_counter()
        self._submit_due()
        while self.pending or self.engine.has_unfinished_requests():
            if self.engine.has_unfinished_requests():
                self._step()
            else:
                self._wait()
            self._submit_due()
        self.served.seconds = self._now()
        return self.served

    def _now(self) -> float:
        return time.perf_counter() - self.begin

    def _due(self, number: int) -> float:
        """Return the arrival of a request by the workload's clock; infinity while an earlier turn runs."""
        request = self.work.requests[number]
        if request.after is None:
            return request.at
        before = self.served.outputs[request.after]
        if before is None or not before.finished:
            return float("inf")
        return request.at + (self.served.times[request.after][-1] if self.work.clock == "seconds" else 0.0)

    def _clock(self) -> float:
        if self.work.clock == "seconds":
            return self._now()
        if self.work.clock == "steps":
            return len(self.served.steps)
        return fmean(len(self.served.times[number]) for number in self.streams)

    def _submit_due(self) -> None:
        now = self._clock()
        due = [number for number in self.pending if self._due(number) <= now]
        for number in due if self.work.at_once is None else due[: self.work.at_once - self.num_there]:
            self._submit(number)

    def _submit(self, number: int) -> None:
        self.pending.remove(number)
        self.num_there += 1
        prompt, after = self.prompts[number], self.work.requests[number].after
        if after is not None:
            before = self.served.outputs[after]
            prompt = [*before.prompt_token_ids, *before.token_ids, *prompt]
        self.served.arrived[number] = self._now()
        priority = self.work.requests[number].priority
        options = {"priority": priority} if priority else {}
        self.number_of[self.engine.add_request(prompt, self.params[number], **options)] = number

    def _wait(self) -> None:
        """Wait for the next arrival; by a clock that stands still without requests, submit it now."""
        following = min(self.pending, key=self._due)
        if self.work.clock == "seconds":
            time.sleep(max(0.0, self._due(following) - self._now()))
        else:
            self._submit(following)

    def _step(self) -> None:
        begin = self._now()
        outputs = self.engine.step()
        now = self._now()
        self.served.steps.append((now - begin, len(outputs)))
        for request_id, output in outputs.items():
            number = self.number_of[request_id]
            times = self.served.times[number]
            times += [now] * (len(output.token_ids) - len(times))
            self.served.outputs[number] = output
            self.num_there -= output.finished


class Side:
    """An engine that answers a workload whenever it is called; returns the seconds. `runs` keeps the counted runs."""

    def __init__(
        self, engine: Any, work: Workload, run: Callable[..., Served] = answer, *, warm_up: Workload | None = None
    ) -> None:
        self.engine, self.work, self.run = engine, work, run
        self.warm_up = warm_up or work.shortened()
        self.runs: list[Served] = []
        self.is_warm = False

    def __call__(self) -> float:
        served = self.run(self.engine, self.work if self.is_warm else self.warm_up)
        if self.is_warm:
            self.runs.append(served)
        self.is_warm = True
        return served.seconds

    @property
    def last(self) -> Served:
        """Return the last run."""
        return self.runs[-1]

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of the counted runs."""
        return [run.seconds for run in self.runs]

    def median(self, of: Callable[[Served], float]) -> float:
        """Return the median of a figure over the counted runs."""
        return median(of(run) for run in self.runs)


def num_same(answers: Sequence[Any], others: Sequence[Any]) -> int:
    """Return the number of equal answers."""
    return sum(a == b for a, b in zip(answers, others, strict=True))
