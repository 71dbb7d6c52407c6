"""A prefix cache at work without a model: requests are looked up, get slots, and leave their KV behind.

Each operation is that of an engine, in this order: match, lock, evict if there is too little room, take slots, insert,
unlock. The forward between them costs nothing here, so this is the cache alone. Requests come one after another.
"""

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.lesson import SEED, Row
from benchmarks.timing import in_turns, medians, ratio
from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.allocator import Slots, TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.eviction import EvictionHeap
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import RadixKey
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool

PAGE_SIZE = 16
BRANCHES = (8, 64, 512)
SEGMENT_LENS = (50, 140)  # of each branch
SEQUENCE_LENS = (200, 2000)
VOCABULARY = 150_000


class Server:
    """A cache with memory for `num_tokens` tokens, and requests that pass through it."""

    def __init__(
        self, cache_class: Callable[..., BasePrefixCache], *, num_tokens: int, page_size: int, policy: str = "lru"
    ) -> None:
        self.page_size = page_size
        self.allocator = TokenToKVPoolAllocator(size=num_tokens // page_size * page_size, page_size=page_size)
        self.cache = cache_class(
            req_to_token_pool=ReqToTokenPool(size=1, max_context_len=1),  # no request runs, so there are no rows
            token_to_kv_pool_allocator=self.allocator,
            eviction_policy=policy,
            tracer=Tracer(),
        )

    def serve(self, key: RadixKey, num_prompt_tokens: int, priority: int = 0) -> int:
        """Pass one request through the cache, from arrival to end; return the number of cached prompt tokens.

        `key` has its prompt and its outputs; the memory has room for it.
        """
        cache, allocator = self.cache, self.allocator
        found, node = self.find(key, num_prompt_tokens - 1)
        cache.record_hit(node)
        hit, num_whole = len(found), len(key) // self.page_size * self.page_size
        need = num_whole - hit
        if allocator.available_size() < need:
            cache.evict(need - allocator.available_size())
        slots = allocator.alloc(need)
        assert slots is not None, f"{len(key)} tokens in {allocator.size}"
        existing = cache.insert(key, np.concatenate((found, slots)), priority)
        if existing > hit:  # the whole prompt was there: its last page was computed again
            allocator.free(slots[: existing - hit])
        cache.dec_lock_ref(node)
        return hit

    def find(self, key: RadixKey, limit: int) -> tuple[Slots, Any]:
        """Return the slots of the cached prefix of the first `limit` tokens, and its node, which is locked."""
        match = self.cache.match_prefix(key, limit)
        self.cache.inc_lock_ref(match.last_device_node)
        return match.device_indices, match.last_device_node


def num_entries(server: Server) -> int:
    """Return the number of nodes of the tree, or of blocks of the table."""
    cache: Any = server.cache
    return len(list(cache.nodes() if isinstance(cache, RadixCache) else cache._blocks))


# --- its cost ---------------------------------------------------------------------------------------------------------


class NoCandidates(EvictionHeap):
    """Keeps no node, and so costs nothing."""

    def __init__(self) -> None:
        super().__init__(lambda node: 0)

    def push(self, node: Any) -> None:
        """Ignore a node."""


class WalkingRadixCache(RadixCache):
    """The same tree, whose evictions collect the unlocked leaves of the whole tree each time, as SGLang's do."""

    def _start_empty(self) -> None:
        super()._start_empty()
        self._candidates = NoCandidates()

    def evict(self, num_tokens: int, rids: Sequence[str] = ()) -> int:
        """Evict from candidates that are collected anew."""
        self._candidates = EvictionHeap(self.strategies[self.eviction_policy])
        for node in self.nodes():
            node.entry = None
            if not node.children and not node.lock_ref:
                self._candidates.push(node)
        freed = super().evict(num_tokens, rids)
        self._candidates = NoCandidates()
        return freed


def branching(number: int) -> list[list[int]]:
    """Draw sequences of token ids that share prefixes in a tree of branches, each up to a random length."""
    rng = np.random.default_rng(SEED)

    def draw(count: int) -> list[int]:
        return rng.integers(0, VOCABULARY, count).tolist()

    levels = [[draw(int(rng.integers(*SEGMENT_LENS, endpoint=True))) for _ in range(n)] for n in BRANCHES]
    sequences = []
    for _ in range(number):
        leaf, length = int(rng.integers(BRANCHES[-1])), int(rng.integers(*SEQUENCE_LENS, endpoint=True))
        path = [level[leaf * num // BRANCHES[-1]] for level, num in zip(levels, BRANCHES, strict=True)]
        shared = [token for segment in path for token in segment]
        sequences.append((shared + draw(max(0, length - len(shared))))[:length])
    return sequences


def passed(cache_class: type[RadixCache], sequences: list[list[int]], capacity: int, *, encodes: bool = False) -> Row:
    """Pass all sequences through a new cache. The seconds include the encoding of their keys if `encodes`."""
    server = Server(cache_class, num_tokens=capacity, page_size=PAGE_SIZE)
    keys = [] if encodes else [RadixKey(ids) for ids in sequences]
    gc.collect()
    begin = time.perf_counter()
    keys = keys or [RadixKey(ids) for ids in sequences]
    hit_tokens = sum([server.serve(key, len(key)) for key in keys])
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "capacity": server.allocator.size,
        "hit_tokens": hit_tokens,
        "evicted_tokens": server.cache.num_evicted_tokens,
        "nodes": num_entries(server),
        "cached_tokens": server.cache.evictable_size(),
    }


def control_plane(num_sequences: int, *, rounds: int) -> Row:
    """Measure tokens per second through match, evict and insert, with room for half of the unique tokens.

    2,000 sequences of 200 to 2,000 tokens. The other side is the same tree with an eviction that walks all of it.
    """
    sequences = branching(num_sequences)
    num_tokens = sum(map(len, sequences))
    unique = passed(RadixCache, sequences, 2 * num_tokens)["cached_tokens"]
    classes = {"candidates kept": RadixCache, "whole tree walked": WalkingRadixCache}
    sides = {
        name + ", encoding included" * encodes: partial(passed, cache_class, sequences, unique // 2, encodes=encodes)
        for encodes in (False, True)
        for name, cache_class in classes.items()
    }
    runs = in_turns(sides, rounds=rounds)
    seconds = {name: [run.pop("seconds") for run in own] for name, own in runs.items()}
    kept, walked = (runs[name][-1] for name in classes)
    assert kept == walked, "the same work"
    return {
        "sequences": num_sequences,
        "tokens": num_tokens,
        "unique_tokens": unique,
        "page_size": PAGE_SIZE,
        **kept,
        "sides": {
            name: {
                "seconds": median,
                "tokens_per_second": num_tokens / median,
                "us_per_sequence": median / num_sequences * 1e6,
                "all_seconds": seconds[name],
            }
            for name, median in medians(seconds).items()
        },
        "times_walked": ratio(*(seconds[name] for name in reversed(classes))),
    }
