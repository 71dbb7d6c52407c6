"""Batch that is kept from step to step: requests join it, get token after token, and leave it.

m3 described every step by its changes since the last one. Here the batch itself is kept, with its arrays: a decode step
adds one to each length, allocates a slot for each request and writes it into its row, with array operations and without
a loop over requests. New requests form a batch of their own, run their prompts, and are merged into the running batch.
SGLang: `ScheduleBatch` in `managers/schedule_batch.py` and `mem_cache/common.py`.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np

from m1_single_request.errors import PartError
from m1_single_request.request import RequestStatus
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.model_worker_batch import ForwardMode, ModelWorkerBatch
from m4_radix_cache.request import Req
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo

NOTHING = np.zeros(0, dtype=np.int64)


class Pools:
    """Memory of a batch: rows, slots, and the cache, from which slots are evicted when too few are free."""

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool_allocator: TokenToKVPoolAllocator,
        tree_cache: BasePrefixCache,
        *,
        debug: bool = False,
    ) -> None:
        self.debug = debug  # audit after every step
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.tree_cache = tree_cache

    def make_room(self, num_tokens: int, rids: Sequence[str]) -> bool:
        """Evict until `num_tokens` slots are free for these requests; return whether they are."""
        available = self.token_to_kv_pool_allocator.available_size()
        if available < num_tokens:
            self.tree_cache.evict(num_tokens - available, rids)
            available = self.token_to_kv_pool_allocator.available_size()
        return available >= num_tokens


class ScheduleBatch:
    """Requests that go through the model together, and their data for a step, as arrays on the host."""

    def __init__(self, reqs: list[Req], pools: Pools) -> None:
        self.reqs = reqs
        self.rids = [req.rid for req in reqs]
        self.pools = pools
        self.forward_mode = ForwardMode.EXTEND
        self.input_ids = NOTHING  # int64 [total_tokens]
        self.output_ids = NOTHING  # int64 [batch_size]: newest token of each request, without KV
        self.req_pool_indices = NOTHING  # int64 [batch_size]
        self.seq_lens = NOTHING  # int64 [batch_size]: tokens with KV after the step
        self.out_cache_loc = NOTHING  # int64 [total_tokens]
        self.prefix_lens: list[int] | None = None
        self.extend_lens: list[int] | None = None
        self.sampling_info: SamplingBatchInfo | None = None

    @classmethod
    def init_new(cls, reqs: Sequence[Req], pools: Pools) -> Self:
        """Build a batch of admitted requests; those with a single new token are last, as `ForwardBatch` requires."""
        return cls(sorted(reqs, key=lambda req: req.extend_input_len == 1), pools)

    # --- a step -------------------------------------------------------------------------------------------------------

    def prepare_for_extend(self, sampling_info: SamplingBatchInfo) -> None:
        """Allocate a row for every request that has none, and a slot for each token to compute.

        `sampling_info`: the rows of `reqs`, in their order. The prefixes must be locked. Raises `PartError`, and
        allocates nothing, if the memory has no room for the requests, or a request has no token to compute.
        """
        reqs, pools = self.reqs, self.pools
        if idle := [req.rid for req in reqs if req.extend_input_len < 1]:
            raise PartError(f"nothing is left to compute of {', '.join(idle)}: without a new token there are no logits")
        prefix_lens = [len(req.prefix_indices) for req in reqs]
        seq_lens = np.array([len(req.prefix_indices) + req.extend_input_len for req in reqs])
        last_locs = np.array([req.prefix_indices[-1] if len(req.prefix_indices) else -1 for req in reqs])
        allocator = pools.token_to_kv_pool_allocator
        num_pages = allocator.num_pages_for_extend(np.array(prefix_lens), seq_lens)
        pools.make_room(num_pages * allocator.page_size, self.rids)
        new_rows = pools.req_to_token_pool.alloc(sum(req.req_pool_idx is None for req in reqs))
        slots = None if new_rows is None else allocator.alloc_extend(np.array(prefix_lens), seq_lens, last_locs)
        if new_rows is None or slots is None:
            if new_rows is not None:
                pools.req_to_token_pool.free(new_rows)
            raise PartError(f"{len(reqs)} requests were admitted, and the KV memory has no room for them")
        unused = iter(new_rows)
        rows = [next(unused) if req.req_pool_idx is None else req.req_pool_idx for req in reqs]
        start = 0
        for req, row in zip(reqs, rows, strict=True):
            end = start + req.extend_input_len
            req.req_pool_idx, req.req_to_token_pool = row, pools.req_to_token_pool
            req.kv_committed_len = len(req.prefix_indices)
            pools.req_to_token_pool.write(row, 0, req.prefix_indices)
            pools.req_to_token_pool.write(row, req.kv_committed_len, slots[start:end])
            start = end
        self.forward_mode = ForwardMode.EXTEND
        ends = seq_lens.tolist()
        self.input_ids = np.concatenate(
            [np.array(req.fill_ids[start:end]) for req, start, end in zip(reqs, prefix_lens, ends, strict=True)]
        )
        self.req_pool_indices, self.seq_lens, self.out_cache_loc = np.array(rows), seq_lens, slots
        self.prefix_lens, self.extend_lens = prefix_lens, [req.extend_input_len for req in reqs]
        self.sampling_info = sampling_info

    def prepare_for_decode(self) -> None:
        """Allocate a slot for the next token of every request. Call only after `check_decode_mem` returned True."""
        pool, rows, before = self.pools.req_to_token_pool, self.req_pool_indices, self.seq_lens
        last_locs, after = self.out_cache_loc, before + 1
        if self.forward_mode is not ForwardMode.DECODE or len(last_locs) != len(rows):  # in most steps, the newest ones
            last_locs = pool.req_to_token[rows, before - 1].astype(np.int64)
        slots = self.pools.token_to_kv_pool_allocator.alloc_decode(after, last_locs)
        assert slots is not None, "check_decode_mem was not called, or returned False"
        pool.append(rows, before, slots)
        self.forward_mode = ForwardMode.DECODE
        self.input_ids, self.out_cache_loc, self.seq_lens = self.output_ids, slots, after
        self.prefix_lens = self.extend_lens = None

    def get_model_worker_batch(self) -> ModelWorkerBatch:
        """Return this step as plain data."""
        assert self.sampling_info is not None
        is_extend = self.forward_mode is ForwardMode.EXTEND
        return ModelWorkerBatch(
            forward_mode=self.forward_mode,
            rids=self.rids,
            input_ids=self.input_ids,
            req_pool_indices=self.req_pool_indices,
            seq_lens=self.seq_lens,
            out_cache_loc=self.out_cache_loc,
            prefix_lens=self.prefix_lens,
            extend_lens=self.extend_lens,
            prompts_to_rate=self._prompts_to_rate(self.reqs) if is_extend else {},
            sampling_info=self.sampling_info,
            sample_lens=[1] * len(self.rids),
            num_prompt_tokens=len(self.input_ids) if is_extend else 0,
        )

    def _prompts_to_rate(self, prefilled: list[Req]) -> dict[str, tuple[list[int], int]]:
        found = {}
        for req in prefilled:
            num_best, start = req.sampling_params.prompt_logprobs, len(req.prefix_indices)
            if req.wants_prompt_logprobs and num_best is not None:
                found[req.rid] = req.origin_input_ids[start : start + req.extend_input_len + 1], num_best
        return found

    def take_tokens(self, output: ModelRunnerOutput) -> tuple[list[Req], list[int]]:
        """Store the sampled tokens as the next step's input; return the requests with a token, and these tokens."""
        assert self.sampling_info is not None
        reqs, token_ids = self.reqs, [token_ids[0] for token_ids in output.sampled_token_ids]
        if output.req_ids == self.rids:
            self.output_ids = np.array(token_ids, dtype=np.int64)
        else:
            by_id = {rid: index for index, rid in enumerate(self.rids)}
            places = [by_id[rid] for rid in output.req_ids]
            self.output_ids = np.zeros(len(self.reqs), dtype=np.int64)  # a request without a token ends now
            self.output_ids[places] = token_ids
            reqs = [self.reqs[place] for place in places]
        self.sampling_info.advance(self.output_ids, 1)
        return reqs, token_ids

    # --- joining and leaving ------------------------------------------------------------------------------------------

    def filter_batch(self, keep_indices: Sequence[int] | None = None) -> None:
        """Keep only the requests at `keep_indices`, by default those that run and are not marked to end; in order."""
        if keep_indices is None:
            running = RequestStatus.RUNNING
            keep_indices = [i for i, req in enumerate(self.reqs) if req.status is running and req.to_finish is None]
        if len(keep_indices) == len(self.reqs):
            return
        self.reqs = [self.reqs[i] for i in keep_indices]
        self.rids = [req.rid for req in self.reqs]
        keep = np.array(keep_indices, dtype=np.int64)
        self.req_pool_indices, self.seq_lens = self.req_pool_indices[keep], self.seq_lens[keep]
        self.output_ids = self.output_ids[keep]
        self.input_ids = self.out_cache_loc = NOTHING
        self.prefix_lens = self.extend_lens = None
        if self.sampling_info is not None:
            self.sampling_info.filter_batch(keep_indices)

    def merge_batch(self, other: "ScheduleBatch") -> None:
        """Append the requests of another batch."""
        if not self.reqs or self.sampling_info is None:
            self.sampling_info = other.sampling_info
        elif other.sampling_info is not None:
            self.sampling_info.merge_batch(other.sampling_info)
        self.reqs, self.rids = self.reqs + other.reqs, self.rids + other.rids
        self.req_pool_indices = np.concatenate([self.req_pool_indices, other.req_pool_indices])
        self.seq_lens = np.concatenate([self.seq_lens, other.seq_lens])
        self.output_ids = np.concatenate([self.output_ids, other.output_ids])
        self.input_ids = self.out_cache_loc = NOTHING

    # --- memory -------------------------------------------------------------------------------------------------------

    def check_decode_mem(self) -> bool:
        """Evict until the next token of each request has room; return whether it has. A full page needs another one."""
        allocator = self.pools.token_to_kv_pool_allocator
        needed = len(self.reqs) * allocator.page_size  # a page each, and in most steps so much is free
        if allocator.available_size() < needed:
            needed = allocator.num_pages_for_decode(self.seq_lens + 1) * allocator.page_size
        return self.pools.make_room(needed, self.rids)

    def room(self) -> tuple[int, int]:
        """Return the slots, in whole pages, for the next token of each request, and the free or evictable ones."""
        allocator = self.pools.token_to_kv_pool_allocator
        needed = allocator.num_pages_for_decode(self.seq_lens + 1) * allocator.page_size
        return needed, allocator.available_size() + self.pools.tree_cache.evictable_size()

    def retract_decode(self, victim: Req) -> None:
        """Take a request out of the batch and free the pages that it owns, or cache them, too. Its cached pages stay,
        unlocked."""
        self.filter_batch([i for i, req in enumerate(self.reqs) if req is not victim])
        cache = self.pools.tree_cache
        victim.kv_committed_len -= victim.num_in_flight  # that step may fail
        cache.cache_finished_req(victim, is_insert=cache.keeps_retracted)
