"""Prefill adder with a second budget: the tokens of images that a step encodes.

m5's adder cuts a prompt where the token budget ends. Here a piece also ends before an image that would exceed the
encoder budget (`multimodal/encoder_budget.py`). vLLM: `Scheduler._try_schedule_encoder_inputs`; SGLang has no such
budget.
"""

from typing import Self

from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.prefill_adder import PrefillAdder as TextPrefillAdder
from m6_multimodal_pd.multimodal.encoder_budget import EncoderBudget


class PrefillAdder(TextPrefillAdder):
    """m5's adder; `_step_limit`, `_cut` and `_take_piece` also keep to the encoder budget."""

    encoder_budget: EncoderBudget | None = None
    """None for a model without vision."""

    def limit_encoding(self, encoder_budget: EncoderBudget) -> Self:
        """Keep to a budget for the images of this step; call it before the first request. Returns the adder."""
        self.encoder_budget = encoder_budget
        return self

    def _step_limit(self, req: Req) -> str | None:
        """Return the limit that keeps the tokens of a request out of this step; None if they fit."""
        limit = super()._step_limit(req)
        if self.is_chunked:
            return "encoder_budget" if limit is not None and self._is_limited(req) else limit
        whole = req.extend_input_len
        is_limited = bool(self.can_run_list) and self._limited(req, whole) < whole
        return "encoder_budget" if limit is None and is_limited else limit

    def _cut(self, req: Req, most: int) -> int:
        """Return how many of the next `most` tokens run in this step. Before an image a piece may end inside a page, if
        it is shorter than the alignment."""
        given = min(most, self.rem_input_tokens)
        limited = self._limited(req, given)
        if limited == given:
            return super()._cut(req, most)
        return limited // self.chunk_alignment * self.chunk_alignment or limited

    def _take_piece(self, req: Req, given: int, bound_by: str) -> None:
        """Add the first `given` tokens, and charge their images."""
        if bound_by != "memory" and self._is_limited(req):
            bound_by = "encoder_budget"
        if self.encoder_budget is not None:
            self.encoder_budget.take(req, req.num_known, given)
        super()._take_piece(req, given, bound_by)

    def _limited(self, req: Req, most: int) -> int:
        """Return how many of the next `most` tokens the encoder budget allows."""
        if self.encoder_budget is None or most <= 0:
            return most
        return self.encoder_budget.most(req, req.num_known, most)

    def _is_limited(self, req: Req) -> bool:
        """Return whether the encoder budget allows fewer tokens than the step has room for."""
        within_step = min(req.extend_input_len, self.rem_input_tokens)
        return self._limited(req, within_step) < within_step
