"""What host and device do in some decode steps, from times of the trace: in normal order and overlapped.

The phases of the host are those of `StepDone`; the times of the device, and of the host's waiting, those of
`StepArrived`. In normal order the trace has neither, so the calls of the model are timed here.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from benchmarks.lesson import SEED
from benchmarks.m6_overlap.measures import PROMPT_TOKENS
from benchmarks.m6_overlap.trace import CONFIGS
from benchmarks.workloads import tokens
from m1_single_request.events import StepDone
from m1_single_request.trace_readers import Records
from m6_multimodal_pd import CacheConfig, LLMEngine, SamplingParams, SchedulerConfig
from m6_multimodal_pd.overlap.events import StepArrived, StepLaunched

REQUESTS, STEPS, SHOWN = 16, 60, 3
"""Requests that decode, steps that are recorded, and steps that are drawn."""


class Bar(NamedTuple):
    """A bar in a lane. Times are seconds."""

    lane: str
    """`host`, `waits` (drawn over it) or `device`."""
    name: str
    """Of a phase."""
    step: int
    begin: float
    end: float


def recorded(enable_overlap: bool) -> list[Bar]:
    """Return the bars of decode steps, of one engine."""
    limits = SchedulerConfig(
        max_num_seqs=REQUESTS, max_num_batched_tokens=REQUESTS * PROMPT_TOKENS, enable_overlap=enable_overlap
    )
    configs = CONFIGS | {"scheduler_config": limits, "cache_config": CacheConfig(max_total_tokens=256 * REQUESTS)}
    params, rng, calls = SamplingParams(max_tokens=STEPS + 10, ignore_eos=True), Random(SEED), list[Bar]()
    with LLMEngine(**configs) as engine:
        for _ in range(REQUESTS):
            engine.add_request(tokens(rng, PROMPT_TOKENS), params)
        for _ in range(4):  # the prompts, and the first calls of everything
            engine.step()
        if not enable_overlap:
            time_calls(engine, calls)
        only(engine.tracer, StepDone, StepLaunched, StepArrived)
        engine.tracer.attach(records := Records())
        for _ in range(STEPS):
            engine.step()
        return bars_of(records) + calls


def time_calls(engine: Any, found: list[Bar]) -> None:
    """Append a bar for each later call of the model: its layers, and its output layer."""
    core = engine.engine_core
    runner = core.executor.worker.model_runner

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                ended, step = time.perf_counter(), core.iteration + 1
                found.extend(Bar(lane, "", step, began, ended) for lane in ("device", "waits"))

        return run

    runner.forward, runner.model.compute_logits = timed(runner.forward), timed(runner.model.compute_logits)


def only(tracer: Any, *kinds: type) -> None:
    """Let a tracer build events of these kinds alone: others, such as the model's favourites, cost the host time."""
    emit = tracer.emit

    def emit_some(factory: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(factory, "__self__", factory) in kinds:
            emit(factory, *args, **kwargs)

    tracer.emit = emit_some


def bars_of(records: Records) -> list[Bar]:
    """Return the phases of the host, its waiting, and the steps of the device, which runs one after the other."""
    phases = {step: event.phases() for step, event in records.of(StepDone)}
    found = [Bar("host", phase.name, step, phase.began, phase.ended) for step, own in phases.items() for phase in own]
    launched, ended = dict[int, float](), 0.0
    for record in records:
        step, event = record.step, record.event
        if isinstance(event, StepLaunched):
            launched[step] = record.time
        elif isinstance(event, StepArrived) and step in launched and step in phases:
            waits = max(began for name, began, _ in phases[step] if name == "execute" and began < record.time)
            until, seconds = waits + event.waited_ms / 1e3, event.device_ms / 1e3
            found.append(Bar("waits", "", step, waits, until))
            has_waited = event.waited_ms > 0.02  # then the end of the step is known, otherwise when it could begin
            begin = until - seconds if has_waited else max(launched[step], ended)
            found.append(Bar("device", "", step, max(begin, ended), ended := max(begin, ended) + seconds))
    return found


def typical(bars: Sequence[Bar]) -> tuple[int, float, float]:
    """Return the first of `SHOWN` steps whose time together is the median; and their begin and end."""
    begins = {bar.step: bar.begin for bar in bars if bar.name == "schedule"}
    firsts = sorted(begins)[1 : -SHOWN - 1]
    times = {step: begins[step + SHOWN] - begins[step] for step in firsts}
    middle = statistics.median_low(times.values())
    step = next(step for step in firsts if times[step] == middle)
    return step, begins[step], begins[step + SHOWN]
