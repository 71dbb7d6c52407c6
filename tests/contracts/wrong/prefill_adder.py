"""Typical mistakes in a prefill adder that cuts prompts, each with the hint that it must get."""

from m4_radix_cache.prefill_adder import AddReqResult
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.prefill_adder import PrefillAdder


class CountsThePromptOnly(PrefillAdder):
    """The answer needs no memory."""

    def _need(self, req: Req) -> int:
        return req.extend_input_len


class FillsTheMemory(PrefillAdder):
    """A request may need all that is left, and the next decode finds no slot."""

    def _lacks_memory(self, req: Req) -> bool:
        return self._need(req) > self.rem_total_tokens and super()._lacks_memory(req)


class WaitsForEver(PrefillAdder):
    """A request before its last token must leave room for more."""

    def _lacks_memory(self, req: Req) -> bool:
        return self._need(req) >= self.rem_total_tokens


class TestsOnce(PrefillAdder):
    """The memory is tested before the lock only."""

    def add_one_req(self, req: Req) -> AddReqResult:
        if len(self.can_run_list) >= self.max_new_reqs:
            return self._refuse(req, "max_num_seqs")
        if self._lacks_memory(req):
            return self._refuse(req, "memory")
        if (limit := self._step_limit(req)) is not None:
            return self._refuse(req, limit)
        self.tree_cache.inc_lock_ref(req.last_node, req.rid)
        return self._admit(req)


class KeepsTheLock(PrefillAdder):
    """A request that is refused stays locked."""

    def add_one_req(self, req: Req) -> AddReqResult:
        self.tree_cache.inc_lock_ref(req.last_node, req.rid)
        result = super().add_one_req(req)
        if req in self.can_run_list:
            self.tree_cache.dec_lock_ref(req.last_node, req.rid)
        return result


class CountsPagesOfTheStep(PrefillAdder):
    """The step loses whole pages, as in m4."""

    def _take_piece(self, req: Req, given: int, bound_by: str) -> None:
        super()._take_piece(req, given, bound_by)
        self.rem_input_tokens -= self._ceil_page(given) - given


class ReservesWithEachPiece(PrefillAdder):
    """The answer is reserved with the first piece, and again with the next one."""

    def _take_piece(self, req: Req, given: int, bound_by: str) -> None:
        is_cut = given < req.extend_input_len
        super()._take_piece(req, given, bound_by)
        self._expected += req.max_new_tokens * is_cut


class TakesPagesOfThePiece(PrefillAdder):
    """The pages of a piece are counted as if it began with a page."""

    def _take_piece(self, req: Req, given: int, bound_by: str) -> None:
        start = len(req.prefix_indices)
        super()._take_piece(req, given, bound_by)
        self._taken += self._ceil_page(given) - (self._ceil_page(start + given) - self._ceil_page(start))


class RoundsEveryPiece(PrefillAdder):
    """The last piece ends at a multiple of the alignment, too."""

    def _cut(self, req: Req, most: int) -> int:
        return min(most, self.rem_input_tokens) // self.chunk_alignment * self.chunk_alignment


class GoesOnAfterACut(PrefillAdder):
    """After a cut other requests are tried, as long as the memory lasts."""

    def _take(self, req: Req) -> AddReqResult:
        result = super()._take(req)
        return AddReqResult.CONTINUE if self.new_chunked_req is req else result


class NextPiece(PrefillAdder):
    """`room` is what the memory has for the next piece."""

    def room(self, started: int, free: int) -> int:
        return max(free, 0) + started

    def add_chunked_req(self, req: Req) -> AddReqResult:
        rest = req.extend_input_len
        free = self.cur_rem_tokens - self.page_size * len(self._running)
        room = self.room(-len(req.prefix_indices) % self.page_size, free)
        given = self._cut(req, min(rest, room))
        if given < 1:
            return AddReqResult.NO_TOKEN if room < 1 else AddReqResult.OTHER
        self._take_piece(req, given, "memory" if given == room < min(rest, self.rem_input_tokens) else self.bound_by)
        return AddReqResult.OTHER if given < rest else self.budget_state()


class TakesTheLastPages(NextPiece):
    """The next piece takes the pages that the running requests need for their next tokens."""

    def room(self, started: int, free: int) -> int:
        return self.cur_rem_tokens + started


class ForgetsItsOwnPage(NextPiece):
    """What is left in the page of the last piece is not used."""

    def room(self, started: int, free: int) -> int:
        return max(free, 0)


class OwesPages(NextPiece):
    """Pages that the running requests lack are subtracted from its own slots."""

    def room(self, started: int, free: int) -> int:
        return max(free + started, 0)


WRONG = [
    (CountsThePromptOnly, "The need, self._need(req), is less than rem_total_tokens"),
    (FillsTheMemory, "is less than rem_total_tokens, or there is no room"),
    (WaitsForEver, "it needs its pages and nothing more"),
    (TestsOnce, "Test the memory again when its prefix is locked"),
    (KeepsTheLock, "A refused request has no lock"),
    (CountsPagesOfTheStep, "the step has lost 9 tokens, not pages"),
    (ReservesWithEachPiece, "Until the last piece only a page"),
    (TakesPagesOfThePiece, "two slots are left there"),
    (RoundsEveryPiece, "only if tokens of the prompt are missing behind the piece"),
    (GoesOnAfterACut, "The second prompt gets the 12 tokens that the first one leaves"),
    (TakesTheLastPages, "less a page for each running request"),
    (ForgetsItsOwnPage, "what is left in the page where it begins"),
    (OwesPages, "the slots in its own last page are still its own"),
]
