"""The recorded day with arrival times and urgent tenants: what preemption by priority gives them, and what others pay.

`data/m4_arrivals.csv` has one arrival for each request of `m4_tenants.csv`, in steps of the engine, drawn once by
`arrivals`. One tenant in ten is urgent. By the clock of steps every side gets the same requests at the same steps,
regardless of the machine.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from benchmarks.engines import Engines
from benchmarks.lesson import Row
from benchmarks.m4.traffic import TracedRequest, recorded
from benchmarks.serving import Served, num_same, serve
from benchmarks.timing import quantile
from benchmarks.workloads import Workload, recorded_requests

FILE = Path(__file__).parent.parent / "data" / "m4_arrivals.csv"
SEED = 11
MEAN_GAP = 7.5  # steps between two arrivals: a little more than 16 rows can answer, so that requests wait
URGENT_TENANTS = 3, 10  # those whose number leaves 3 when divided by 10
URGENT = 20
MAX_NUM_SEQS = 16
SIDES: dict[str, dict[str, bool]] = {"without": {}, "with preemption": {"priority_preemption": True}}


def arrivals(number: int) -> list[int]:
    """Draw the step in which each request arrives: a Poisson process."""
    rng, at, steps = Random(SEED), 0.0, []
    for _ in range(number):
        steps.append(int(at))
        at += rng.expovariate(1 / MEAN_GAP)
    return steps


def as_csv(steps: Sequence[int]) -> str:
    """Return the text of the file."""
    return "step\n" + "".join(f"{step}\n" for step in steps)


def is_urgent(request: TracedRequest) -> bool:
    """Return whether a request is of an urgent tenant."""
    rest, divisor = URGENT_TENANTS
    return request.tenant % divisor == rest


def day(num_requests: int | None = None) -> Workload:
    """Return the first requests of the day, or all, with the token ids of the course's tokenizer."""
    steps = map(int, FILE.read_text(encoding="utf-8").splitlines()[1:])
    requests = [
        replace(request, at=step, priority=URGENT if is_urgent(traced) else 0)
        for request, traced, step in zip(recorded_requests(num_requests), recorded(), steps, strict=False)
    ]
    return Workload(requests, "steps")


def urgent(engines: Engines, num_requests: int | None, kv_tokens: int) -> Row:
    """Serve the day once on each side, from an empty cache."""
    work, few, runs = day(num_requests), day(8), {}
    for name, limits in SIDES.items():
        scheduler = {"max_num_seqs": MAX_NUM_SEQS, "schedule_policy": "priority", **limits}
        engine = engines("m4", scheduler=scheduler, cache={"max_total_tokens": kv_tokens})
        serve(engine, few)
        runs[name] = serve(engine, work)
    first, *_ = runs.values()
    return work.describe() | {
        "num_urgent": sum(request.priority > 0 for request in work.requests),
        "max_num_seqs": MAX_NUM_SEQS,
        "kv_tokens": kv_tokens,
        "sides": {
            name: _waits(run, work) | {"same_answers": num_same(run.answers, first.answers)}
            for name, run in runs.items()
        },
    }


def _waits(run: Served, work: Workload) -> Row:
    """Return the seconds to the first token and to the last one, of urgent requests and of the others."""

    def seconds(is_urgent: bool, token: int) -> dict[str, float]:
        waits = [
            times[token] - at
            for request, at, times in zip(work.requests, run.arrived, run.times, strict=True)
            if bool(request.priority) == is_urgent
        ]
        return {"mean": statistics.fmean(waits), "p50": quantile(waits, 0.5), "p95": quantile(waits, 0.95)}

    return {
        "urgent": {"first": seconds(True, 0), "last": seconds(True, -1)},
        "others": {"first": seconds(False, 0), "last": seconds(False, -1)},
        "seconds": run.seconds,
        "computed": run.counts["num_prompt_tokens"],
        "preemptions": run.counts["num_preemptions"],
        "retractions": run.counts["num_retractions"],
    }
