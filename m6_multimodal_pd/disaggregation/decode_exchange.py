"""Whose requests a decode engine knows and does not run: those for whose KV there is no room, or whose KV is coming.

Room is taken for a whole prompt before any of its KV is sent, less what the cache here has already; and only if those
who run keep enough for some tokens more, for a request that comes and must go again was sent for nothing. When all of a
prompt's KV is here, with its first token, it joins those who run in a step of its own (`prebuilt.py`). New in this
milestone. SGLang: `DecodePreallocQueue`, `DecodeTransferQueue` in `disaggregation/decode.py`.
"""

import numpy as np

from m1_single_request.request import FinishError, RequestStatus
from m1_single_request.tracer import Tracer
from m4_radix_cache.events import Matched
from m4_radix_cache.mem_cache.base_prefix_cache import MatchResult
from m4_radix_cache.request import Req
from m4_radix_cache.retraction import outgrown
from m4_radix_cache.schedule_batch import Pools
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from m5_chunked_prefill_spec.scheduler import Scheduler
from m6_multimodal_pd.disaggregation.prebuilt import FirstToken

NUM_RESERVED_TOKENS = 512
"""Memory that a request that runs, or comes, keeps for its answer, at most; if it may say less, that."""


class DecodeExchange:
    """An `Exchange`: with prefill engines, from the side that answers."""

    def __init__(self, pools: Pools, tracer: Tracer, *, by_priority: bool = False) -> None:
        """`by_priority`: whether requests of a higher priority get room first."""
        self.pools, self.tracer, self.by_priority = pools, tracer, by_priority
        self.scheduler: Scheduler | None = None
        self.prealloc_queue: dict[str, Req] = {}
        """By request id: without a row, oldest first."""
        self.transfer_queue: dict[str, Req] = {}
        """By request id: with a row, and KV on its way."""
        self.arrivals: dict[str, Req] = {}
        """By request id: all is here, and the next step is theirs."""
        self.first_tokens: dict[str, FirstToken] = {}
        self.expected: set[str] = set()
        """Ids of requests that are to come: their KV is made elsewhere."""

    # --- what a scheduler asks ----------------------------------------------------------------------------------------

    def held(self) -> list[Req]:
        return [*self.prealloc_queue.values(), *self.transfer_queue.values(), *self.arrivals.values()]

    def holds(self, req: Req) -> bool:
        return req.rid in self.prealloc_queue or req.rid in self.transfer_queue or req.rid in self.arrivals

    def takes_in(self, req: Req) -> bool:
        """Whoever is expected waits for room first; any other is computed here."""
        if req.rid not in self.expected:
            return False
        self.expected.discard(req.rid)
        self.prealloc_queue[req.rid] = req
        return True

    def keeps(self, req: Req) -> bool:
        """Nobody goes from here."""
        return False

    def arrived(self) -> ScheduleBatch | None:
        """Those that are here with all their KV, as a batch."""
        coming = [req for req in self.arrivals.values() if req.to_finish is None]
        if not coming or self.scheduler is None:
            return None
        batch = ScheduleBatch(coming, self.pools)
        batch.prepare_for_prebuilt(self.scheduler.sampling_info_of(coming))
        for req in coming:
            del self.arrivals[req.rid]
        return batch

    def let_go(self, req: Req) -> None:
        """Forget one of them, wherever it is."""
        for queue in (self.prealloc_queue, self.transfer_queue, self.arrivals):
            queue.pop(req.rid, None)
        self.first_tokens.pop(req.rid, None)

    # --- what the decode side does ------------------------------------------------------------------------------------

    def preallocate(self) -> list[Req]:
        """Take room for waiting requests, oldest first, until one has none. Returns those that have it now."""
        done = []
        waiting = list(self.prealloc_queue.values())
        for req in sorted(waiting, key=lambda req: -req.priority) if self.by_priority else waiting:
            if req.to_finish is not None:
                continue
            if not self._take_room(req):
                break
            done.append(req)
        return done

    def complete(self, rid: str, first: FirstToken) -> None:
        """All KV of this request is in its place."""
        req = self.transfer_queue.pop(rid)
        self.first_tokens[rid] = first
        self.arrivals[rid] = req

    def pages(self, req: Req) -> np.ndarray:
        """The pages of all tokens of a request that has room, in their order."""
        assert req.req_pool_idx is not None
        page_size = self.pools.token_to_kv_pool_allocator.page_size
        slots: np.ndarray = self.pools.req_to_token_pool.read(req.req_pool_idx, 0, len(req.fill_ids))
        return slots[::page_size] // page_size

    # --- inside -------------------------------------------------------------------------------------------------------

    def _take_room(self, req: Req) -> bool:
        """Give a request a row, and slots for all of its tokens. False, and no change, if there is no room now."""
        pools = self.pools
        if not pools.req_to_token_pool.available_size():
            return False
        req.fill_ids = req.origin_input_ids + req.output_ids
        match = pools.tree_cache.match_prefix(req.key, len(req.fill_ids))
        pools.tree_cache.inc_lock_ref(match.last_device_node)
        needed = self._room_for(req, len(match.device_indices))
        if needed is None:
            pools.tree_cache.dec_lock_ref(match.last_device_node)
            return False
        pools.make_room(needed)
        self._place(req, match)
        self.tracer.emit(Matched.of, req)
        req.status = RequestStatus.RUNNING
        del self.prealloc_queue[req.rid]
        self.transfer_queue[req.rid] = req
        return True

    def _room_for(self, req: Req, num_cached: int) -> int | None:
        """How many slots the rest of a prompt takes; None if they are not to be had now. One that will never have them
        ends."""
        assert self.scheduler is not None
        allocator = self.pools.token_to_kv_pool_allocator
        goes_on = req.max_new_tokens - len(req.output_ids) > 1  # behind the token that comes with the KV
        needed, alone = (
            allocator.num_pages_for_extend(np.array([num_cached]), np.array([length])) * allocator.page_size
            for length in (len(req.fill_ids), len(req.fill_ids) + goes_on)
        )
        free = allocator.available_size() + self.pools.tree_cache.evictable_size()
        others = [other for other in self.scheduler.running if other is not req]
        is_alone = not others and not self.scheduler.waiting_queue
        if (alone if is_alone else needed + self._reserved([*others, req])) <= free:
            return needed
        if is_alone and not self.scheduler.running:
            self.scheduler.finish_requests([req.rid], FinishError(outgrown(req, self.pools)))
        return None

    def _place(self, req: Req, match: MatchResult) -> None:
        """A row for the request, with the slots of what is cached and new ones for the rest."""
        rows_of, cached, num_tokens = self.pools.req_to_token_pool, match.device_indices, len(req.fill_ids)
        rows = rows_of.alloc(1)
        slots = self.pools.token_to_kv_pool_allocator.alloc_extend(
            np.array([len(cached)]), np.array([num_tokens]), np.array([cached[-1] if len(cached) else -1])
        )
        assert rows is not None and slots is not None, "there was room"
        rows_of.write(rows[0], 0, cached)
        rows_of.write(rows[0], len(cached), slots)
        req.prefix_indices, req.last_node = cached, match.last_device_node
        req.cache_protected_len = len(cached)
        req.req_pool_idx, req.req_to_token_pool = rows[0], rows_of
        req.kv_committed_len, req.extend_input_len = len(cached), num_tokens - len(cached)
        req.cached_tokens = len(cached)

    def _reserved(self, reqs: list[Req]) -> int:
        """What these keep for their answers."""
        left = (max(req.max_new_tokens - len(req.output_ids), 0) for req in reqs)
        return sum(min(tokens, NUM_RESERVED_TOKENS) for tokens in left)
