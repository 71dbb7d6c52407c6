"""Streams beside long prompts: what the budget of a step does to the gaps between tokens, and to throughput.

Some streams are being answered, and a fresh prompt arrives whenever they have got so many tokens more: so every side
sees the same prompts at the same places of the same answers, however it shares out its steps. `decode_first` is
measured at several budgets; beside it `prefill_first`, whose prompts are whole as in m4, and in pieces; and m4 itself.
A budget that is too small for what arrives lets prompts pile up: so the time to their first token is counted, too.
"""

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from benchmarks.m3_workload import ORDINARY_TOKENS
from benchmarks.m5_models import Engines
from m5_chunked_prefill_spec import SamplingParams

STREAM_PROMPT = 64
ANSWER = 8  # tokens for everybody who is no stream
MAX_NUM_SEQS = 32
WHOLE, PIECES, M4 = "prefill_first, whole prompts", "prefill_first, pieces of 256", "m4"
LEAST_THROUGHPUT, LATEST_FIRST_TOKEN = 0.9, 2.0  # times those with whole prompts first: what short gaps may cost
Row = dict[str, Any]


@dataclass(frozen=True)
class Traffic:
    """Who comes, and when."""

    num_streams: int = 8
    stream_tokens: int = 180
    prompt_tokens: int = 1000
    every: int = 12
    """A prompt arrives whenever every stream, on average, has got so many tokens more."""
    seed: int = 0

    @property
    def num_prompts(self) -> int:
        """Prompts that arrive while the streams run; none at their very end."""
        return self.stream_tokens // self.every - 1

    @property
    def total_tokens(self) -> int:
        """Tokens of all prompts and answers."""
        streams = self.num_streams * (STREAM_PROMPT + self.stream_tokens)
        return streams + self.num_prompts * (self.prompt_tokens + ANSWER)


@dataclass
class Served:
    """One run: times in seconds since its start."""

    streams: dict[str, list[float]] = field(default_factory=dict)
    """When each token of each stream came."""
    arrived: dict[str, float] = field(default_factory=dict)
    first_tokens: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def gaps(self) -> list[float]:
        """Between the tokens of every stream."""
        return [after - before for times in self.streams.values() for before, after in pairwise(times)]


def serve(engine: Any, traffic: Traffic, questions: Sequence[list[int]] = (), *, flush: bool = True) -> Served:
    """Run it until nobody is left, from a cold cache if `flush`. `questions`: of the streams; none: random prompts."""
    rng, served, counts = Random(traffic.seed), Served(), dict[str, int]()
    if flush:
        engine.flush_cache()
    gc.collect()

    def random_prompt(length: int) -> list[int]:
        return [rng.randrange(*ORDINARY_TOKENS) for _ in range(length)]

    def add(request_id: str, prompt: list[int], num_tokens: int) -> None:
        engine.add_request(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True), request_id=request_id)

    begin = time.perf_counter()
    for number in range(traffic.num_streams):
        served.streams[f"stream-{number}"], counts[f"stream-{number}"] = [], 0
        prompt = questions[number] if questions else random_prompt(STREAM_PROMPT)
        add(f"stream-{number}", prompt, traffic.stream_tokens)
    while engine.has_unfinished_requests():
        due = min(sum(counts.values()) // (traffic.num_streams * traffic.every), traffic.num_prompts)
        while len(served.arrived) < due:
            name = f"prompt-{len(served.arrived)}"
            served.arrived[name] = time.perf_counter() - begin
            add(name, random_prompt(traffic.prompt_tokens), ANSWER)
        outputs = engine.step()
        now = time.perf_counter() - begin
        for name, output in outputs.items():
            if output.error is not None:
                raise output.error
            if name in counts:
                served.streams[name] += [now] * (len(output.token_ids) - counts[name])
                counts[name] = len(output.token_ids)
            elif output.token_ids:
                served.first_tokens.setdefault(name, now)
    served.seconds = time.perf_counter() - begin
    assert len(served.first_tokens) == traffic.num_prompts
    return served


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which so much of them lies."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def summary(rounds: Sequence[Served], traffic: Traffic) -> Row:
    """Medians over the rounds, in seconds; and the last round in detail.

    All rounds of a side have the same steps. So each gap is the median of the same gap in every round, and what
    interrupted one of them from outside is not the longest gap.
    """

    def of(statistic: Any) -> float:
        return statistics.median(map(statistic, rounds))

    last = rounds[-1]
    gaps = [statistics.median(same) for same in zip(*(served.gaps for served in rounds), strict=True)]
    return {
        "p50": quantile(gaps, 0.5),
        "p95": quantile(gaps, 0.95),
        "longest": max(gaps),
        "longest_of_all": max(max(served.gaps) for served in rounds),
        "seconds": of(lambda served: served.seconds),
        "tokens_per_second": traffic.total_tokens / of(lambda served: served.seconds),
        "mean_ttft": of(
            lambda served: statistics.mean(served.first_tokens[name] - at for name, at in served.arrived.items())
        ),
        "stream": [round(at, 6) for at in last.streams["stream-0"]],
        "arrived": [round(at, 6) for at in last.arrived.values()],
    }


def measured(sides: Mapping[str, Any], traffic: Traffic, rounds: int) -> Row:
    """All sides in turns, after a round that warms up."""
    found: dict[str, list[Served]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, engine in sides.items():
            served = serve(engine, traffic)
            if turn:
                found[name].append(served)
    return {name: summary(served, traffic) for name, served in found.items()}


def gaps(engines: Engines, *, traffic: Traffic, budgets: Sequence[int], targets: Sequence[float], rounds: int) -> Row:
    """Gaps and throughput by budget, and by `target_gap_ms`, against prefill_first."""
    seqs: Row = {"max_num_seqs": MAX_NUM_SEQS}
    whole: Row = {"schedule": "prefill_first", "enable_chunked_prefill": False}
    sides = {
        M4: engines.m4(**seqs),
        WHOLE: engines.m5(**seqs, **whole),
        PIECES: engines.m5(**seqs, schedule="prefill_first", max_num_batched_tokens=256),
    }
    by_budget = {f"{budget} tokens": engines.m5(**seqs, max_num_batched_tokens=budget) for budget in budgets}
    most = max(budgets)
    costs = engines.m5(**seqs, max_num_batched_tokens=most, target_gap_ms=1.0).engine_core.scheduler.composer.cost_table
    by_target = {
        f"target {ms:g} ms": engines.m5(**seqs, max_num_batched_tokens=most, target_gap_ms=ms, cost_table=costs)
        for ms in targets
    }
    found = measured(sides | by_budget | by_target, traffic, rounds)
    base = found[WHOLE]
    for row in found.values():
        row["p95_times_less"] = base["p95"] / row["p95"]
        row["longest_times_less"] = base["longest"] / row["longest"]
        row["throughput_share"] = row["tokens_per_second"] / base["tokens_per_second"]
        row["times_ttft"] = row["mean_ttft"] / base["mean_ttft"]
    part = {
        "traffic": vars(traffic) | {"answer": ANSWER, "num_prompts": traffic.num_prompts},
        "rounds": rounds,
        "references": {name: found[name] for name in sides},
        "budgets": {name: found[name] | {"tokens": n} for name, n in zip(by_budget, budgets, strict=True)},
        "targets": {name: found[name] | {"target": ms / 1e3} for name, ms in zip(by_target, targets, strict=True)},
    }
    return part | {"costs": vars(costs), "best": best(part["budgets"] | part["targets"])}


def best(rows: Mapping[str, Row]) -> Row:
    """The side that cuts the longest gap most, of those that cost little and with which no prompts pile up."""
    enough = {
        name: row
        for name, row in rows.items()
        if row["throughput_share"] >= LEAST_THROUGHPUT and row["times_ttft"] <= LATEST_FIRST_TOKEN
    }
    name = max(enough or rows, key=lambda name: rows[name]["longest_times_less"])
    keys = ("p95_times_less", "longest_times_less", "throughput_share")
    return {"side": name} | {key: rows[name][key] for key in keys}
