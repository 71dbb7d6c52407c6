"""Build the prefill adder of m5: which waiting requests start in this step, and with how many tokens of their prompts.

Two budgets decide. The step has room for so many tokens: the prompt that exceeds it is cut, and goes on in the next
step. The memory must have room for the whole prompt and the whole answer of a request, although only a piece may run
now: what is admitted has to end. And cached memory is free only as long as no request has locked it, so a request
cannot count its own prefix twice, as found and as free. (Lesson 4, "PrefillAdder: two budgets", explains the memory.)

Explained in docs/m5_chunked_prefill_spec.md#work-and-prefilladder-the-next-piece-then-new-requests.

    cp starters/prefill_adder.py my_adder.py
    pytest --part prefill_adder=my_adder.py:MyPrefillAdder
"""

from collections.abc import Sequence

from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.prefill_adder import (
    CLIP_MAX_NEW_TOKENS,  # noqa: F401 - for you
    AddReqResult,
    PrefillAdder as WholePrefillAdder,
)
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.events import ChunkCut


class MyPrefillAdder(WholePrefillAdder):
    """Fills one prefill batch. It counts, and locks; it allocates nothing. Each step has its own adder.

    From m4's adder you have its state, the trace and the preemption by priority:

        self.can_run_list        the admitted requests, in order
        self.rem_input_tokens    tokens that this step may still compute
        self.max_new_reqs        maximum number of requests to admit
        self.cur_rem_tokens      free or evictable tokens of memory, less `self._taken`; whole pages
        self._taken              tokens of pages that admitted requests will take in this step
        self._expected           tokens that are expected to come, of running and of admitted requests; at first a
                                 share of those of the running ones
        self._running            the requests that run
        self.page_size           tokens of a page
        self._ceil_page(n)       n, rounded up to whole pages
        self._need(req)          tokens that a request takes in memory until it ends: those to compute, those that host
                                 memory has of it, and its future output tokens, at most `CLIP_MAX_NEW_TOKENS`
        self._refuse(req, limit, is_locked=False)    trace the refusal, and return its result: `NO_TOKEN` for the limit
                                 "memory", otherwise `OTHER`. `is_locked`: whether its node is locked at this moment
        self._admit(req)         count a request by `_take`, trace it, and return the result

    Results (`AddReqResult`): `CONTINUE`: another request may be tried. `NO_TOKEN`: no memory is left. `OTHER`: this
    step is full. With the last two a request may have been admitted, as the last one.
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
        rem_chunk_tokens: int | None,
        chunk_alignment: int,
        is_chunked: bool,
        has_whole_step: bool,
        bound_by: str,
        tracer: Tracer,
    ) -> None:
        """Given. `chunk_alignment`: the length of a piece that is not the last is a multiple of it. `is_chunked`:
        prompts may be cut. `bound_by`: the name of the limit behind `rem_input_tokens`, for the trace."""
        super().__init__(
            tree_cache=tree_cache,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            running=running,
            new_token_ratio=new_token_ratio,
            max_prefill_tokens=max_prefill_tokens,
            max_new_reqs=max_new_reqs,
            num_waiting=num_waiting,
            tracer=tracer,
        )
        self.is_chunked, self.has_whole_step = is_chunked, has_whole_step
        self.chunk_alignment = chunk_alignment
        self.bound_by = bound_by
        if rem_chunk_tokens is not None and rem_chunk_tokens < self.rem_input_tokens:
            self.rem_input_tokens, self.bound_by = rem_chunk_tokens, "chunked_prefill_size"
        self.new_chunked_req: Req | None = None

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def rem_total_tokens(self) -> int:
        """Tokens of memory that are neither taken nor reserved: `cur_rem_tokens` less the reserve. May be below 0.

        The reserve is the number of expected tokens, but at least a page for each running and each admitted request,
        so that the next decode step has a slot for all of them.
        """
        raise NotImplementedError

    def _lacks_memory(self, req: Req) -> bool:
        """Return whether the memory has no room for a request to its end: its need must be less than
        `rem_total_tokens`.

        One exception, for a request that was retracted before its last token: it would wait for ever. If no request
        runs, none is admitted, and it has all its output tokens (`len(req.output_ids) >= req.max_new_tokens`), its
        need, rounded up to whole pages, may be all of `cur_rem_tokens`.
        """
        raise NotImplementedError

    # --- a new request ------------------------------------------------------------------------------------------------

    def add_one_req(self, req: Req) -> AddReqResult:
        """Admit a waiting request, or refuse it by one of the limits, tested in this order:

        1. "max_num_seqs": `max_new_reqs` requests are admitted already.
        2. "memory": `_lacks_memory`.
        3. the limit that `_step_limit` names, if it names one.

        Then lock its prefix, `self.tree_cache.inc_lock_ref(req.last_node, req.rid)`, and test the memory again: its
        prefix was counted as evictable, and is not any more. If there is no room now, refuse it and unlock the prefix
        again (`dec_lock_ref`, the same arguments). An admitted request (`_admit`) keeps its lock, a refused one has
        none. `req.extend_input_len` is the number of its tokens to compute, its prefix not counted.
        """
        raise NotImplementedError

    def _step_limit(self, req: Req) -> str | None:
        """Given: return the limit of the step that keeps a request out of it, or None. A prompt that may be cut needs
        room for a piece, another one for all of it."""
        if self.is_chunked:
            fits = self._cut(req, req.extend_input_len) > 0
        elif self.has_whole_step:
            return super()._step_limit(req)
        else:
            fits = req.extend_input_len <= self.rem_input_tokens
        return None if fits else "max_num_batched_tokens"

    def _admit(self, req: Req) -> AddReqResult:
        """Given: get what host memory has of the request, count and trace it."""
        self.tree_cache.load_back(req)
        return super()._admit(req)

    def _take(self, req: Req) -> AddReqResult:
        """Given: count a request whose node is locked, or a piece of it. After a cut no other request is tried."""
        whole = req.extend_input_len
        given = self._cut(req, whole) if self.is_chunked else whole
        self._take_piece(req, given, self.bound_by)
        return AddReqResult.OTHER if given < whole else self.budget_state()

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _cut(self, req: Req, most: int) -> int:
        """Return how many of the next `most` tokens of a request run in this step: as many as the step has room for.

        If tokens of the request are missing behind them, of `req.extend_input_len`, the number is rounded down to a
        multiple of `chunk_alignment`; perhaps to 0.
        """
        raise NotImplementedError

    def _take_piece(self, req: Req, given: int, bound_by: str) -> None:
        """Add a request to `can_run_list` with the first `given` of its `req.extend_input_len` tokens to compute, and
        count:

        - these tokens, one by one, against the step (`rem_input_tokens`);
        - the pages that they take (`_taken`), in tokens: they begin behind the `len(req.prefix_indices)` tokens that
          have KV, perhaps inside a page, which the request holds already;
        - with the last piece, or with the whole prompt, `req.max_new_tokens` tokens to come, at most
          `CLIP_MAX_NEW_TOKENS` (`_expected`). Outputs from before a retraction count again: the reserve was too small.

        If tokens are missing behind them, the prompt was cut: `req.extend_input_len` becomes `given`,
        `new_chunked_req` is the request, and `trace_cut` writes it down. `bound_by`: the limit that cut it.
        """
        raise NotImplementedError

    def add_chunked_req(self, req: Req) -> AddReqResult:
        """Add the next piece of a request that was cut in an earlier step. It has a row and a lock already, and is not
        in `running`. `len(req.prefix_indices)` tokens of it have KV, `req.extend_input_len` are missing.

        The piece is as long as the step (`_cut`) and the memory allow. Of the memory it may use what is left in its
        last page, and `cur_rem_tokens` but for one page for each running request. Nothing is kept for its tokens to
        come: it was admitted with all of them, and has to end.

        NO_TOKEN, and nothing added: the memory has no room for one token. OTHER, and nothing added: only the step has
        none. OTHER: the prompt is cut again; by the limit "memory" if the memory allows fewer tokens than the step has
        room for and than are missing, otherwise by `self.bound_by`. Else what `budget_state()` returns.
        """
        raise NotImplementedError


def trace_cut(adder: MyPrefillAdder, req: Req, asked: int, given: int, bound_by: str) -> None:
    """Given: trace that of the `asked` missing tokens of a request only the first `given` run in this step."""
    start = len(req.prefix_indices)
    total = start + asked
    adder.tracer.emit(ChunkCut, rid=req.rid, asked=asked, given=given, start=start, bound_by=bound_by, total=total)
