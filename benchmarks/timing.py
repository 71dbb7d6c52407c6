"""Time that calls take: sides in turns, medians, ratios of rounds, confidence intervals, clocks around methods."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, Self

DRAWS, CONFIDENCE = 2000, 0.95


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


def interleaved(sides: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, float]:
    """Return the median seconds of each side, measured in turns; each call measures once and returns seconds."""
    return {name: statistics.median(values) for name, values in in_turns(sides, rounds=rounds).items()}


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the rounds' ratios: the two sides of a round ran within the same minute."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)]


def interval(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean: a bootstrap over the values, the same for the same seed."""
    rng = Random(seed)
    means = [statistics.fmean(rng.choices(values, k=len(values))) for _ in range(DRAWS)]
    tail = (1 - CONFIDENCE) / 2
    return quantile(means, tail), quantile(means, 1 - tail)


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
