"""What a scheduler with a prefix cache must decide and keep, judged by a record of one's own.

`RadixChecks` hears of everything that comes in and reads every batch that goes out, as m3's `PagedChecks` does. Its own
books of memory come from the rows and the cache's nodes, not from the sums that allocator and cache keep: every page is
free, the cache's or one request's, and every lock belongs to a request that runs.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from m1_single_request.request import FinishError, RequestStatus
from m1_single_request.sampler import SampledTokens
from m3_paged_attention.errors import KVCapacityError
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import decode
from m4_radix_cache.model_worker_batch import ForwardMode
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_batch import ScheduleBatch
from tests.testbed.radix_runner import RadixRunner, answer_of, states_of


@dataclass
class Life:
    """What is known of a request that has not ended."""

    request: Req
    number: int
    """Its place in the order of arrival."""
    expected: tuple[int, ...]
    """All that it will say if nothing comes between."""
    said: list[int] = field(default_factory=list)
    ran: bool = False
    """Whether it ran: if it waits, it lost its place."""
    marked: bool = False
    """Aborted, failed or given up: it ends at the next update."""

    @property
    def num_tokens(self) -> int:
        return len(self.request.origin_input_ids) + len(self.said)

    @property
    def loss(self) -> tuple[int, int, int]:
        """Whoever has the smallest loses its place first."""
        return len(self.said), -len(self.request.origin_input_ids), -self.number


class RadixChecks:
    """Raises AssertionError at the first decision that breaks a rule."""

    def __init__(self, scheduler: Any, runner: RadixRunner, *, max_model_len: int, honest_policy: bool = True) -> None:
        """`honest_policy`: whether the victims are those of the usual preemption policy."""
        self.scheduler = scheduler
        self.runner = runner
        self.max_model_len = max_model_len
        self.honest_policy = honest_policy
        self.lives: dict[str, Life] = {}  # unfinished ones, in order of arrival
        self.running: list[str] = []  # as of the last update, in the order of the batch
        self._num_arrivals = 0
        self._free = 0

    # --- what comes in ------------------------------------------------------------------------------------------------

    def added(self, request: Req) -> None:
        """A request arrived."""
        most = min(request.sampling_params.max_tokens, self.max_model_len - len(request.origin_input_ids))
        self._num_arrivals += 1
        self.lives[request.rid] = Life(request, self._num_arrivals, answer_of(request, most))

    def marked(self, request_ids: Collection[str], marked: Collection[str]) -> None:
        """Requests were aborted or failed, and `marked` was the scheduler's answer."""
        new = {rid: self.lives[rid] for rid in request_ids if rid in self.lives and not self.lives[rid].marked}
        assert list(marked) == list(new)
        for life in new.values():
            life.marked = True

    # --- a decision ---------------------------------------------------------------------------------------------------

    def scheduled(self, batch: ScheduleBatch | None) -> None:
        """A decision was made."""
        now = [request.rid for request in self.scheduler.requests.values() if request.req_pool_idx is not None]
        in_batch = [] if batch is None else [request.rid for request in batch.reqs]
        self._note_who_was_given_up()
        joined = [rid for rid in in_batch if rid not in self.running]
        gone = [rid for rid in self.running if rid not in now]
        self._lost_rows_are_retracted(gone)
        assert not (gone and joined), "nobody is admitted in a step that retracted"
        unmarked = [rid for rid in self.running if rid not in gone and not self.lives[rid].marked]
        self._composed_by_the_rules(batch, in_batch, joined, unmarked)
        for rid in joined:
            self.lives[rid].ran = True
        self._row_lens(batch)
        self.memory_is_sound()
        self._free = self._num_free()

    def _composed_by_the_rules(self, batch: Any, in_batch: list[str], joined: list[str], unmarked: list[str]) -> None:
        """Prompts, or everybody's next token. `unmarked`: those who ran and may go on."""
        if batch is None:
            assert not unmarked or any(self.lives[rid].marked for rid in self.running), "somebody could run"
        elif batch.forward_mode is ForwardMode.EXTEND:
            assert in_batch == joined and not any(self.lives[rid].marked for rid in in_batch)
            self._joined_by_the_rules(batch, joined)
        else:
            assert in_batch == unmarked, "everybody who runs gets a token, in order of admission"

    def nothing_is_freed(self) -> None:
        """Between a decision and its update the memory stays as it is, whatever happens."""
        assert self._free == self._num_free()

    def _num_free(self) -> int:
        return int(self.scheduler.pools.token_to_kv_pool_allocator.available_size())

    def _note_who_was_given_up(self) -> None:
        allocator = self.scheduler.pools.token_to_kv_pool_allocator
        for rid, life in self.lives.items():
            reason = life.request.to_finish
            if reason is not None and not life.marked:
                assert isinstance(reason, FinishError) and isinstance(reason.error, KVCapacityError), (rid, reason)
                num_pages = -(-life.num_tokens // allocator.page_size)
                assert num_pages * allocator.page_size > allocator.size, f"{rid} could have run alone"
                life.marked = True

    def _lost_rows_are_retracted(self, gone: list[str]) -> None:
        """Of those who ran, those went who lose least."""
        for rid in gone:
            assert self.lives[rid].request.is_retracted or self.lives[rid].marked, rid
        if self.honest_policy and gone:
            stayed = [life for rid, life in self.lives.items() if rid in self.running and rid not in gone]
            most = max(self.lives[rid].loss for rid in gone)
            assert all(life.marked or life.loss > most for life in stayed), "another one should have gone"
            assert not any(self.lives[rid].marked for rid in gone), "whoever is to end leaves its memory anyway"

    def _joined_by_the_rules(self, batch: ScheduleBatch, joined: list[str]) -> None:
        """Retracted requests first; tokens and places as many as there are."""
        came_back = self._came_back_first(joined)
        assert batch.extend_lens is not None and batch.prefix_lens is not None
        is_alone = len(joined) == 1 and joined == came_back
        assert sum(batch.extend_lens) <= self.scheduler.max_num_batched_tokens or is_alone
        page_size = self.scheduler.tree_cache.page_size
        assert not any(prefix % page_size for prefix in batch.prefix_lens)

    def _came_back_first(self, joined: list[str]) -> list[str]:
        """Retracted requests go before all others, the oldest of them first; returns those that came back."""
        retracted = [rid for rid, one in self.lives.items() if one.ran and rid not in self.running and not one.marked]
        came_back = [rid for rid in retracted if rid in joined]
        assert came_back == retracted[: len(came_back)], f"{came_back} came back, but {retracted} lost their places"
        assert came_back == retracted or len(joined) == len(came_back), "somebody overtook a retracted request"
        assert len(joined) + len(self.running) <= self.scheduler.max_num_seqs
        return came_back

    def _row_lens(self, batch: ScheduleBatch | None) -> None:
        """Ruling 1, in flight: what is computed now has slots, and does not count as computed yet."""
        places = {} if batch is None else {request.rid: place for place, request in enumerate(batch.reqs)}
        for rid, request in self.scheduler.requests.items():
            if request.req_pool_idx is None:
                assert request.kv_committed_len == request.kv_allocated_len == 0, rid
            elif rid not in places:
                assert request.kv_committed_len == request.kv_allocated_len == request.seqlen - 1, rid
            else:
                assert batch is not None and request.kv_allocated_len == request.seqlen, rid
                new = 1 if batch.extend_lens is None else batch.extend_lens[places[rid]]
                assert request.kv_committed_len == request.seqlen - new, rid

    # --- memory -------------------------------------------------------------------------------------------------------

    def memory_is_sound(self) -> None:
        """Every page has one owner, every lock a request, and what is cached is what its tokens say."""
        pools = self.scheduler.pools
        allocator, cache, page_size = pools.token_to_kv_pool_allocator, pools.tree_cache, pools.tree_cache.page_size
        holding = [request for request in self.scheduler.requests.values() if request.req_pool_idx is not None]
        owned: list[int] = []
        for request in holding:
            slots = pools.req_to_token_pool.read(request.req_pool_idx, 0, request.kv_allocated_len)
            assert request.cache_protected_len % page_size == 0
            owned += np.unique(slots[request.cache_protected_len :] // page_size).tolist()
        protected = self._locks_are_those_of(holding)
        assert cache.protected_size() == protected, f"{cache.protected_size()} are protected, not {protected}"
        cached = cache.evictable_size() + protected
        assert len(set(owned)) == len(owned), "two requests own one page"
        total = allocator.available_size() + cached + len(owned) * page_size
        assert total == allocator.size, f"{total} of {allocator.size} tokens have an owner"
        if isinstance(cache, RadixCache):
            self._tree_holds_what_it_says(cache, owned)
        cache.check_invariants()

    def _locks_are_those_of(self, holding: list[Req]) -> int:
        """Each request with a row has locked the path that it starts from, once; returns the locked tokens."""
        expected: Counter[int] = Counter()
        nodes: dict[int, Any] = {}
        for request in holding:
            node = request.last_node
            while node is not None and node.parent is not None:
                nodes[id(node)] = node
                expected[id(node)] += 1
                node = node.parent
        for key, node in nodes.items():
            assert node.lock_ref == expected[key], f"{node!r} has {node.lock_ref} locks for {expected[key]} requests"
        page_size = self.scheduler.tree_cache.page_size
        return sum(len(node.value) if hasattr(node, "value") else page_size for node in nodes.values())

    def _tree_holds_what_it_says(self, tree: RadixCache, owned: Collection[int]) -> None:
        """The KV that is cached is that of the tokens on its path; its pages are nobody else's."""
        paths: dict[int, tuple[str | None, list[int]]] = {tree.root.id: (None, [])}
        pages: list[int] = []
        for node in tree.nodes():
            assert node.parent is not None
            extra_key, before = paths[node.parent.id]
            if isinstance(node.edge, tuple):
                extra_key = node.edge[0]
            tokens = before + decode(node.key)
            paths[node.id] = extra_key, tokens
            states = states_of(tokens, extra_key)[len(before) :]
            assert self.runner.kv[node.value].tolist() == states, f"{node!r} holds something else"
            pages += np.unique(node.value // tree.page_size).tolist()
        assert len(set(pages)) == len(pages) and not set(pages) & set(owned), "a page of the cache is somebody else's"

    # --- a result -----------------------------------------------------------------------------------------------------

    def updated(self, sampled: Mapping[str, SampledTokens], changed: Sequence[Req]) -> dict[str, str]:
        """A step was committed. Returns why requests ended in it, by request id."""
        ends = {rid for rid, life in self.lives.items() if life.marked}
        assert len(changed) == len({request.rid for request in changed})
        assert {request.rid for request in changed} == ends | sampled.keys()
        for rid in sampled.keys() - ends:
            life = self.lives[rid]
            life.said += sampled[rid].token_ids[: len(life.expected) - len(life.said)]  # nothing behind its end
            assert tuple(life.said) == life.expected[: len(life.said)], f"{rid} says something wrong"
            if len(life.said) == len(life.expected):
                ends.add(rid)
        for rid, life in self.lives.items():
            assert life.request.output_ids == life.said
            assert life.request.is_finished == (rid in ends)
        reasons = {request.rid: request.finish_reason for request in changed if request.is_finished}
        assert reasons.keys() == ends
        for rid in ends:
            del self.lives[rid]
        self._queues_are_right(sampled)
        self.memory_is_sound()
        return {rid: reason.reason for rid, reason in reasons.items() if reason is not None}

    def nothing_is_left(self) -> None:
        """After a drain: all memory is free or can be evicted, all rows are free, nothing is locked."""
        assert not self.lives and not self.running
        pools = self.scheduler.pools
        assert pools.req_to_token_pool.available_size() == pools.req_to_token_pool.size
        allocator, cache = pools.token_to_kv_pool_allocator, pools.tree_cache
        assert cache.protected_size() == 0, "something is locked"
        assert allocator.available_size() + cache.evictable_size() == allocator.size
        ratio = self.scheduler.new_token_ratio
        assert ratio.value == ratio.init, "an idle engine has learnt nothing"

    def in_pieces(self) -> list[str]:
        """Those of whose prompts a part is computed, and that are in no batch perhaps: nobody here."""
        return []

    def num_kv_tokens(self, rid: str) -> int:
        """How many tokens of a request that runs have KV between two steps: all but the newest."""
        return self.lives[rid].request.seqlen - 1

    def _queues_are_right(self, sampled: Mapping[str, SampledTokens]) -> None:
        scheduler = self.scheduler
        assert list(scheduler.requests) == list(self.lives), "in order of arrival"
        batches = [scheduler.running_batch] + ([] if scheduler.last_batch is None else [scheduler.last_batch])
        self.running = [request.rid for batch in batches for request in batch.reqs if not request.is_finished]
        self.running += [rid for rid in self.in_pieces() if rid not in self.running]
        waiting = [request.rid for request in scheduler.waiting_queue]
        assert sorted(self.running + waiting) == sorted(self.lives)
        for rid in self.running:
            request, num_tokens = self.lives[rid].request, self.num_kv_tokens(rid)
            assert request.status is RequestStatus.RUNNING and request.req_pool_idx is not None
            assert request.kv_committed_len == request.kv_allocated_len == num_tokens
            assert self.runner.num_kv_tokens(rid) == num_tokens, f"{rid} lacks KV"
        for rid in waiting:
            life = self.lives[rid]
            assert life.request.req_pool_idx is None and rid not in sampled
            assert life.request.is_retracted == life.ran, f"{rid} ran: {life.ran}"
