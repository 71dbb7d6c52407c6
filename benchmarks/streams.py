"""Streams beside prompts: the gaps between the tokens of the streams, and the throughput of everything.

Streams are being answered while prompts arrive, by the clock of steps or of tokens: every side gets the same prompts at
the same places of the same answers. With too little room for the arrivals prompts pile up: so the time to their first
token is measured, too.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks import Row
from benchmarks.serving import Served, serve
from benchmarks.timing import in_turns, quantile
from benchmarks.workloads import Request, Workload, streams_beside, tokens

ANSWER = 8  # tokens of every request but the streams


@dataclass(frozen=True)
class Traffic:
    """The streams, and the prompts that arrive while they run."""

    num_streams: int = 8
    stream_tokens: int = 180
    prompt_tokens: int = 1000
    every: int = 12
    """Prompts arrive whenever every stream, on average, has got so many tokens more."""
    seed: int = 1
    at_once: int = 1

    @property
    def num_prompts(self) -> int:
        """Number of prompts that arrive while the streams run; none at their very end."""
        return (self.stream_tokens // self.every - 1) * self.at_once

    def workload(self, prompts: Sequence[Any] = ()) -> Workload:
        """Return streams and prompts: random ones, or these."""
        rng = Random(self.seed)
        prompts = prompts or [tokens(rng, self.prompt_tokens) for _ in range(self.num_prompts)]
        arrivals = [self.every * (number // self.at_once + 1) for number in range(self.num_prompts)]
        requests = [Request(prompt, ANSWER, at) for prompt, at in zip(prompts, arrivals, strict=True)]
        return streams_beside(
            requests, number=self.num_streams, num_tokens=self.stream_tokens, clock="tokens", seed=self.seed + 1
        )

    def describe(self) -> Row:
        """Return the traffic as plain data, for a results file."""
        return vars(self) | {"answer": ANSWER, "num_prompts": self.num_prompts}


def measured(sides: Mapping[str, Any], work: Workload, num_streams: int, rounds: int) -> Row:
    """Measure all sides in turns, from empty caches; the first `num_streams` requests are the streams."""
    runs = in_turns({name: lambda engine=engine: serve(engine, work) for name, engine in sides.items()}, rounds=rounds)
    total = work.num_prompt_tokens + work.num_output_tokens
    return {name: summary(own, num_streams, total) for name, own in runs.items()}


def summary(runs: Sequence[Served], num_streams: int, total_tokens: int) -> Row:
    """Return medians over the rounds, in seconds, and the last round in detail."""
    last, seconds, gaps = runs[-1], statistics.median(run.seconds for run in runs), median_gaps(runs, num_streams)
    return {
        "p50": quantile(gaps, 0.5),
        "p95": quantile(gaps, 0.95),
        "p99": quantile(gaps, 0.99),
        "longest": max(gaps),
        "total": sum(gaps),
        "seconds": seconds,
        "tokens_per_second": total_tokens / seconds,
        "mean_ttft": statistics.median(statistics.mean(run.ttfts(num_streams) or [0.0]) for run in runs),
        "stream": [round(at, 6) for at in last.times[0]],
        "arrived": [round(at, 6) for at in last.arrived[num_streams:]],
    }


def median_gaps(runs: Sequence[Served], number: int | None = None) -> list[float]:
    """Return the gaps of the first `number` requests, or of all: each is the median of the same gap in every round.

    All rounds of a side have the same steps; so a disturbance in one of them is not the longest gap.
    """
    return [statistics.median(same) for same in zip(*(run.gaps(number) for run in runs), strict=True)]


def compare(rows: Mapping[str, Row], base: Row) -> None:
    """Add to each row its shares of those of `base`."""
    for row in rows.values():
        row["p95_share"], row["longest_share"] = row["p95"] / base["p95"], row["longest"] / base["longest"]
        row["p95_times_less"], row["longest_times_less"] = 1 / row["p95_share"], 1 / row["longest_share"]
        row["throughput_share"] = row["tokens_per_second"] / base["tokens_per_second"]
        row["times_ttft"] = row["mean_ttft"] / base["mean_ttft"]
