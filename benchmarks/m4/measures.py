"""m4's engine: prompts that share a prefix, the scheduler without a model, and the gaps of a stream.

In m4 a step runs prompts or decodes, and prompts go first: a stream gets no token while prompts arrive. m3 runs both in
one step: every step gives a token, and takes as long as the prompts in it.
"""

import functools
import statistics
from random import Random

from benchmarks import streams
from benchmarks.engines import Engines
from benchmarks.lesson import SEED, Row
from benchmarks.serving import Side, num_same
from benchmarks.timing import interleaved
from benchmarks.workloads import ORDINARY_TOKENS, Request, Workload, streams_beside, tokens

PAGE_SIZE = 16
CACHES = {"m4, no sharing": "chunk", "m4, hashes": "hash", "m4, tree": "radix"}
ANSWER = 8  # tokens of every request but the stream
FIRST_STEP = 20  # when the first prompt arrives; before that the stream runs alone


# --- reuse ------------------------------------------------------------------------------------------------------------


def shared_prefix(number: int, prefix: int, *, own: int = 32, outputs: int = 32) -> Workload:
    """Return prompts with one common prefix, that differ from the first token behind it."""
    rng = Random(SEED)
    common = tokens(rng, prefix)
    firsts = rng.sample(range(*ORDINARY_TOKENS), number)
    return Workload([Request([*common, first, *tokens(rng, own - 1)], outputs) for first in firsts])


def num_to_compute(work: Workload) -> int:
    """Return the prompt tokens that go through the model if whole pages of the common prefix are computed once."""
    first, second = (request.prompt for request in work.requests[:2])
    prefix = next(place for place, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])
    return work.num_prompt_tokens - (len(work.requests) - 1) * (prefix // PAGE_SIZE * PAGE_SIZE)


def reuse(engines: Engines, work: Workload, *, rounds: int) -> Row:
    """Measure the same requests on m3, and on m4 with a tree, with hashes and without sharing, from empty caches.

    The number of tokens that must be computed follows from the work alone and is asserted.
    """
    limits = {"max_num_seqs": len(work.requests)}
    warm_up = Workload([Request(request.prompt[-64:], 4) for request in work.requests[:4]])
    sides = {"m3": Side(engines("m3", scheduler=limits), work, warm_up=warm_up)}
    for name, cache in CACHES.items():
        sides[name] = Side(engines("m4", scheduler=limits, cache={"prefix_cache": cache}), work, warm_up=warm_up)
    seconds = interleaved(sides, rounds=rounds)
    for name, side in sides.items():
        expected = num_to_compute(work) if name in ("m4, tree", "m4, hashes") else work.num_prompt_tokens
        computed = side.last.counts["num_prompt_tokens"]
        assert computed == expected, f"{name} computed {computed} prompt tokens, not {expected}"
    return work.describe() | {
        "sides": {name: _reused(side, seconds[name]) for name, side in sides.items()},
        "same_answers": {
            name: num_same(side.last.answers, sides["m4, no sharing"].last.answers) for name, side in sides.items()
        },
    }


def _reused(side: Side, seconds: float) -> Row:
    waits = [statistics.mean(m.time_to_first_token for m in run.metrics) for run in side.runs]
    return {
        "computed": side.last.counts["num_prompt_tokens"],
        "cached": sum(metrics.cached_tokens for metrics in side.last.metrics),
        "mean_ttft": statistics.median(waits),
        "seconds": seconds,
        "all_seconds": side.seconds,
        "all_mean_ttfts": waits,
        "steps": side.last.counts["num_steps"],
    }


# --- gaps -------------------------------------------------------------------------------------------------------------


def stream_beside(arrivals: dict[int, int], num_tokens: int) -> Workload:
    """Return a stream, and prompts that arrive before these steps, with these lengths."""
    rng = Random(SEED)
    prompts = [Request(tokens(rng, length), ANSWER, step) for step, length in arrivals.items()]
    return streams_beside(prompts, number=1, num_tokens=num_tokens, clock="steps", seed=SEED + 1)


def row_of(length: int, number: int) -> dict[int, int]:
    """Return the arrivals of prompts of this length, step after step."""
    return dict.fromkeys(range(FIRST_STEP, FIRST_STEP + number), length)


def gaps(engines: Engines, num_tokens: int, lengths: list[int], counts: list[int], rounds: int) -> Row:
    """Measure the gaps of a stream in four situations, and the longest one by length and by number of prompts."""
    middle, longest = lengths[len(lengths) // 2], lengths[-1]
    every = {n: range(FIRST_STEP, num_tokens, n) for n in (10, 50)}
    situations = {
        "alone": {},
        f"a prompt of {middle:,} tokens every 10 steps": dict.fromkeys(every[10], middle),
        f"a prompt of {longest:,} tokens every 50 steps": dict.fromkeys(every[50], longest),
        f"{counts[-1]} prompts of {middle:,} tokens, step after step": row_of(middle, counts[-1]),
    }
    short = FIRST_STEP + max(counts) + 10

    def measured(arrivals: dict[int, int], number: int) -> Row:
        sides = {name: engines(name, scheduler={"max_num_seqs": 64}) for name in ("m3", "m4")}
        return streams.measured(sides, stream_beside(arrivals, number), 1, rounds)

    @functools.cache
    def in_a_row(length: int, number: int) -> Row:
        return measured(row_of(length, number), short)

    return {
        "stream": num_tokens,
        "answer": ANSWER,
        "situations": {name: measured(arrivals, num_tokens) for name, arrivals in situations.items()},
        "by_length": {str(length): in_a_row(length, 1) for length in lengths},
        "by_count": {str(number): in_a_row(middle, number) for number in counts},
        "by_count_length": middle,
    }
