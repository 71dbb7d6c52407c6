"""A batch on its way to the device, when a step does several things at once.

m4's, with what differs from request to request now: how many tokens it may get - none for a piece of a prompt that is
not the last, one, or one more than were guessed - and the guesses. SGLang: `ModelWorkerBatch` with its `spec_info`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from m4_radix_cache.model_worker_batch import ModelWorkerBatch as PlainModelWorkerBatch
from m5_chunked_prefill_spec.speculative.spec_info import SpecInput


@dataclass(frozen=True, kw_only=True)
class ModelWorkerBatch(PlainModelWorkerBatch):
    """One step: prompts and their pieces first, then whoever decodes. Rows are in the batch's order, not sorted."""

    new_lens: np.ndarray  # int64 [batch_size]: new tokens of each, guesses included
    num_prompts: int
    """The first so many requests are prefilled."""
    spec_info: SpecInput | None
    """The guesses of this step; None: there are none."""

    def with_drafts(self, drafts: Sequence[Sequence[int]]) -> "ModelWorkerBatch":
        """The same step with these guesses, by row, in the places of those that were unknown when it was decided."""
        input_ids = self.input_ids.copy()  # the scheduler's batch has the same array
        for end, own in zip(np.cumsum(self.new_lens).tolist(), drafts, strict=True):
            if own:
                input_ids[end - len(own) : end] = own
        return replace(self, input_ids=input_ids)
