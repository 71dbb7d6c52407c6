"""The two lanes of some decode steps, host and device, drawn from times of the trace: in normal order and overlapped.

The bars are those of the Chrome trace: the phases of `StepDone`, and the device. Where the host waits, `StepArrived`
has the time. In normal order the trace has neither device nor waiting, so the calls of the model are timed here.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.lesson import SEED
from benchmarks.m6_overlap.measures import PROMPT_TOKENS
from benchmarks.m6_overlap.trace import CONFIGS
from benchmarks.plots import SMALL, bare, legend, panels
from benchmarks.workloads import tokens
from m1_single_request.events import StepDone
from m1_single_request.trace_readers import ChromeTraceReader
from m6_multimodal_pd import CacheConfig, LLMEngine, SamplingParams, SchedulerConfig
from m6_multimodal_pd.overlap.events import StepArrived, StepLaunched

REQUESTS, STEPS, SHOWN = 16, 60, 3
"""Requests that decode, steps that are recorded, and steps that are drawn."""
HOST = {"schedule": "#a6dba0", "execute": "#fdb863", "sample": "#d9c3e8", "update": "#92c5de"}
NAMES = {"schedule": "schedule", "execute": "inputs, launch", "sample": "choose tokens", "update": "update, text"}
WAITS, DEVICE = "0.88", "#d6604d"


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
    with tempfile.TemporaryDirectory() as folder, LLMEngine(**configs) as engine:
        for _ in range(REQUESTS):
            engine.add_request(tokens(rng, PROMPT_TOKENS), params)
        for _ in range(4):  # the prompts, and the first calls of everything
            engine.step()
        if not enable_overlap:
            time_calls(engine, calls)
        only(engine.tracer, StepDone, StepLaunched, StepArrived)
        reader = ChromeTraceReader(path := Path(folder) / "trace.json")
        engine.tracer.attach(reader)
        for _ in range(STEPS):
            engine.step()
        engine.tracer.detach(reader)
        return bars_of(json.loads(path.read_text(encoding="utf-8"))["traceEvents"]) + calls


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


def bars_of(events: Sequence[dict[str, Any]]) -> list[Bar]:
    """Return the bars of a Chrome trace: the phases of the engine, the device, and where the host waited for it."""
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    kinds, found = {"engine": "host", "device": "device"}, list[Bar]()
    for event in events:
        if event["ph"] == "X" and (lane := kinds.get(lanes[event["tid"]])) is not None:
            begin, seconds = event["ts"] / 1e6, event["dur"] / 1e6
            found.append(Bar(lane, event["name"], event["args"]["step"], begin, begin + seconds))
    for event in (event for event in events if event["name"] == "step_arrived"):  # the host has begun to wait before
        begin = max(bar.begin for bar in found if bar.name == "execute" and 1e6 * bar.begin < event["ts"])
        found.append(Bar("waits", "", 0, begin, begin + event["args"]["waited_ms"] / 1e3))
    return found


def typical(bars: Sequence[Bar]) -> tuple[int, float, float]:
    """Return the first of `SHOWN` steps whose time together is the median; and their begin and end."""
    begins = {bar.step: bar.begin for bar in bars if bar.name == "schedule"}
    firsts = sorted(begins)[1 : -SHOWN - 1]
    times = {step: begins[step + SHOWN] - begins[step] for step in firsts}
    middle = statistics.median_low(times.values())
    step = next(step for step in firsts if times[step] == middle)
    return step, begins[step], begins[step + SHOWN]


def draw_lanes(axis: Axes, bars: Sequence[Bar], first: int, origin: float, end: float) -> None:
    """Draw the lanes of host and device from `origin` to `end`, in milliseconds, with the number of each bar's step."""
    room = 0.028 * 1e3 * (end - origin)
    for bar in sorted(bars, key=lambda bar: bar.lane == "waits"):  # over the phases
        begin, stop = 1e3 * (max(bar.begin, origin) - origin), 1e3 * (min(bar.end, end) - origin)
        if stop <= begin:
            continue
        color = WAITS if bar.lane == "waits" else DEVICE if bar.lane == "device" else HOST[bar.name]
        place = 0 if bar.lane == "device" else 1
        axis.broken_barh([(begin, stop - begin)], (place + 0.1, 0.8), color=color, lw=0)
        if (bar.lane == "device" or bar.name == "update") and stop - begin > room:
            text = f"N{bar.step - first:+d}" if bar.step != first else "N"
            axis.text((begin + stop) / 2, place + 0.5, text, ha="center", va="center", **SMALL)
    axis.set(ylim=(0, 2))
    axis.set_yticks([0.5, 1.5], ["device", "host"], **SMALL)
    axis.tick_params(axis="y", length=0)
    bare(axis, "top", "right", "left")


def lanes(ways: dict[str, list[Bar]]) -> Figure:
    """Draw some steps of each way, one below the other, over the same time."""
    figure, axes = panels(10, 3.9, len(ways), 1, sharex=True)
    found = {name: typical(bars) for name, bars in ways.items()}
    longest = max(end - begin for _, begin, end in found.values())
    for axis, (name, bars) in zip(axes, ways.items(), strict=True):
        first, begin, end = found[name]
        draw_lanes(axis, bars, first, begin, begin + longest)
        axis.axvline(1e3 * (end - begin), color="0.3", lw=1, ls=":")
        axis.set_title(f"{name}: {SHOWN} steps in {1e3 * (end - begin):.1f} ms", fontsize=10, loc="left")
    axes[-1].set(xlabel="ms", xlim=(0, 1e3 * longest))
    colors = {name: HOST[phase] for phase, name in NAMES.items()}
    legend(figure, colors | {"the host waits": WAITS, "the device computes": DEVICE}, place="lower center")
    return figure


def draw_pictures(folder: Path) -> None:
    """Draw the picture into a folder."""
    torch.set_num_threads(1)
    ways = {"normal": recorded(False), "overlapped": recorded(True)}
    lanes(ways).savefig(folder / "m6_overlap_lanes.png", dpi=110)
