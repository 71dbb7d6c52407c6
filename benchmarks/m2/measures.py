"""m2: throughput of padded and per-request execution and of static batches, the two limits, and the padding.

Everything that is counted (steps, tokens, bytes) is the same on every machine.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import reference, traces
from benchmarks.engines import EMBEDDED, Engines
from benchmarks.lesson import SEED, Row
from benchmarks.serving import Served, Side, answer, num_same, serve
from benchmarks.streams import median_gaps
from benchmarks.timing import interleaved, quantile, ratio
from benchmarks.traces import watched
from benchmarks.workloads import Request, Workload, drawn
from m1_single_request.events import StepDone
from m2_continuous_batching.events import Batch, Forward, KVUsage
from m2_continuous_batching.views.timeline import Timeline

NUM_REQUESTS, NUM_QUEUED = 64, 16
SEQS = (1, 2, 4, 8, 16, 32, 64)
BUDGETS = (256, 512, 1024, 4096)
MAX_MODEL_LEN = 4096
FIVE = ((6, 4), (4, 14), (8, 3), (5, 8), (3, 5))
"""Prompt and output tokens of the five requests of the picture."""


def workload(number: int) -> Workload:
    """Return the requests that every side gets at once."""
    return drawn(number, prompts=(16, 256), outputs=(16, 128), seed=SEED)


def engines() -> Engines:
    """Return a maker of engines, float32 on the CPU."""
    return Engines(max_model_len=MAX_MODEL_LEN)


def mean_of(served: Served, name: str) -> float:
    """Return the mean of a metric over the requests, in seconds."""
    return statistics.mean(getattr(metrics, name) or 0.0 for metrics in served.metrics)


def throughput(work: Workload, rounds: int) -> Row:
    """Measure tokens per second of all sides, and compare their answers."""
    model = reference.load(EMBEDDED, SEED)
    with engines() as made:
        sides: dict[str, Side] = {}
        for seqs in (16, 64):
            for execution in ("per_request", "padded"):
                engine = made("m2", scheduler={"execution": execution, "max_num_seqs": seqs})
                sides[f"{execution} {seqs}"] = Side(engine, work)
                sides.setdefault(f"static {seqs}", Side(model, work, reference.static(seqs)))
        seconds = interleaved(sides, rounds=rounds)
        rows = [_row(name, side, seconds[name], work) for name, side in sides.items()]
        first = sides["per_request 16"].last.answers
        for row, side in zip(rows, sides.values(), strict=True):
            row["same_answers"] = num_same(side.last.answers, first)
            for other in ("per_request", "static"):
                row[f"times_{other}"] = ratio(sides[f"{other} {row['max_num_seqs']}"].seconds, side.seconds)
    return {"num_requests": len(work.requests), "rows": rows}


def _row(name: str, side: Side, seconds: float, work: Workload) -> Row:
    execution, seqs = name.split()
    steps = side.last.counts["num_steps"]
    return {
        "side": execution,
        "max_num_seqs": int(seqs),
        "seconds": seconds,
        "tokens_per_second": work.num_output_tokens / seconds,
        "steps": steps,
        "rows_used": work.num_output_tokens / (steps * int(seqs)),
        "mean_latency": side.median(lambda served: mean_of(served, "latency")),
        "p95_latency": side.median(lambda served: quantile([m.latency for m in served.metrics], 0.95)),
    }


def phases(work: Workload) -> dict[str, float]:
    """Return the median seconds of each phase of a decode step with 16 requests."""
    with engines() as made:
        batches, steps = watched(engine := made("m2"), lambda: answer(engine, work), Batch, StepDone)
    most, pairs = max(len(batch.rids) for batch in batches), zip(batches, steps, strict=True)
    return traces.phases([step for batch, step in pairs if batch.mode == "decode" and len(batch.rids) == most])


def limits(work: Workload, rounds: int) -> dict[str, list[Row]]:
    """Measure what `max_num_seqs` and `max_num_batched_tokens` do to throughput and waiting."""
    budgets = [{"max_num_seqs": 16, "max_num_batched_tokens": number} for number in BUDGETS]
    return {
        "max_num_seqs": limited(work, rounds, [{"max_num_seqs": seqs} for seqs in SEQS]),
        "max_num_batched_tokens": limited(work, rounds, budgets),
    }


def limited(work: Workload, rounds: int, settings: Sequence[dict[str, int]]) -> list[Row]:
    """Measure engines with these limits in turns."""
    with engines() as made:
        sides = {str(setting): Side(made("m2", scheduler=setting), work, serve) for setting in settings}
        seconds = interleaved(sides, rounds=rounds)
        return [
            setting
            | {
                "seconds": seconds[name],
                "tokens_per_second": work.num_output_tokens / seconds[name],
                "steps": side.last.counts["num_steps"],
                "mean_ttft": side.median(lambda served: mean_of(served, "time_to_first_token")),
                "mean_tpot": side.median(lambda served: mean_of(served, "time_per_output_token")),
                "mean_latency": side.median(lambda served: mean_of(served, "latency")),
                "longest_gap": max(median_gaps(side.runs)),
            }
            for setting, (name, side) in zip(settings, sides.items(), strict=True)
        ]


def padding(work: Workload) -> list[Row]:
    """Count padded tokens and reserved KV memory."""
    with engines() as made:
        return [padded(made("m2", scheduler={"max_num_seqs": seqs}), seqs, work) for seqs in (4, 16, 64)]


def padded(engine: Any, seqs: int, work: Workload) -> Row:
    """Count what one engine pads."""
    forwards, usage = watched(engine, lambda: answer(engine, work), Forward, KVUsage)
    row: Row = {"max_num_seqs": seqs, "steps": len(usage)}
    for mode in ("prefill", "decode"):
        own = [forward for forward in forwards if forward.mode == mode]
        row[mode] = {
            "useful": sum(f.useful_tokens for f in own),
            "padded": sum(f.padded_tokens for f in own),
            "kv_read": sum(f.kv_read for f in own),
            "kv_needed": sum(f.kv_needed for f in own),
        }
    row["kv_reserved"] = usage[0].kv_bytes_reserved
    row["kv_peak"] = max(step.kv_bytes_used for step in usage)
    if seqs == 16:
        row["per_step"] = [
            {"useful": u.useful_tokens, "padded": u.padded_tokens, "kv_used": u.kv_bytes_used} for u in usage
        ]
    return row


def walls(work: Workload) -> list[Row]:
    """Measure requests that arrive together, in m1 and in m2: first tokens and ends."""
    queued = Workload(work.requests[:NUM_QUEUED])
    rows: list[Row] = [{"request": number} for number in range(1, len(queued.requests) + 1)]
    with engines() as made:
        for name in ("m1", "m2"):
            engine = made(name)
            answer(engine, Workload(work.requests[:2]))  # warms up
            for row, metrics in zip(rows, answer(engine, queued).metrics, strict=True):
                row |= {f"{name}_ttft": metrics.time_to_first_token, f"{name}_latency": metrics.latency}
    return rows


def timeline() -> Row:
    """Record what each of five requests does in each step, in three places, static and continuous."""
    requests = [Request([1000] * prompt, output) for prompt, output in FIVE]
    groups = {"static": (slice(3), slice(3, 5)), "continuous": (slice(5),)}
    with engines() as made:
        engine = made("m2", scheduler={"max_num_seqs": 3})
        return {kind: _lanes(engine, [Workload(requests[group]) for group in own]) for kind, own in groups.items()}


def _lanes(engine: Any, batches: Sequence[Workload]) -> Row:
    timeline = Timeline()
    engine.tracer.attach(timeline)
    for batch in batches:
        answer(engine, batch)
    engine.tracer.detach(timeline)
    cells = [
        ["wait"] * lane.begin + ["wait" if state == "queued" else state for state in lane.states]
        for lane in timeline.lanes.values()
    ]
    steps = len(timeline.steps)
    return {"steps": steps, "cells": cells, "rows_used": sum(length for _, length in FIVE) / (3 * steps)}
