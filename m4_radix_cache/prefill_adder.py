"""Which of the waiting requests fit into the next prefill: a budget of memory and a budget of tokens.

m3 counted the free blocks that a prompt takes and kept one for each running request. That is still kept, but now a
request is also charged for what it may say later, and what runs for the share of it that is expected; and memory that
only the cache holds counts as free, because it can be evicted. Nothing is taken yet: the adder only counts, and locks
what an admitted request has found in the cache. SGLang: `PrefillAdder`; vLLM has no such estimate and preempts instead.
"""

from collections.abc import Sequence
from enum import Enum

from m1_single_request.tracer import Tracer
from m4_radix_cache.events import Admit, NotAdmitted
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.request import Req

CLIP_MAX_NEW_TOKENS = 4096
"""Nobody is charged for more future tokens: few requests say all that they may."""


class AddReqResult(Enum):
    """Whether another request may be tried."""

    CONTINUE = "continue"
    NO_TOKEN = "no_token"
    """The memory is spoken for. That changes only when somebody ends or is retracted."""
    OTHER = "other"
    """This step has as many requests or tokens as it may. The next one has room again."""


class PrefillAdder:
    """Fills one prefill batch. Made anew for each, as long as nobody allocates, evicts or frees.

    All numbers are tokens:

        available + evictable                       what is free, or only the cache holds
          - pages of the prompts admitted here      = cur_rem_tokens
          - what is kept for tokens to come         = rem_total_tokens

    Why the batch can then be allocated: a request is admitted only if `extend <= need < rem_total <= cur_rem`. All
    terms of `cur_rem` are whole pages, so it is at least `extend` rounded up to pages (whoever may fill the memory is
    asked just that); and so many pages the request takes, because its prefix ends on a page. This is tested once more
    when what it has found is locked, and not evictable any more. So `cur_rem` never falls below 0: there are pages for
    all of `can_run_list`, and what is evictable really can be evicted, because whatever lies below an unlocked node of
    the cache is unlocked, too.
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
        """`new_token_ratio`: the share of what `running` may still say that is expected. `max_prefill_tokens`: at most
        so many tokens go through the model. `max_new_reqs`: so many more requests may run. `num_waiting`:
        number of waiting requests.
        """
        self.tree_cache = tree_cache
        self.allocator = token_to_kv_pool_allocator
        self.page_size = token_to_kv_pool_allocator.page_size
        self.max_new_reqs = max_new_reqs
        self.num_waiting = num_waiting
        """Waiting requests that are not admitted."""
        self.tracer = tracer
        self.can_run_list: list[Req] = []
        """Admitted requests, in order; the `last_node` of each is locked."""
        self.rem_input_tokens = max_prefill_tokens
        """Tokens, in whole pages, that may still go through the model in this step."""
        self._num_running = len(running)
        self._taken = 0  # by admitted prompts, in whole pages
        expected = sum(_tokens_to_come(req) for req in running) * new_token_ratio
        self._expected = int(expected)  # against whole numbers of tokens a fraction decides nothing

    @property
    def cur_rem_tokens(self) -> int:
        """Tokens that are not taken: a number of whole pages, never below 0."""
        return self.allocator.available_size() + self.tree_cache.evictable_size() - self._taken

    @property
    def rem_total_tokens(self) -> int:
        """Tokens that are neither taken nor kept for later; below 0 if more is expected than there is.

        A page is kept for each request at least, so that the next decode step need not retract one of them at once.
        """
        a_page_each = self.page_size * (self._num_running + len(self.can_run_list))
        return self.cur_rem_tokens - max(self._expected, a_page_each)

    def budget_state(self) -> AddReqResult:
        """Whether it makes sense to try another request."""
        if self.rem_total_tokens <= 0:  # cur_rem_tokens is never less
            return AddReqResult.NO_TOKEN
        return AddReqResult.OTHER if self.rem_input_tokens <= 0 else AddReqResult.CONTINUE

    def add_one_req(self, req: Req) -> AddReqResult:
        """Admit a request, after its `init_next_round_input`, if it fits: it joins `can_run_list`, its node locked.

        A refused one has nothing locked. Anything but CONTINUE means: try no other one; the request may have been
        admitted all the same, as the last.
        """
        if len(self.can_run_list) >= self.max_new_reqs:
            return self._refuse(req, "max_num_seqs")
        if self._lacks_memory(req):
            return self._refuse(req, "memory")
        if (limit := self._step_limit(req)) is not None:
            return self._refuse(req, limit)
        self.tree_cache.inc_lock_ref(req.last_node)
        if self._lacks_memory(req):  # without what it has found, less can be evicted
            refused = self._refuse(req, "memory", is_locked=True)
            self.tree_cache.dec_lock_ref(req.last_node)
            return refused
        return self._admit(req)

    def _step_limit(self, req: Req) -> str | None:
        """The limit that keeps its tokens out of this step; None: they fit.

        Only a retracted request can be longer than the whole budget: others are refused at intake. It runs alone.
        """
        fits = self._ceil_page(req.extend_input_len) < self.rem_input_tokens or not self.can_run_list
        return None if fits else "max_num_batched_tokens"

    def _take(self, req: Req) -> AddReqResult:
        """Count its tokens, and those to come; its node is locked."""
        extend = self._ceil_page(req.extend_input_len)
        self.can_run_list.append(req)
        self._taken += extend
        # All that it may say, what it said before a retraction included: it comes back to a memory that was too small.
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
        """Whether there is no room for its tokens and those to come."""
        is_alone = not self._num_running and not self.can_run_list
        if is_alone and not _tokens_to_come(req):  # it lost its place at the very end, and may fill the memory
            return self._ceil_page(req.extend_input_len) > self.cur_rem_tokens
        return self._need(req) >= self.rem_total_tokens

    def _need(self, req: Req) -> int:
        """What it takes now and may take later."""
        return req.extend_input_len + _tokens_to_come(req)

    def _ceil_page(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size


def _tokens_to_come(req: Req) -> int:
    """What it may still say, as far as anybody is charged for it."""
    return min(max(req.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
