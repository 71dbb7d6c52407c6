"""What the cache costs one thread: tokens per second through match, evict and insert, without any model.

2,000 sequences of 200 to 2,000 tokens share prefixes in a tree of 8, 64 and 512 branches; there is room for half of
what is unique in them. The side that is compared is the same tree with an eviction that walks all of it.
"""

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import interleaved
from benchmarks.m4_caches import RadixCache, Server, WalkingRadixCache, num_entries
from m4_radix_cache.mem_cache.radix_key import RadixKey

BRANCHES = (8, 64, 512)
SEGMENT_LENS = (50, 140)  # of each branch
SEQUENCE_LENS = (200, 2000)
VOCABULARY = 150_000
PAGE_SIZE = 16
CLASSES = {"candidates kept": RadixCache, "whole tree walked": WalkingRadixCache}
Row = dict[str, Any]


@dataclass(frozen=True)
class Sequences:
    """Token ids, as an engine gets them."""

    token_ids: list[list[int]]

    @classmethod
    def drawn(cls, number: int, *, seed: int) -> "Sequences":
        """Each one goes down a random branch, and on with tokens of its own, until it has its length."""
        rng = np.random.default_rng(seed)

        def tokens(count: int) -> list[int]:
            return rng.integers(0, VOCABULARY, count).tolist()

        levels = [[tokens(int(rng.integers(*SEGMENT_LENS, endpoint=True))) for _ in range(n)] for n in BRANCHES]
        sequences = []
        for _ in range(number):
            leaf, length = int(rng.integers(BRANCHES[-1])), int(rng.integers(*SEQUENCE_LENS, endpoint=True))
            shared = [
                token
                for level, num in zip(levels, BRANCHES, strict=True)
                for token in level[leaf * num // BRANCHES[-1]]
            ]
            sequences.append((shared + tokens(max(0, length - len(shared))))[:length])
        return cls(sequences)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


@dataclass
class Side:
    """A cache class under the measurement; each call serves all sequences once and returns seconds."""

    cache_class: type[RadixCache]
    work: Sequences
    keys: list[RadixKey]
    capacity: int
    encodes: bool
    """Whether the encoding of the keys is measured, too."""
    all_seconds: list[float] = field(default_factory=list)
    server: Server | None = None
    """Of the last round."""
    hit_tokens: int = 0

    def __call__(self) -> float:
        self.server = Server(self.cache_class, num_tokens=self.capacity, page_size=PAGE_SIZE)
        serve = self.server.serve
        gc.collect()
        begin = time.perf_counter()
        keys = [RadixKey(ids) for ids in self.work.token_ids] if self.encodes else self.keys
        self.hit_tokens = sum([serve(key, len(key)) for key in keys])
        self.all_seconds.append(time.perf_counter() - begin)
        return self.all_seconds[-1]


def control_plane(*, num_sequences: int, rounds: int, seed: int) -> Row:
    """Medians over the rounds, tokens per second of all tokens that came, found ones included."""
    work = Sequences.drawn(num_sequences, seed=seed)
    keys = [RadixKey(ids) for ids in work.token_ids]
    roomy = Side(RadixCache, work, keys, 2 * work.num_tokens, encodes=False)
    roomy()
    assert roomy.server is not None
    unique = roomy.server.cache.evictable_size()
    sides = {
        name + ", encoding included" * encodes: Side(cache_class, work, keys, unique // 2, encodes=encodes)
        for encodes in (False, True)
        for name, cache_class in CLASSES.items()
    }
    seconds = interleaved(sides, rounds=rounds)
    kept, walked = (sides[name] for name in CLASSES)
    assert kept.server is not None and walked.server is not None
    evicted = kept.server.cache.num_evicted_tokens
    assert (kept.hit_tokens, evicted) == (walked.hit_tokens, walked.server.cache.num_evicted_tokens), "same work"
    ratios = [slow / fast for slow, fast in zip(walked.all_seconds[1:], kept.all_seconds[1:], strict=True)]
    return {
        "sequences": num_sequences,
        "tokens": work.num_tokens,
        "unique_tokens": unique,
        "capacity": kept.server.allocator.size,
        "page_size": PAGE_SIZE,
        "hit_tokens": kept.hit_tokens,
        "evicted_tokens": evicted,
        "nodes": num_entries(kept.server),
        "sides": {
            name: {
                "seconds": seconds[name],
                "tokens_per_second": work.num_tokens / seconds[name],
                "us_per_sequence": seconds[name] / num_sequences * 1e6,
                "all_seconds": side.all_seconds[1:],
            }
            for name, side in sides.items()
        },
        "times_walked": statistics.median(ratios),
        "ratios": ratios,
    }
