"""Hit rates on one recorded trace, for each eviction strategy and capacity, and both designs of a prefix cache.

Counted are tokens of prompts that were found. All of it is the same on every machine, except for the times in
`designs`.
"""

import gc
import statistics
import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.m4.caches import Row, Server, num_entries
from benchmarks.m4.traffic import TracedRequest, describe, recorded
from benchmarks.timing import Clocks, in_turns
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.block_hash_cache import BlockHashCache
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import RadixKey

PAGE_SIZE = 16
PAGE_SIZES = (1, 4, 16, 64)
CAPACITIES = tuple(2**n * 1024 for n in range(2, 10))  # tokens: 4 Ki to 512 Ki
Design = Callable[..., BasePrefixCache]
DESIGNS: dict[str, Design] = {"tree": RadixCache, "hashes": BlockHashCache}
OPERATIONS = {
    "match": ("match_prefix",),
    "insert": ("insert",),
    "evict": ("evict",),
    "lock": ("inc_lock_ref", "dec_lock_ref"),
}


class HitRate(NamedTuple):
    """Shares of the prompts' tokens that were found."""

    all: float
    paying: float
    """Of the tenants with priority."""


def prepared(trace: list[TracedRequest]) -> list[tuple[RadixKey, TracedRequest]]:
    """Return the requests with their keys, encoded once."""
    return [(request.key(), request) for request in trace]


def replay(server: Server, requests: list[tuple[RadixKey, TracedRequest]]) -> HitRate:
    """Pass the whole trace through one cache."""
    found, asked = [0, 0], [0, 0]  # by priority
    for key, request in requests:
        found[request.priority] += server.serve(key, request.prompt, request.priority)
        asked[request.priority] += request.prompt
    return HitRate(sum(found) / sum(asked), found[1] / max(1, asked[1]))


def eviction(num_requests: int | None = None) -> Row:
    """Count the hit rate of every strategy at every capacity, of the hashes, and with room for all."""
    trace = recorded()[:num_requests]
    requests, room_for_all = prepared(trace), sum(request.prompt + request.output for request in trace)

    def rate(cache_class: Design, num_tokens: int, policy: str = "lru", page_size: int = PAGE_SIZE) -> HitRate:
        return replay(Server(cache_class, num_tokens=num_tokens, page_size=page_size, policy=policy), requests)

    def rates(cache_class: Design, policy: str) -> Row:
        found = [rate(cache_class, size, policy) for size in CAPACITIES]
        return {"all": [rate.all for rate in found], "paying": [rate.paying for rate in found]}

    unlimited = {page_size: rate(RadixCache, room_for_all, page_size=page_size) for page_size in PAGE_SIZES}
    return {
        "trace": describe(trace),
        "page_size": PAGE_SIZE,
        "capacities": list(CAPACITIES),
        "strategies": {policy: rates(RadixCache, policy) for policy in STRATEGIES},
        "hashes": rates(BlockHashCache, "lru"),
        "ceiling": unlimited[PAGE_SIZE].all,
        "ceiling_paying": unlimited[PAGE_SIZE].paying,
        "ceilings": {str(page_size): rate.all for page_size, rate in unlimited.items()},
    }


# --- tree and hashes --------------------------------------------------------------------------------------------------


def designs(capacity: int, rounds: int, num_requests: int | None = None) -> Row:
    """Measure tree and hashes over the same requests: tokens found, time in the cache, and memory of its books."""
    trace = recorded()[:num_requests]
    asked = sum(request.prompt for request in trace)
    sides = {f"{design}, pages of {page_size}": (design, page_size) for page_size in PAGE_SIZES for design in DESIGNS}
    calls = {name: lambda key=key: run_design(*key, capacity, trace) for name, key in sides.items()}
    runs = in_turns(calls, rounds=rounds)
    return {
        "trace": describe(trace),
        "capacity": capacity,
        "sides": {
            name: {
                "design": design,
                "page_size": page_size,
                "hit_tokens": runs[name][-1]["hit_tokens"],
                "hit_rate": runs[name][-1]["hit_tokens"] / asked,
                "us_per_request": {
                    operation: statistics.median(run[operation] for run in runs[name]) / len(trace) * 1e6
                    for operation in OPERATIONS
                },
                "entries": runs[name][-1]["entries"],
            }
            | bookkeeping(design, page_size, capacity, trace)
            for name, (design, page_size) in sides.items()
        },
    }


def run_design(design: str, page_size: int, capacity: int, trace: list[TracedRequest]) -> Row:
    """Replay the trace once; return the seconds of each operation of the cache, and the tokens found."""
    server = Server(DESIGNS[design], num_tokens=capacity, page_size=page_size)
    requests = prepared(trace)  # new keys: hashes are kept in them
    gc.collect()
    methods = [method for own in OPERATIONS.values() for method in own]
    with Clocks(**dict.fromkeys(methods, server.cache)) as clocks:
        hit_tokens = sum([server.serve(key, request.prompt) for key, request in requests])
    seconds = {name: sum(clocks.seconds[method] for method in own) for name, own in OPERATIONS.items()}
    return seconds | {"hit_tokens": hit_tokens, "entries": num_entries(server)}


def bookkeeping(design: str, page_size: int, capacity: int, trace: list[TracedRequest]) -> Row:
    """Return the bytes of the cache's books, in all and for each cached token, after the trace.

    The keys belong to the requests and are freed with them; the allocator is the same for both designs.
    """
    server = Server(DESIGNS[design], num_tokens=capacity, page_size=page_size)
    gc.collect()
    tracemalloc.start()
    try:
        for request in trace:
            server.serve(request.key(), request.prompt)
        gc.collect()
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    cached = server.cache.evictable_size()
    return {"cached_tokens": cached, "bytes": num_bytes, "bytes_per_token": num_bytes / cached}
