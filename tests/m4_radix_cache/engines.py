"""Helpers of m4's engine tests: settings in a line, what memory must look like, and parts that do as they are told."""

from collections.abc import Callable, Iterable, Mapping
from math import nan
from typing import Any

import numpy as np

from m4_radix_cache import CacheConfig, LLMEngine, SamplingParams, SchedulerConfig
from m4_radix_cache.forward_batch import ForwardBatch
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import RadixKey
from m4_radix_cache.model_runner import ModelRunner
from m4_radix_cache.request import Req
from m4_radix_cache.scheduler import Scheduler
from tests.support.engines import (
    MakeEngine as MakeEngine,
    OnEvent as OnEvent,
    Recorder as Recorder,
    Remembered as Remembered,
    drain,
    greedy as greedy,
    held as held,
    ids as ids,
    unfinished as unfinished,
)

CACHES = ("radix", "hash", "chunk")
Asked = Mapping[str, tuple[list[int], SamplingParams]]
"""Requests by their ids: a prompt, and what is asked for."""


def setting(
    max_num_seqs: int = 4,
    max_num_batched_tokens: int | None = None,
    *,
    tokens: int = 2048,
    page_size: int = 4,
    cache: Any = "radix",
    policy: Any = "lpm",
    conservativeness: float = 1.0,
    debug: bool = True,
    scheduler_class: Callable[..., Any] = SchedulerConfig,
    **more: Any,
) -> dict[str, Any]:
    """The keywords of an engine with these limits and KV memory for so many `tokens`, by default enough.

    Audited after every step. `more`: other fields of `CacheConfig`.
    """
    return {
        "scheduler_config": scheduler_class(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            schedule_policy=policy,
            schedule_conservativeness=conservativeness,
        ),
        "cache_config": CacheConfig(
            page_size=page_size, max_total_tokens=tokens, prefix_cache=cache, debug=debug, **more
        ),
    }


# --- looking inside ---------------------------------------------------------------------------------------------------


def scheduler_of(engine: LLMEngine) -> Scheduler:
    """What decides."""
    return engine.engine_core.scheduler


def cache_of(engine: LLMEngine) -> BasePrefixCache:
    """What remembers."""
    return scheduler_of(engine).tree_cache


def runner_of(engine: LLMEngine) -> ModelRunner:
    """What touches the tensors."""
    return engine.engine_core.executor.worker.model_runner


def cached_len(engine: LLMEngine, token_ids: Iterable[int], cache_salt: str | None = None) -> int:
    """How many of these tokens are in the cache now. To ask refreshes them."""
    return len(cache_of(engine).match_prefix(RadixKey(list(token_ids), cache_salt)).device_indices)


def locks(engine: LLMEngine) -> int:
    """All locks in the tree (radix only), the root's own left out."""
    tree = cache_of(engine)
    assert isinstance(tree, RadixCache)
    return sum(node.lock_ref for node in tree.nodes())


def check_step(engine: LLMEngine) -> None:
    """What must hold after every step that was not interrupted."""
    scheduler, stats = scheduler_of(engine), engine.stats()
    scheduler.check_invariants()
    rows, allocator = scheduler.pools.req_to_token_pool, scheduler.pools.token_to_kv_pool_allocator
    page_size, owned = allocator.page_size, set(allocator.owned_pages().tolist())
    pages: set[int] = set()
    for req in scheduler.running:
        assert req.req_pool_idx is not None
        slots = rows.read(req.req_pool_idx, 0, req.kv_allocated_len)
        of_req = np.unique(slots // page_size).tolist()
        assert set(of_req) <= owned, "a request reads a page that is free"
        assert len(of_req) == -(-len(slots) // page_size), "a page stands in a row twice"
        pages |= set(of_req)
        assert slots[: req.cache_protected_len].tolist() == cached_slots(scheduler, req)
    used = len(pages) * page_size  # shared ones once, in whole pages
    assert held(engine) == used == allocator.size - stats.available_size - stats.evictable_size
    assert min(stats.available_size, stats.evictable_size, stats.protected_size) >= 0
    assert len(scheduler.running) <= scheduler.max_num_seqs


def cached_slots(scheduler: Scheduler, req: Req) -> list[int]:
    """The slots that the cache has for what it owns of a request, read without touching the cache."""
    node, values = req.last_node, []
    if isinstance(scheduler.tree_cache, RadixCache):
        while node.parent is not None:
            values.append(node.value)
            node = node.parent
    elif node is not None:  # a page of the table of hashes
        page_size = scheduler.pools.token_to_kv_pool_allocator.page_size
        while node.parent is not None:
            values.append(node.id * page_size + np.arange(page_size))
            node = node.parent
    return np.concatenate([*values[::-1], np.zeros(0, dtype=np.int64)]).tolist()


def check_drained(engine: LLMEngine) -> None:
    """What must hold when all work is done: nothing waits, runs or is locked; what is not free can be evicted."""
    scheduler, stats = scheduler_of(engine), engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.kv_tokens, stats.kv_bytes) == (0, 0, 0, 0)
    assert stats.available_size + stats.evictable_size == stats.max_total_tokens and not stats.protected_size
    rows = scheduler.pools.req_to_token_pool
    assert rows.available_size() == rows.size and not scheduler.requests and not scheduler.marked
    if isinstance(scheduler.tree_cache, RadixCache):
        assert locks(engine) == 0
    check_memory(engine)


def check_flushed(engine: LLMEngine) -> None:
    """An idle engine forgets everything when it is told to, and then all memory is free."""
    assert engine.flush_cache()
    stats = engine.stats()
    assert (stats.available_size, stats.evictable_size, stats.protected_size) == (stats.max_total_tokens, 0, 0)
    check_memory(engine)


def check_memory(engine: LLMEngine) -> None:
    """No request owns a slot or a row, and the cache is sound."""
    scheduler = scheduler_of(engine)
    allocator, cache, rows = (
        scheduler.pools.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.pools.req_to_token_pool,
    )
    cache.check_invariants()
    assert allocator.available_size() + cache.evictable_size() == allocator.size
    assert not cache.protected_size() and rows.available_size() == rows.size


def run(engine: Any, check: Callable[[Any], None] = check_step) -> dict[str, Any]:
    """Step until nothing is left, looking at the engine after every step; the last output of every request."""
    last = drain(engine, check)
    check_drained(engine)
    return last


# --- parts ------------------------------------------------------------------------------------------------------------


def no_numbers_for(row: int, in_step: int) -> type[ModelRunner]:
    """A runner that once gives no numbers for this row of a batch."""

    class NoNumbers(ModelRunner):
        num_steps = 0

        def forward(self, batch: ForwardBatch) -> Any:
            hidden = super().forward(batch)
            self.num_steps += 1
            if self.num_steps == in_step:
                hidden[row] = nan
            return hidden

    return NoNumbers


def check_answers(outputs: dict[str, Any], m1: Remembered, asked: Asked) -> None:
    """Everybody has m1's answer."""
    for rid, (prompt, params) in asked.items():
        output = outputs[rid]
        assert output.error is None, f"{rid}: {output.error!r}"
        wanted = m1.generate(prompt, params)
        assert (output.token_ids, output.finish_reason) == (wanted.token_ids, wanted.finish_reason), rid


def submit(engine: LLMEngine, asked: Asked) -> None:
    """Let them all come, under their names."""
    for rid, (prompt, params) in asked.items():
        engine.add_request(prompt, params, request_id=rid)
