"""Scheduler of a decode engine: a request takes room for its prompt, waits for the KV, and joins the running batch.

    prealloc_queue  --memory here-->  transfer_queue  --KV here-->  arrivals  --prebuilt batch-->  runs

A request takes memory for its whole prompt, less what the cache has, before any KV is sent; and only if enough is left
for some more tokens of each request that runs, arrives or has memory already, and of itself: a request that arrives and
is retracted at once was sent in vain. From its prebuilt batch on (`prebuilt.py`) it runs as in m5: after a retraction
its prompt is computed here. New in this milestone. SGLang: `DecodePreallocQueue`, `DecodeTransferQueue` in
`disaggregation/decode.py`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from m1_single_request.request import BaseFinishReason, FinishError, RequestStatus
from m1_single_request.sampler import SampledTokens
from m4_radix_cache.events import Matched
from m4_radix_cache.invariants import check_scheduler
from m4_radix_cache.preemption_events import Preempt
from m4_radix_cache.priority_preemption import FreedTokens, choose_victims, give_back, may_preempt
from m4_radix_cache.request import Req
from m4_radix_cache.retraction import outgrown
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from m5_chunked_prefill_spec.scheduler import Scheduler
from m6_multimodal_pd.disaggregation.events import Batch
from m6_multimodal_pd.disaggregation.prebuilt import PrebuiltBatch

NUM_RESERVED_TOKENS = 512
"""Tokens of memory that a running or arriving request keeps for its answer, at most; fewer if its answer is shorter."""


class DecodeScheduler(Scheduler):
    """m5's scheduler with queues before the running batch (`add_request`), whose requests join it in a prebuilt batch
    (`get_next_batch_to_run`).

    `leave`, `is_stuck`, `reset` and `check_invariants` know the requests in these queues.
    """

    batch_event = Batch

    def __init__(self, **settings: Any) -> None:
        """`settings`: as m5's. A `policy` orders the waiting queue; the preallocation queue has an order of its own."""
        super().__init__(**settings)
        self.by_priority = settings["scheduler_config"].schedule_policy == "priority"
        self.prealloc_queue: dict[str, Req] = {}
        """By request id: without a row, oldest first."""
        self.transfer_queue: dict[str, Req] = {}
        """By request id: with a row, and KV on its way."""
        self.arrivals: dict[str, Req] = {}
        """By request id: all KV is here; the next step is theirs."""
        self.first_tokens: dict[str, SampledTokens] = {}
        """By request id: the token that came with the KV."""
        self._placed: list[Req] = []
        """Requests that have room by preemption since the last `preallocate`."""

    @property
    def elsewhere(self) -> list[Req]:
        """The requests that wait for room, or for a prefill engine."""
        return [*self.prealloc_queue.values(), *self.transfer_queue.values()]

    def add_request(self, request: Req) -> None:
        """Queue a request until there is room for its prompt."""
        super().add_request(request)  # appends it to the waiting queue
        self.prealloc_queue[request.rid] = self.waiting_queue.pop()
        self.tree_cache.cancel_prefetch(request.rid)  # its KV comes from a prefill engine; a disk would delay it

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Return the requests whose KV has arrived, as a prebuilt batch; if there are none, m5's batch."""
        coming = [req for req in self.arrivals.values() if req.to_finish is None]
        self.merge_last_batch()
        if not coming:
            preempted = self._preempt_for_room()
            batch = super().get_next_batch_to_run()
            self.waiting_queue += preempted  # not before: they do not resume in the same step
            return batch
        for req in coming:
            del self.arrivals[req.rid]
            req.status = RequestStatus.RUNNING
        return PrebuiltBatch(coming, self.pools, self.sampling_info_of(coming))

    def leave(self, req: Req) -> None:
        """Remove a marked request from the unfinished ones, in whichever queue it is."""
        for queue in (self.prealloc_queue, self.transfer_queue, self.arrivals):
            queue.pop(req.rid, None)
        self.first_tokens.pop(req.rid, None)
        super().leave(req)

    def is_stuck(self) -> bool:
        """Return whether every step from now on is empty: no request ends, or waits for room or KV."""
        return not self.elsewhere and super().is_stuck()

    def reset(self, reason: BaseFinishReason) -> None:
        """End all requests with `reason`, outside a step. Afterwards queues and cache are empty, all memory is free."""
        for queue in (self.prealloc_queue, self.transfer_queue, self.arrivals, self.first_tokens, self._placed):
            queue.clear()
        super().reset(reason)

    def check_invariants(self) -> None:
        """Raise AssertionError if queues, batches and memory contradict each other; tests call it after each step."""
        waiting = [*self.waiting_queue, *self.prealloc_queue.values()]
        transferring = [*self.transfer_queue.values(), *self.arrivals.values()]
        check_scheduler(self, waiting, self.with_rows() + transferring)

    # --- the queues ---------------------------------------------------------------------------------------------------

    def preallocate(self) -> list[Req]:
        """Take room for requests of the preallocation queue, oldest (or most urgent) first, until one does not fit.
        Return those that have room now, and no KV yet."""
        done, self._placed = self._placed, []
        for req in self._in_order():
            if not self._take_room(req):
                break
            done.append(req)
        return [req for req in done if self.transfer_queue.get(req.rid) is req]

    def complete(self, rid: str, first: SampledTokens) -> None:
        """Let a request join the next step: all its KV is in its pages."""
        self.first_tokens[rid] = first
        self.arrivals[rid] = self.transfer_queue.pop(rid)

    def pages(self, req: Req) -> np.ndarray:
        """Return the pages of all tokens of a request with a row, int64, in order of position."""
        assert req.req_pool_idx is not None
        page_size = self.pools.token_to_kv_pool_allocator.page_size
        slots: np.ndarray = self.pools.req_to_token_pool.read(req.req_pool_idx, 0, len(req.fill_ids))
        return slots[::page_size] // page_size

    def _in_order(self) -> list[Req]:
        """Return the requests of the preallocation queue in the order in which they get room."""
        waiting = [req for req in self.prealloc_queue.values() if req.to_finish is None]
        return sorted(waiting, key=lambda req: -req.priority) if self.by_priority else waiting

    def _preempt_for_room(self) -> list[Req]:
        """Take room for urgent requests of the preallocation queue by preemption. Return the preempted requests, which
        are in no queue. It is part of a step: no step that is in flight afterwards writes to what it frees."""
        waiting, threshold = self._in_order(), self.preemption_threshold
        if threshold is None or not may_preempt(waiting, self.running_batch.reqs, threshold):
            return []
        preempted: list[Req] = []
        for req in waiting:
            victims: list[Req] = []
            has_room = self._take_room(req, victims)
            preempted += victims
            if not has_room:
                break
            self._placed.append(req)
        return preempted

    def _take_room(self, req: Req, victims: list[Req] | None = None) -> bool:
        """Give a request a row, and slots for all its tokens. Return False, and change nothing, if there is no room.

        `victims`: a list for the requests that are preempted for it; None: none is."""
        pools = self.pools
        if victims is None and not pools.req_to_token_pool.available_size():
            return False
        req.fill_ids = req.origin_input_ids + req.output_ids
        match = pools.tree_cache.match_prefix(req.key, len(req.fill_ids))
        pools.tree_cache.inc_lock_ref(match.last_device_node, req.rid)
        needed = self._room_for(req, len(match.device_indices))
        if needed is None and victims is not None:
            victims += self._preempt(req, len(match.device_indices))
            needed = self._room_for(req, len(match.device_indices)) if victims else None
        if needed is None:
            pools.tree_cache.dec_lock_ref(match.last_device_node, req.rid)
            return False
        req.prefix_indices, req.last_node, req.host_hit_length, req.last_host_node = match
        if victims:  # what host memory has of it may be evicted now
            req.host_hit_length = 0
        pools.tree_cache.load_back(req)
        pools.make_room(needed - (len(req.prefix_indices) - len(match.device_indices)), [req.rid])
        self._place(req)
        self.tracer.emit(Matched.of, req)
        req.status = RequestStatus.TRANSFERRING
        self.transfer_queue[req.rid] = self.prealloc_queue.pop(req.rid)
        return True

    def _preempt(self, req: Req, num_cached: int) -> list[Req]:
        """Preempt running requests if `req`, whose cached prefix is locked, has room then; return them."""
        threshold = self.preemption_threshold
        assert threshold is not None
        victims = choose_victims(
            req,
            self.running_batch.reqs,
            threshold,
            FreedTokens(self.tree_cache),
            lambda *after: self._room_for(req, num_cached, *after) is not None,
        )
        if victims:
            counted, before = [(victim, victim.kv_committed_len) for victim in victims], self._unreserved()
            for victim in victims:
                give_back(victim, self.tree_cache)
            self.take_out(victims)
            need = len(req.fill_ids) - num_cached + _reserved([req])
            self.tracer.emit(Preempt.of, req, counted, threshold, need, before, self._unreserved())
        return victims

    def _unreserved(self, victims: Sequence[Req] = (), num_freed: int = 0) -> int:
        """Return the free slots that no request with memory keeps for its answer. `victims`: counted as if they had
        given back their KV, `num_freed` tokens."""
        free = self.pools.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size() + num_freed
        return free - _reserved([req for req in self._with_memory() if req not in victims])

    def _with_memory(self) -> list[Req]:
        return [req for req in self.requests.values() if req.req_pool_idx is not None]

    def _room_for(self, req: Req, num_cached: int, victims: Sequence[Req] = (), num_freed: int = 0) -> int | None:
        """Return the number of slots for the rest of a prompt; None if they, and the reserve for the answers of all
        requests with memory and of this one, are not free now, or no row is. End the request if it does not fit
        although it is alone. `victims`: counted as if they had given back their KV, `num_freed` tokens."""
        allocator = self.pools.token_to_kv_pool_allocator
        goes_on = req.max_new_tokens - len(req.output_ids) > 1  # after the token that comes with the KV
        needed, alone = (
            allocator.num_pages_for_extend(np.array([num_cached]), np.array([length])) * allocator.page_size
            for length in (len(req.fill_ids), len(req.fill_ids) + goes_on)
        )
        has_row = self.pools.req_to_token_pool.available_size() + len(victims) > 0
        is_alone = not self._with_memory() and not self.waiting_queue
        if has_row and (alone if is_alone else needed + _reserved([req])) <= self._unreserved(victims, num_freed):
            return needed
        if is_alone:
            self.finish_requests([req.rid], FinishError(outgrown(req, self.pools)))
        return None

    def _place(self, req: Req) -> None:
        """Give a request a row, with the slots of its cached tokens and new slots for the rest."""
        pool, cached, num_tokens = self.pools.req_to_token_pool, req.prefix_indices, len(req.fill_ids)
        rows = pool.alloc(1)
        slots = self.pools.token_to_kv_pool_allocator.alloc_extend(
            np.array([len(cached)]), np.array([num_tokens]), np.array([cached[-1] if len(cached) else -1])
        )
        assert rows is not None and slots is not None, "there was room"
        pool.write(rows[0], 0, cached)
        pool.write(rows[0], len(cached), slots)
        req.cache_protected_len = len(cached)
        req.req_pool_idx, req.req_to_token_pool = rows[0], pool
        req.kv_committed_len, req.extend_input_len = len(cached), num_tokens - len(cached)
        req.cached_tokens = len(cached)


def _reserved(reqs: list[Req]) -> int:
    """Return the number of tokens that these requests keep for their answers."""
    left = (max(req.max_new_tokens - len(req.output_ids), 0) for req in reqs)
    return sum(min(tokens, NUM_RESERVED_TOKENS) for tokens in left)
