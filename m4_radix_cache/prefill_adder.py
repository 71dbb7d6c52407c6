"""Admission of waiting requests to the next prefill, within a memory budget and a token budget.

m3 counted the free blocks for a prompt, and reserved one block per running request. m4 reserves more: all future
output tokens of an admitted request, and the expected share of them (`new_token_ratio`) of running ones. Unlocked
cached memory counts as free, because it can be evicted. The adder counts, and locks the cached prefix of each admitted
request. What host memory has of a request takes slots, but nothing of the token budget. SGLang: `PrefillAdder`; vLLM
has no such estimate and preempts instead.
"""

import copy
from collections.abc import Sequence
from enum import Enum

from m1_single_request.tracer import Tracer
from m4_radix_cache.events import Admit, NotAdmitted
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.preemption_events import Preempt
from m4_radix_cache.priority_preemption import FreedTokens, choose_victims, give_back
from m4_radix_cache.request import Req

CLIP_MAX_NEW_TOKENS = 4096
"""Upper bound on the future tokens reserved per request (SGLang: `CLIP_MAX_NEW_TOKENS`)."""


class AddReqResult(Enum):
    """Result of a try: whether another request may be tried in this step."""

    CONTINUE = "continue"
    NO_TOKEN = "no_token"
    """No memory is left. More is free only after a request ends or is retracted."""
    OTHER = "other"
    """This step has its maximum of requests or tokens. The next step may have room."""


class PrefillAdder:
    """Fills one prefill batch. Valid until memory is allocated, evicted or freed; each batch has its own adder.

    All numbers are tokens:

        available + evictable                       free, or held by the cache only
          - pages of the prompts admitted here      = cur_rem_tokens
          - reserve for future output tokens        = rem_total_tokens

    Why the batch can then be allocated: a request is admitted only if `extend <= need < rem_total <= cur_rem`. All
    terms of `cur_rem` are whole pages, so it is at least `extend` rounded up to pages (for a request that may fill the
    memory, this is the test itself). The request takes exactly these pages, because its prefix ends on a page
    boundary. The test runs again after its prefix is locked and no longer evictable. So `cur_rem` never falls below 0,
    and there are pages for all of `can_run_list`. All evictable tokens can in fact be evicted, because all nodes below
    an unlocked node of the cache are unlocked.
    """

    def __init__(
        self,
        *,
        tree_cache: BasePrefixCache,
        token_to_kv_pool_allocator: TokenToKVPoolAllocator,
        running: Sequence[Req],
        new_token_ratio: float,
        max_prefill_tokens: int,
        max_new_reqs: int,
        num_waiting: int,
        tracer: Tracer,
    ) -> None:
        """`new_token_ratio`: expected share of the remaining output tokens of `running`. `max_prefill_tokens`: maximum
        number of tokens to compute in this step. `max_new_reqs`: maximum number of requests to admit. `num_waiting`:
        number of waiting requests.
        """
        self.tree_cache = tree_cache
        self.allocator = token_to_kv_pool_allocator
        self.page_size = token_to_kv_pool_allocator.page_size
        self.max_new_reqs = max_new_reqs
        self.num_waiting = num_waiting
        """Number of waiting requests that are not admitted."""
        self.tracer = tracer
        self.can_run_list: list[Req] = []
        """Admitted requests, in order; the `last_node` of each is locked."""
        self.rem_input_tokens = max_prefill_tokens
        """Tokens, in whole pages, that this step may still compute."""
        self.preempt_list: list[Req] = []
        """Requests that were preempted for admitted ones; they have no row any more."""
        self._running, self._ratio = list(running), new_token_ratio
        self._taken = 0  # by admitted prompts, in whole pages
        self._expected = self._expected_of_running()

    @property
    def cur_rem_tokens(self) -> int:
        """Tokens that are not taken by admitted prompts: whole pages, never below 0."""
        return self.allocator.available_size() + self.tree_cache.evictable_size() - self._taken

    @property
    def rem_total_tokens(self) -> int:
        """Tokens that are neither taken nor reserved; below 0 if the reserve is larger than the rest.

        The reserve is at least one page per request, so that the next decode step needs no retraction.
        """
        a_page_each = self.page_size * (len(self._running) + len(self.can_run_list))
        return self.cur_rem_tokens - max(self._expected, a_page_each)

    def budget_state(self) -> AddReqResult:
        """Return whether another request may be tried, or the budget that is used up."""
        if self.rem_total_tokens <= 0:  # cur_rem_tokens is never less
            return AddReqResult.NO_TOKEN
        return AddReqResult.OTHER if self.rem_input_tokens <= 0 else AddReqResult.CONTINUE

    def add_one_req(self, req: Req) -> AddReqResult:
        """Admit a request, after its `init_next_round_input`, if it fits: add it to `can_run_list` and lock its node.

        A rejected request has no lock. With any other result than CONTINUE, try no other request; this one may have
        been admitted as the last.
        """
        if len(self.can_run_list) >= self.max_new_reqs:
            return self._refuse(req, "max_num_seqs")
        if self._lacks_memory(req):
            return self._refuse(req, "memory")
        if (limit := self._step_limit(req)) is not None:
            return self._refuse(req, limit)
        self.tree_cache.inc_lock_ref(req.last_node, req.rid)
        if self._lacks_memory(req):  # its own prefix is locked now, so less can be evicted
            refused = self._refuse(req, "memory", is_locked=True)
            self.tree_cache.dec_lock_ref(req.last_node, req.rid)
            return refused
        self.tree_cache.load_back(req)
        return self._admit(req)

    def preempt_to_schedule(self, req: Req, threshold: int) -> bool:
        """Preempt running requests of lower priority, by more than `threshold`, if `req` can be added then and not
        otherwise. Return whether it was done; if not, nothing has changed. Call it before `add_one_req`."""
        freed = FreedTokens(self.tree_cache, req.last_node)
        victims = choose_victims(req, self._running, threshold, freed, lambda *after: self._is_enough(req, *after))
        if not victims:
            return False
        counted = [(victim, victim.kv_committed_len) for victim in victims]
        before = self.rem_total_tokens
        for victim in victims:
            give_back(victim, self.tree_cache)
        self._count_out(victims)
        self.preempt_list += victims
        req.init_next_round_input(self.tree_cache)  # what host memory has of it may be evicted now
        self.tracer.emit(Preempt.of, req, counted, threshold, self._need(req), before, self.rem_total_tokens)
        return True

    def _is_enough(self, req: Req, victims: list[Req], num_freed: int) -> bool:
        """Return whether `req` could be added after `victims` have given back `num_freed` tokens."""
        after = copy.copy(self)
        after._count_out(victims)
        after._taken -= num_freed
        has_row = len(self.can_run_list) < after.max_new_reqs
        return has_row and not after._lacks_memory(req) and after._step_limit(req) is None

    def _count_out(self, victims: Sequence[Req]) -> None:
        """Subtract the rows and the reserve of preempted requests."""
        before, gone = self._expected_of_running(), set(victims)
        self._running = [req for req in self._running if req not in gone]
        self._expected += self._expected_of_running() - before
        self.max_new_reqs += len(victims)

    def _expected_of_running(self) -> int:
        """Return the tokens reserved for running requests. They are compared with whole numbers only, so a fraction has
        no effect."""
        return int(sum(_tokens_to_come(req) for req in self._running) * self._ratio)

    def _step_limit(self, req: Req) -> str | None:
        """Return the limit of the step that the request exceeds, or None if its tokens fit.

        Only a retracted request can exceed the whole budget, because intake rejects longer prompts. It runs alone.
        """
        fits = self._ceil_page(req.extend_input_len) < self.rem_input_tokens or not self.can_run_list
        return None if fits else "max_num_batched_tokens"

    def _take(self, req: Req) -> AddReqResult:
        """Add a request with a locked node to the batch; count its tokens and its future tokens."""
        extend = self._ceil_page(req.extend_input_len)
        self.can_run_list.append(req)
        self._taken += extend
        # Outputs from before a retraction count again: a larger reserve, because the memory was too small before.
        self._expected += min(req.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        self.rem_input_tokens -= extend
        return self.budget_state()

    def _admit(self, req: Req) -> AddReqResult:
        """Count an admitted request, and trace the budgets before it."""
        need, budgets = self._need(req), (self.rem_total_tokens, self.cur_rem_tokens, self.rem_input_tokens)
        result = self._take(req)
        self.num_waiting -= 1
        self.tracer.emit(Admit.of, self, req, need, budgets, result)
        return result

    def _refuse(self, req: Req, limit: str, *, is_locked: bool = False) -> AddReqResult:
        self.tracer.emit(NotAdmitted.of, self, req, limit, self._need(req), is_locked)
        return AddReqResult.NO_TOKEN if limit == "memory" else AddReqResult.OTHER

    def _lacks_memory(self, req: Req) -> bool:
        """Return whether the memory has no room for the request's tokens and its future tokens."""
        is_alone = not self._running and not self.can_run_list
        if is_alone and not _tokens_to_come(req):  # retracted before its last token: it may fill the memory
            return self._ceil_page(req.extend_input_len + req.host_hit_length) > self.cur_rem_tokens
        return self._need(req) >= self.rem_total_tokens

    def _need(self, req: Req) -> int:
        """Return the number of tokens that the request takes now or may take later."""
        return req.host_hit_length + req.extend_input_len + _tokens_to_come(req)

    def _ceil_page(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size


def _tokens_to_come(req: Req) -> int:
    """Return the number of a request's future output tokens, at most `CLIP_MAX_NEW_TOKENS`."""
    return min(max(req.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
