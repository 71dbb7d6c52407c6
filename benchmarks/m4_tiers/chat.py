"""Conversations of many users, whose KV the device cannot hold: the time to the first token of a turn.

A turn is 64 new and 192 answered tokens behind all turns before. All users have their first turn, then all their second
one, an eighth of them at once: so between two turns of a user all others had theirs, and a device that holds an eighth
of the KV has nothing left of it. The sides are a device that holds everything, one that holds an eighth with host
memory for everything, and the same without the tier. The
device has a page more for each request, so that the last turns of an eighth of the users fit at once.
"""

import statistics
from random import Random

from benchmarks.engines import Engines
from benchmarks.lesson import SEED, Row
from benchmarks.serving import Served, Side, num_same, serve
from benchmarks.timing import in_turns, quantile, ratio
from benchmarks.workloads import Request, Workload, tokens

NEW, ANSWER, PAGE_SIZE, SHARE = 64, 192, 16, 8
ALL, TIERS, NONE = "all on the device", "an eighth, and host memory", "an eighth, no tier"


def conversations(users: int, turns: int, at_once: int, answer: int) -> Workload:
    """Return the turns of all users, in order of arrival."""
    rng = Random(SEED)
    requests = [
        Request(tokens(rng, NEW), answer, after=(turn - 1) * users + user if turn else None)
        for turn in range(turns)
        for user in range(users)
    ]
    return Workload(requests, at_once=at_once)


def chat(engines: Engines, users: int, turns: int, rounds: int, answer: int = ANSWER) -> Row:
    """Serve all turns on each side, in turns of whole runs, from empty tiers."""
    at_once, total = users // SHARE, users * turns * (NEW + answer)
    work, few = conversations(users, turns, at_once, answer), conversations(at_once, 2, at_once, 4)
    device = total // SHARE + at_once * PAGE_SIZE
    limits, enough = {"max_num_seqs": at_once}, {"max_total_tokens": 2 * total}
    spec = engines("m4", scheduler=limits, cache=enough).engine_core.executor.kv_cache_spec(PAGE_SIZE)
    caches: dict[str, Row] = {
        ALL: enough,
        TIERS: {"max_total_tokens": device, "host_memory_bytes": total * spec.bytes_per_token},
        NONE: {"max_total_tokens": device},
    }
    sides = {
        name: Side(engines("m4", scheduler=limits, cache=cache), work, serve, warm_up=few)
        for name, cache in caches.items()
    }
    in_turns(sides, rounds=rounds)
    waits = {name: [later_waits(run, users) for run in side.runs] for name, side in sides.items()}
    means = {name: [statistics.fmean(wait) for wait in own] for name, own in waits.items()}
    answers = sides[ALL].last.answers
    return work.describe() | {
        "users": users,
        "turns": turns,
        "at_once": at_once,
        "tokens": total,
        "device_tokens": device,
        "bytes_per_token": spec.bytes_per_token,
        "rounds": rounds,
        "sides": {
            name: {
                "mean_ttft": statistics.median(means[name]),
                "p95_ttft": statistics.median(quantile(wait, 0.95) for wait in waits[name]),
                "all_mean_ttfts": means[name],
                "by_turn": by_turn(side.runs, users, turns),
                "seconds": statistics.median(side.seconds),
                "all_seconds": side.seconds,
                "computed": side.last.counts["num_prompt_tokens"],
                "found": side.last.counts["num_cached_tokens"],
                "of_host": side.last.counts["num_host_hit_tokens"],
                "same_answers": num_same(side.last.answers, answers),
            }
            for name, side in sides.items()
        },
        "times_all": ratio(means[TIERS], means[ALL]),
        "times_none": ratio(means[NONE], means[TIERS]),
    }


def later_waits(run: Served, users: int) -> list[float]:
    """Return the seconds to the first token of all turns but the first, in which there is nothing to find."""
    return run.ttfts(users)


def by_turn(runs: list[Served], users: int, turns: int) -> list[float]:
    """Return the mean seconds to the first token of each turn, the median over the rounds."""
    return [
        statistics.median(statistics.fmean(run.ttfts()[turn * users : (turn + 1) * users]) for run in runs)
        for turn in range(turns)
    ]
