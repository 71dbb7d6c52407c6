"""What should stay in the cache: hit rates on one recorded trace, for each strategy and capacity, and both designs.

Counted are tokens of prompts that were found. All of it is the same on every machine, except for the times in
`designs`.
"""

import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import interleaved
from benchmarks.m4_caches import BlockHashCache, RadixCache, Server, num_entries
from benchmarks.m4_traffic import TracedRequest, describe, recorded
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from m4_radix_cache.mem_cache.radix_key import RadixKey

PAGE_SIZE = 16
PAGE_SIZES = (1, 4, 16, 64)
CAPACITIES = tuple(2**n * 1024 for n in range(2, 10))  # tokens: 4 Ki to 512 Ki
DESIGNS: dict[str, Callable[..., BasePrefixCache]] = {"tree": RadixCache, "hashes": BlockHashCache}
OPERATIONS = {
    "match": ("match_prefix",),
    "insert": ("insert",),
    "evict": ("evict",),
    "lock": ("inc_lock_ref", "dec_lock_ref"),
}
Row = dict[str, Any]


def eviction(*, num_requests: int | None = None) -> Row:
    """The hit rate of every strategy at every capacity, of the hashes, and with room for all."""
    trace = recorded()[:num_requests]
    requests = prepared(trace)

    def rates(cache_class: Callable[..., BasePrefixCache], policy: str) -> Row:
        found = [
            replay(Server(cache_class, num_tokens=size, page_size=PAGE_SIZE, policy=policy), requests)
            for size in CAPACITIES
        ]
        return {"all": [rate.all for rate in found], "paying": [rate.paying for rate in found]}

    unlimited = {
        page_size: replay(Server(RadixCache, num_tokens=room_for_all(trace), page_size=page_size), requests)
        for page_size in PAGE_SIZES
    }
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


class HitRate(NamedTuple):
    """Shares of the prompts' tokens that were found."""

    all: float
    paying: float
    """Of the tenants with priority."""


def prepared(trace: list[TracedRequest]) -> list[tuple[RadixKey, TracedRequest]]:
    """The requests with their keys, encoded once."""
    return [(request.key(), request) for request in trace]


def replay(server: Server, requests: list[tuple[RadixKey, TracedRequest]]) -> HitRate:
    """The whole trace through one cache."""
    found, asked = [0, 0], [0, 0]  # by priority
    for key, request in requests:
        found[request.priority] += server.serve(key, request.prompt, request.priority)
        asked[request.priority] += request.prompt
    return HitRate(sum(found) / sum(asked), found[1] / max(1, asked[1]))


def room_for_all(trace: list[TracedRequest]) -> int:
    """Tokens that are always enough."""
    return sum(request.prompt + request.output for request in trace)


# --- tree and hashes --------------------------------------------------------------------------------------------------


class DesignSide:
    """One design at one page size; each call replays the trace once and returns the cache's own seconds."""

    def __init__(self, design: str, trace: list[TracedRequest], page_size: int, capacity: int) -> None:
        self.design, self.trace, self.page_size, self.capacity = design, trace, page_size, capacity
        self.seconds: dict[str, list[float]] = {name: [] for name in OPERATIONS}
        self.hit_tokens = self.entries = 0

    def __call__(self) -> float:
        server = Server(DESIGNS[self.design], num_tokens=self.capacity, page_size=self.page_size)
        totals = {name: clocked(server.cache, methods) for name, methods in OPERATIONS.items()}
        requests = prepared(self.trace)  # new keys: hashes are kept in them
        gc.collect()
        self.hit_tokens = sum([server.serve(key, request.prompt) for key, request in requests])
        for name, total in totals.items():
            self.seconds[name].append(total[0])
        self.entries = num_entries(server)
        return sum(total[0] for total in totals.values())

    def report(self, prompts: int) -> Row:
        per_request = {
            name: statistics.median(values[1:]) / len(self.trace) * 1e6 for name, values in self.seconds.items()
        }
        return {
            "design": self.design,
            "page_size": self.page_size,
            "hit_tokens": self.hit_tokens,
            "hit_rate": self.hit_tokens / prompts,
            "us_per_request": per_request,
            "us_total": sum(per_request.values()),
            "entries": self.entries,
        } | bookkeeping(self)


def designs(*, capacity: int, rounds: int, num_requests: int | None = None) -> Row:
    """Tree and hashes over the same requests: tokens found, time in the cache, and memory of its books."""
    trace = recorded()[:num_requests]
    prompts = sum(request.prompt for request in trace)
    sides = {
        f"{design}, pages of {page_size}": DesignSide(design, trace, page_size, capacity)
        for page_size in PAGE_SIZES
        for design in DESIGNS
    }
    interleaved(sides, rounds=rounds)
    return {
        "trace": describe(trace),
        "capacity": capacity,
        "sides": {name: side.report(prompts) for name, side in sides.items()},
    }


def clocked(cache: Any, methods: tuple[str, ...]) -> list[float]:
    """Let these methods of one cache note their time; returns a list whose only entry is the sum in seconds."""
    total = [0.0]

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.perf_counter()
            result = method(*args)
            total[0] += time.perf_counter() - begin
            return result

        return call

    for name in methods:
        setattr(cache, name, noting(getattr(cache, name)))
    return total


def bookkeeping(side: DesignSide) -> Row:
    """Bytes that the cache takes for its books, in all and for each cached token, after the trace.

    The keys belong to the requests and go with them; the allocator is the same for both designs.
    """
    server = Server(DESIGNS[side.design], num_tokens=side.capacity, page_size=side.page_size)
    gc.collect()
    tracemalloc.start()
    try:
        for request in side.trace:
            server.serve(request.key(), request.prompt)
        gc.collect()
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    cached = server.cache.evictable_size()
    return {"cached_tokens": cached, "bytes": num_bytes, "bytes_per_token": num_bytes / cached}
