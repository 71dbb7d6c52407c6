"""m5: the gaps of streams by the budget of a step, and by `target_gap_ms`, against prefill_first and m4."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.engines import Engines
from benchmarks.streams import Row, Traffic, compare, measured

WHOLE, PIECES, M4 = "prefill_first, whole prompts", "prefill_first, pieces of 256", "m4"
LEAST_THROUGHPUT, LATEST_FIRST_TOKEN = 0.9, 2.0
"""What short gaps may cost: a share of the throughput, and times the first token, of those with whole prompts first."""


def by_budget(engines: Engines, traffic: Traffic, budgets: Sequence[int], targets: Sequence[float], rounds: int) -> Row:
    """Measure gaps and throughput by budget and by `target_gap_ms`, against prefill_first and m4."""

    def m5(**limits: Any) -> Any:
        return engines("m5", scheduler={"max_num_seqs": 32} | limits)

    most = max(budgets)
    costs = m5(max_num_batched_tokens=most, target_gap_ms=1.0).engine_core.scheduler.composer.cost_table
    references = {
        M4: engines("m4", scheduler={"max_num_seqs": 32}),
        WHOLE: m5(schedule="prefill_first", enable_chunked_prefill=False),
        PIECES: m5(schedule="prefill_first", max_num_batched_tokens=256),
    }
    by_size = {f"{budget} tokens": m5(max_num_batched_tokens=budget) for budget in budgets}
    by_target = {
        f"target {ms:g} ms": m5(max_num_batched_tokens=most, target_gap_ms=ms, cost_table=costs) for ms in targets
    }
    found = measured(references | by_size | by_target, traffic.workload(), traffic.num_streams, rounds)
    compare(found, found[WHOLE])
    part = {
        "traffic": traffic.describe(),
        "rounds": rounds,
        "references": {name: found[name] for name in references},
        "budgets": {name: found[name] | {"tokens": n} for name, n in zip(by_size, budgets, strict=True)},
        "targets": {name: found[name] | {"target": ms / 1e3} for name, ms in zip(by_target, targets, strict=True)},
    }
    return part | {"costs": vars(costs), "best": best(part["budgets"] | part["targets"])}


def best(rows: Mapping[str, Row]) -> Row:
    """Return the side with the shortest longest gap, of those that cost little and with which no prompts pile up."""
    enough = {
        name: row
        for name, row in rows.items()
        if row["throughput_share"] >= LEAST_THROUGHPUT and row["times_ttft"] <= LATEST_FIRST_TOKEN
    }
    name = max(enough or rows, key=lambda name: rows[name]["longest_times_less"])
    keys = ("p95_times_less", "longest_times_less", "throughput_share")
    return {"side": name} | {key: rows[name][key] for key in keys}
