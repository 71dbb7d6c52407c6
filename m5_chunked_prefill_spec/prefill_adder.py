"""Prefill adder that cuts: it admits the waiting requests that fit into a step, and a piece of the last one.

m4's adder took whole prompts: a prompt longer than the rest of the budget had to wait, and one longer than the budget
was rejected. Here it is cut. The rest of it runs in the next steps, before other prompts, so that at most one request
is in pieces at any time. Memory is counted as in m4: the whole prompt and the tokens to come must fit. A later piece
begins where the last one ended, perhaps inside a page, and then uses the rest of that page first. SGLang:
`PrefillAdder.add_chunked_req` and the truncation in `add_one_req`.
"""

from collections.abc import Sequence

from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.prefill_adder import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder as WholePrefillAdder
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.events import ChunkCut


class PrefillAdder(WholePrefillAdder):
    """m4's adder, whose token budget cuts prompts: `_step_limit` and `_take` may admit a piece."""

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
        """`rem_chunk_tokens`: a limit on prompt tokens besides that of the step, whose name is `bound_by`.
        `chunk_alignment`: a piece that is not the last ends at a multiple of it. `is_chunked`: prompts may be cut.
        `has_whole_step`: no request decodes in this step.
        """
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
        """The request that was cut in this step."""

    def add_chunked_req(self, req: Req) -> AddReqResult:
        """Add the next piece of a request that was cut before. It has a row and a lock, and is not in `running`: as for
        a new request, the tokens to come count with the last piece.

        NO_TOKEN: nothing is added, because the running requests need the pages that are left.
        """
        rest = req.extend_input_len
        started = -len(req.prefix_indices) % self.page_size  # slots left in its last page
        kept = self.page_size * len(self._running)
        room = max(self.cur_rem_tokens - kept, 0) // self.page_size * self.page_size + started
        given = self._cut(req, min(rest, room))
        if given < 1:
            return AddReqResult.NO_TOKEN if room < 1 else AddReqResult.OTHER
        self._take_piece(req, given, "memory" if given == room < min(rest, self.rem_input_tokens) else self.bound_by)
        return AddReqResult.OTHER if given < rest else self.budget_state()

    def _step_limit(self, req: Req) -> str | None:
        """Return the limit that keeps all tokens of a request out of this step; with chunks off, one of them.

        In a step without decodes it is m4's, so that a request that has grown longer than the budget can run alone.
        """
        if self.is_chunked:
            fits = self._cut(req, req.extend_input_len) > 0
        elif self.has_whole_step:
            return super()._step_limit(req)
        else:
            fits = req.extend_input_len <= self.rem_input_tokens
        return None if fits else "max_num_batched_tokens"

    def _take(self, req: Req) -> AddReqResult:
        """Count the tokens of a request, or the piece that fits, and the tokens to come."""
        whole = req.extend_input_len
        given = self._cut(req, whole) if self.is_chunked else whole
        self._take_piece(req, given, self.bound_by)
        return AddReqResult.OTHER if given < whole else self.budget_state()

    def _cut(self, req: Req, most: int) -> int:
        """Return how many of the next `most` tokens run in this step. They end at a multiple of the alignment, unless
        they are all that is missing."""
        given = min(most, self.rem_input_tokens)
        return given if given == req.extend_input_len else given // self.chunk_alignment * self.chunk_alignment

    def _take_piece(self, req: Req, given: int, bound_by: str) -> None:
        """Add the first `given` of the missing tokens. `bound_by`: the limit, if these are not all."""
        start, asked = len(req.prefix_indices), req.extend_input_len
        self._taken += self._ceil_page(start + given) - self._ceil_page(start)
        self.rem_input_tokens -= given
        self.can_run_list.append(req)
        if given == asked:
            self._expected += min(req.max_new_tokens, CLIP_MAX_NEW_TOKENS)
            return
        req.extend_input_len = given
        self.new_chunked_req = req
        total = start + asked
        self.tracer.emit(ChunkCut, rid=req.rid, asked=asked, given=given, start=start, bound_by=bound_by, total=total)
