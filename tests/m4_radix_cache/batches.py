"""Living batches without a scheduler: admitted requests, batches of them, and the invariants of a batch."""

from collections.abc import Sequence
from typing import Any

from m1_single_request import SamplingParams
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.request import Req
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m4_radix_cache.schedule_batch import Pools, ScheduleBatch
from tests.testbed.fakes import CPU, VOCAB_SIZE, make_request

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logit_bias": {5: 1.0}},
    {"temperature": 0.7, "presence_penalty": 0.2, "min_tokens": 3},
]


def pools_of(cache: BasePrefixCache) -> Pools:
    """The memory that this cache is for."""
    return Pools(cache.req_to_token_pool, cache.token_to_kv_pool_allocator, cache)


def req_of(pools: Pools, rid: str, prompt: Sequence[int], **params: Any) -> Req:
    """An admitted request: its cached prefix is looked up and locked."""
    settings = SamplingParams(**{"max_tokens": 8} | params)
    req = make_request(rid, prompt, settings, request_class=Req, seed=len(prompt))
    assert isinstance(req, Req)
    req.init_next_round_input(pools.tree_cache)
    pools.tree_cache.inc_lock_ref(req.last_node)
    return req


def extend(pools: Pools, reqs: Sequence[Req], batch_class: Any = ScheduleBatch) -> Any:
    """A batch that prefills these requests."""
    batch = batch_class.init_new(reqs, pools)
    no_stop_ids: frozenset[int] = frozenset()
    info = SamplingBatchInfo.from_reqs(
        batch.reqs, vocab_size=VOCAB_SIZE, stop_ids=lambda sequence: no_stop_ids, device=CPU
    )
    batch.prepare_for_extend(info)
    return batch
