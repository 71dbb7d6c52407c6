"""What a scheduler with a prefix cache must decide and keep, judged by a record of one's own.

`RadixChecks` reads every arrival and every batch, as m3's `PagedChecks` does. Its own
books of memory come from the rows and the cache's nodes, not from the sums that allocator and cache keep: every page is
free, the cache's or one request's, and every lock belongs to a request that runs.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from m1_single_request.request import RequestStatus
from m1_single_request.sampler import SampledTokens
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import decode
from m4_radix_cache.model_worker_batch import ForwardMode
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_batch import ScheduleBatch
from tests.testbed.checks import Checks, Life
from tests.testbed.radix_runner import RadixRunner, answer_of, states_of


def loss(life: Life) -> tuple[int, int, int]:
    """The request with the smallest loses its place first."""
    return len(life.said), -len(life.prompt), -life.number


class RadixChecks(Checks):
    """Raises AssertionError at the first decision that breaks a rule."""

    def __init__(
        self, scheduler: Any, runner: RadixRunner, *, config: Any, max_model_len: int, honest_policy: bool = True
    ) -> None:
        """`config`: the limits. `honest_policy`: whether the victims are those of the usual preemption policy."""
        super().__init__(scheduler, max_model_len=max_model_len)
        self.config = config
        self.runner = runner
        self.honest_policy = honest_policy
        self.running: list[str] = []  # as of the last update, in the order of the batch
        self.preempted: dict[str, int] = {}  # number of output tokens when a request last lost its place to another
        self._free = 0

    def answer_of(self, request: Any, num_tokens: int) -> tuple[int, ...]:
        return answer_of(request, num_tokens)

    # --- a decision ---------------------------------------------------------------------------------------------------

    def scheduled(self, batch: ScheduleBatch | None) -> None:
        """A decision was made."""
        now = [request.rid for request in self.scheduler.requests.values() if request.req_pool_idx is not None]
        in_batch = [] if batch is None else [request.rid for request in batch.reqs]
        self.note_failures_for_memory()
        joined = [rid for rid in in_batch if rid not in self.running]
        self._preempted_by_the_rules([rid for rid in self.running if rid not in now], joined)
        gone = [rid for rid in self.running if rid not in now]
        self._lost_rows_are_retracted(gone)
        assert not (gone and joined), "a request is admitted in a step that retracted"
        unmarked = [rid for rid in self.running if rid not in gone and not self.lives[rid].marked]
        self._composed_by_the_rules(batch, in_batch, joined, unmarked)
        for rid in joined:
            self.lives[rid].ran = True
        self._row_lens(batch)
        self.memory_is_sound()
        self._free = self._num_free()

    def _composed_by_the_rules(self, batch: Any, in_batch: list[str], joined: list[str], unmarked: list[str]) -> None:
        """Prompts, or the next token of each. `unmarked`: the requests that ran and may go on."""
        if batch is None:
            assert not unmarked or any(self.lives[rid].marked for rid in self.running), "a request could run"
        elif batch.forward_mode is ForwardMode.EXTEND:
            assert in_batch == joined and not any(self.lives[rid].marked for rid in in_batch)
            self._joined_by_the_rules(batch, joined)
        else:
            assert in_batch == unmarked, "each running request gets a token, in order of admission"

    def nothing_is_freed(self) -> None:
        """Between a decision and its update the memory stays as it is, whatever happens."""
        assert self._free == self._num_free()

    def _num_free(self) -> int:
        return int(self.scheduler.pools.token_to_kv_pool_allocator.available_size())

    def fits_alone(self, num_tokens: int) -> bool:
        allocator = self.scheduler.pools.token_to_kv_pool_allocator
        return -(-num_tokens // allocator.page_size) * allocator.page_size <= allocator.size

    def _lost_rows_are_retracted(self, gone: list[str]) -> None:
        """Of those who ran, those went who lose least."""
        for rid in gone:
            assert self.lives[rid].request.is_retracted or self.lives[rid].marked, rid
        if self.honest_policy and gone:
            stayed = [life for rid, life in self.lives.items() if rid in self.running and rid not in gone]
            most = max(loss(self.lives[rid]) for rid in gone)
            assert all(life.marked or loss(life) > most for life in stayed), "another one should have gone"
            assert not any(self.lives[rid].marked for rid in gone), "a request that is to end frees its memory anyway"

    def _preempted_by_the_rules(self, gone: list[str], joined: list[str]) -> None:
        """Of those who ran the least urgent and newest made place for a far more urgent one, each after a new token;
        they wait as if they had not run."""
        lives, threshold = self.lives, self.config.preemption_threshold
        victims = [r for r in gone if lives[r].request.status is RequestStatus.WAITING and not lives[r].marked]
        if not victims:
            return
        assert self.config.priority_preemption and joined, f"{victims} lost their places to nobody"

        def may_go(rid: str) -> bool:
            life = lives[rid]
            below = max(lives[one].request.priority for one in joined) - life.request.priority
            return below > threshold and len(life.said) > self.preempted.get(rid, -1)

        def rank(rid: str) -> tuple[int, int]:
            return lives[rid].request.priority, -lives[rid].number

        assert all(map(may_go, victims)), f"{victims} lost their places, and not all of them had to"
        stay = [r for r in self.running if r not in gone and not lives[r].marked and r not in self.in_pieces()]
        assert not any(may_go(rid) and rank(rid) < max(map(rank, victims)) for rid in stay), "another one should go"
        for rid in victims:
            self.preempted[rid], lives[rid].ran = len(lives[rid].said), False
        self.running = [rid for rid in self.running if rid not in victims]

    def _joined_by_the_rules(self, batch: ScheduleBatch, joined: list[str]) -> None:
        """Retracted requests first; tokens and places as many as there are."""
        came_back = self._came_back_first(joined)
        assert batch.extend_lens is not None and batch.prefix_lens is not None
        is_alone = len(joined) == 1 and (joined == came_back or bool(self.lives[joined[0]].said))
        assert sum(batch.extend_lens) <= self.config.max_num_batched_tokens or is_alone
        page_size = self.scheduler.tree_cache.page_size
        assert not any(prefix % page_size for prefix in batch.prefix_lens)

    def _came_back_first(self, joined: list[str]) -> list[str]:
        """Retracted requests go before all others, the oldest of them first; returns those that came back."""
        retracted = [rid for rid, one in self.lives.items() if one.ran and rid not in self.running and not one.marked]
        came_back = [rid for rid in retracted if rid in joined]
        assert came_back == retracted[: len(came_back)], f"{came_back} came back, but {retracted} lost their places"
        assert came_back == retracted or len(joined) == len(came_back), "a request overtook a retracted one"
        assert len(joined) + len(self.running) <= self.config.max_num_seqs
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
        """The KV that is cached is that of the tokens on its path; its pages have no other owner."""
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
        assert len(set(pages)) == len(pages) and not set(pages) & set(owned), "a page of the cache has another owner"

    # --- a result -----------------------------------------------------------------------------------------------------

    def updated(self, sampled: Mapping[str, SampledTokens], changed: Sequence[Req]) -> dict[str, str]:
        """A step was committed. Returns why requests ended in it, by request id."""
        reasons = self.ends_of(sampled, changed)
        self._queues_are_right(sampled)
        self.memory_is_sound()
        return reasons

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
        """Requests with a part of the prompt computed, perhaps in no batch: none here."""
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
