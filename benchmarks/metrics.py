"""Metrics of a run, from the arrivals of its requests and tokens, and their comparison over paired rounds."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.timing import interval, quantile

Row = dict[str, Any]


@dataclass(frozen=True)
class Goal:
    """Limits that a good request keeps, in seconds (DistServe: SLO)."""

    ttft: float = 0.5
    gap: float = 0.05
    """Mean time between its tokens."""


def gaps_of(run: Row) -> list[float]:
    """Return the seconds between two tokens of the same request, of all requests."""
    return [after - before for times in run["times"] for before, after in pairwise(times)]


def ttfts_of(run: Row) -> list[float]:
    """Return the time to the first token of each request, in seconds."""
    return [times[0] - at for at, times in zip(run["arrived"], run["times"], strict=True) if times]


def goodput(run: Row, goal: Goal) -> float:
    """Return the requests per second that keep both limits of the goal."""
    good = 0
    for at, times in zip(run["arrived"], run["times"], strict=True):
        mean_gap = (times[-1] - times[0]) / max(1, len(times) - 1)
        good += times[0] - at <= goal.ttft and mean_gap <= goal.gap
    return good / run["seconds"]


def acceptance(run: Row) -> float | None:
    """Return the share of the drafted tokens that the model accepted; None without drafts."""
    drafted = run["counts"].get("num_draft_tokens", 0)
    return run["counts"]["num_accepted_tokens"] / drafted if drafted else None


@dataclass(frozen=True)
class Metric:
    """A number that a run has, and its format."""

    of: Callable[[Row, Goal], float | None]
    form: str
    factor: float = 1
    is_share: bool = False
    """Compared by difference, not by ratio: it may be 0."""


METRICS: dict[str, Metric] = {
    "tokens/s": Metric(lambda run, _: sum(map(len, run["times"])) / run["seconds"], "{:,.1f}"),
    "time to first token, mean": Metric(lambda run, _: statistics.fmean(ttfts_of(run)), "{:,.1f} ms", 1e3),
    "time to first token, p95": Metric(lambda run, _: quantile(ttfts_of(run), 0.95), "{:,.1f} ms", 1e3),
    "gap between tokens, median": Metric(lambda run, _: quantile(gaps_of(run) or [0.0], 0.5), "{:,.2f} ms", 1e3),
    "gap between tokens, p95": Metric(lambda run, _: quantile(gaps_of(run) or [0.0], 0.95), "{:,.2f} ms", 1e3),
    "gap between tokens, longest": Metric(lambda run, _: max(gaps_of(run), default=0.0), "{:,.1f} ms", 1e3),
    "goodput": Metric(goodput, "{:,.2f} requests/s", is_share=True),
    "hit rate": Metric(
        lambda run, _: sum(run["cached_tokens"]) / sum(run["prompt_tokens"]), "{:.1f} %", 100, is_share=True
    ),
    "acceptance": Metric(lambda run, _: acceptance(run), "{:.1f} %", 100, is_share=True),
}
"""Of one round each. The longest gap is that of the round: two engines have different steps, so that their gaps cannot
be paired as those of one engine's rounds are (`streams.median_gaps`)."""


def measured(runs: Sequence[Row], goal: Goal) -> dict[str, list[float]]:
    """Return the values of each metric, one per round; a metric that a round does not have is left out."""
    found = {name: [metric.of(run, goal) for run in runs] for name, metric in METRICS.items()}
    return {name: values for name, values in found.items() if None not in values}  # type: ignore[misc]


def summary(values: Sequence[float]) -> Row:
    """Return the mean over the rounds and its confidence interval, which is None for too few rounds."""
    return {"mean": statistics.fmean(values), "interval": interval(values)}


def compared(metric: Metric, own: Sequence[float], other: Sequence[float]) -> Row:
    """Compare two sides round by round: the geometric mean of the ratios, or the mean difference of shares, with its
    confidence interval."""
    if metric.is_share or min(*own, *other) <= 0:
        return {"kind": "difference"} | summary([a - b for a, b in zip(own, other, strict=True)])
    found = summary([math.log(a / b) for a, b in zip(own, other, strict=True)])
    bounds = found["interval"] and tuple(map(math.exp, found["interval"]))
    return {"kind": "ratio", "mean": math.exp(found["mean"]), "interval": bounds}


def formatted(metric: Metric, found: Row) -> str:
    """Return a value and its interval as text."""
    return f"{metric.form.format(metric.factor * found['mean'])} {_bounds(found, '{:,.4g}', metric.factor)}"


def formatted_comparison(metric: Metric, found: Row) -> str:
    """Return a ratio or a difference and its interval as text."""
    if found["kind"] == "ratio":
        return f"x {found['mean']:.3f} {_bounds(found, '{:.3f}')}"
    return f"{metric.factor * found['mean']:+,.3g} {_bounds(found, '{:+,.3g}', metric.factor)}"


def _bounds(found: Row, form: str, factor: float = 1) -> str:
    """Return an interval as text, and a dash where too few rounds give none."""
    return f"[{', '.join(form.format(factor * value) for value in found['interval'] or ()) or '-'}]"
