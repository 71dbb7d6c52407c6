"""Time that calls take: sides in turns, medians, ratios of rounds, confidence intervals, clocks around methods.

A speed is a median over the rounds, and "times as fast" the median of the rounds' ratios (`ratio`). Where a confidence
interval stands beside it (`metrics.py`), it is their geometric mean, to which the interval belongs.
"""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""97.5 % quantiles of Student's t with 1 to 9 degrees of freedom."""
LEAST_ROUNDS = 3
"""Fewer values have no confidence interval."""


def seconds_of(call: Callable[[], object]) -> float:
    """Call once and return the seconds that it took."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def in_turns(sides: Mapping[str, Callable[[], Any]], *, rounds: int) -> dict[str, list[Any]]:
    """Call every side once a round and return the results of each. A first round only warms up.

    The sides take turns, so that a machine that gets slower slows all of them.
    """
    results: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, call in sides.items():
            result = call()
            if number:
                results[name].append(result)
    return results


def medians(results: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each side's rounds."""
    return {name: statistics.median(values) for name, values in results.items()}


def interleaved(sides: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, float]:
    """Return the median seconds of each side, measured in turns; each call measures once and returns seconds."""
    return medians(in_turns(sides, rounds=rounds))


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the rounds' ratios: the two sides of a round ran within the same minute."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the mean by Student's t, or None for fewer than `LEAST_ROUNDS` values."""
    if len(values) < LEAST_ROUNDS:
        return None
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t with so many degrees of freedom, to four digits.

    From ten degrees on it is an expansion around the normal quantile (Abramowitz and Stegun, 26.7.5).
    """
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


class Clocks:
    """Seconds of some methods of an engine's parts, added up by the method's name, within `with`."""

    def __init__(self, **watched: object) -> None:
        self._watched = watched
        self.seconds: dict[str, float] = defaultdict(float)

    def __enter__(self) -> Self:
        for name, part in self._watched.items():
            setattr(part, name, self._timed(name, getattr(part, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for name, part in self._watched.items():
            delattr(part, name)  # the method of the class is visible again

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args, **keywords)
            self.seconds[name] += time.perf_counter() - begin
            return result

        return timed
