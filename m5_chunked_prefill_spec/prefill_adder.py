"""Which of the waiting requests fit into a step, and how much of the last one.

m4's adder took prompts whole: one that was longer than what was left of the budget had to wait, and longer than the
whole budget it was refused. Here it is cut. The piece runs, the rest comes in the next steps, before anybody else; so
at most one request is in pieces at any time. Memory is counted as before: whoever is admitted must fit with its whole
prompt and what it may say. SGLang: `PrefillAdder.add_chunked_req` and the truncation in `add_one_req`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.prefill_adder import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder as WholePrefillAdder
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.events import ChunkCut


class PieceLimit(Protocol):
    """What else bounds the pieces of one step, besides their number of tokens: what m6's pictures cost."""

    name: str

    def most(self, req: Req, start: int, num_tokens: int) -> int:
        """How many of a request's next tokens, from `start` on, may run in this step. Changes nothing."""
        ...

    def take(self, req: Req, start: int, num_tokens: int) -> None:
        """So many of them run."""
        ...


class NoPieceLimit:
    """Nothing else does."""

    name = ""

    def most(self, req: Req, start: int, num_tokens: int) -> int:
        """All of them."""
        return num_tokens

    def take(self, req: Req, start: int, num_tokens: int) -> None:
        """Nobody counts."""


class PrefillAdder(WholePrefillAdder):
    """m4's, with a budget of tokens that cuts."""

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
        chunk_alignment: int = 1,
        is_chunked: bool = True,
        has_whole_step: bool = True,
        bound_by: str = "max_num_batched_tokens",
        new_piece_limit: Callable[[], PieceLimit] = NoPieceLimit,
        tracer: Tracer,
    ) -> None:
        """`rem_chunk_tokens`: a limit on prompt tokens besides that of the step, which is called `bound_by`.
        `chunk_alignment`: a piece that is not the last ends at a multiple of so many tokens. Without `is_chunked`
        nothing is cut. `has_whole_step`: nobody decodes in this step. `new_piece_limit`: makes what else bounds the
        pieces of this step.
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
        self.piece_limit = new_piece_limit()
        if rem_chunk_tokens is not None and rem_chunk_tokens < self.rem_input_tokens:
            self.rem_input_tokens, self.bound_by = rem_chunk_tokens, "chunked_prefill_size"
        self.new_chunked_req: Req | None = None
        """Whoever was cut in this step."""

    def add_chunked_req(self, req: Req) -> AddReqResult:
        """The next piece of a request that was cut before. It has its row and its lock; it is not among `running`, so
        what it may still say counts only with its last piece, as a newcomer's does.

        NO_TOKEN, and nothing is added: there is no page for it, because those who run need what is left.
        """
        rest = req.extend_input_len
        started = -len(req.prefix_indices) % self.page_size  # what is left of its last page
        kept = self.page_size * self._num_running
        room = max(self.cur_rem_tokens - kept, 0) // self.page_size * self.page_size + started
        given = self._cut(req, min(rest, room))
        if given < 1:
            return AddReqResult.NO_TOKEN if room < 1 else AddReqResult.OTHER
        self._take_piece(req, given, "memory" if given == room < min(rest, self.rem_input_tokens) else self.bound_by)
        return AddReqResult.OTHER if given < rest else self.budget_state()

    def _step_limit(self, req: Req) -> str | None:
        """What keeps all of its tokens out of this step; without chunks, what keeps one of them out.

        Where nobody decodes that is counted as in m4, and so whoever has grown past the budget can run alone there.
        """
        whole = req.extend_input_len
        if self.is_chunked:
            fits, is_limited = self._cut(req, whole) > 0, self._is_limited(req)
        else:
            in_step = super()._step_limit(req) is None if self.has_whole_step else whole <= self.rem_input_tokens
            is_limited = in_step and bool(self.can_run_list) and self._limited(req, whole) < whole
            fits = in_step and not is_limited
        return None if fits else self.piece_limit.name if is_limited else "max_num_batched_tokens"

    def _take(self, req: Req) -> AddReqResult:
        """As m4's, or as much of it as fits."""
        whole = req.extend_input_len
        given = self._cut(req, whole) if self.is_chunked else whole
        self._take_piece(req, given, self.bound_by)
        return AddReqResult.OTHER if given < whole else self.budget_state()

    def _cut(self, req: Req, most: int) -> int:
        """How many of its next `most` tokens this step takes; unless they are all that it lacks, they end at a multiple
        of the alignment, if that is not nothing for want of another limit."""
        given = min(most, self.rem_input_tokens)
        limited = self._limited(req, given)
        if limited == req.extend_input_len:
            return limited
        aligned = limited // self.chunk_alignment * self.chunk_alignment
        return limited if limited < given and not aligned else aligned

    def _limited(self, req: Req, most: int) -> int:
        """How many of its next `most` tokens `piece_limit` lets through."""
        return self.piece_limit.most(req, len(req.prefix_indices), most) if most > 0 else most

    def _is_limited(self, req: Req) -> bool:
        """Whether `piece_limit` lets fewer of its tokens through than the step has room for."""
        within_step = min(req.extend_input_len, self.rem_input_tokens)
        return self._limited(req, within_step) < within_step

    def _take_piece(self, req: Req, given: int, bound_by: str) -> None:
        """Add the first `given` of the tokens that it lacks."""
        start, asked = len(req.prefix_indices), req.extend_input_len
        if bound_by != "memory" and self._is_limited(req):
            bound_by = self.piece_limit.name
        self.piece_limit.take(req, start, given)
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
