"""A batch on its way to the device, with prompts, pieces of prompts and decodes in one step.

m4's batch, with the number of tokens that each request may get (none for a piece that is not the last of its prompt,
one, or one more than its drafts), and with the drafts. SGLang: `ModelWorkerBatch` with its `spec_info`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from m4_radix_cache.model_worker_batch import ModelWorkerBatch as PlainModelWorkerBatch
from m5_chunked_prefill_spec.speculative.spec_info import SpecInput


@dataclass(eq=False, kw_only=True)
class ModelWorkerBatch(PlainModelWorkerBatch):
    """One step: prompts and pieces first, then decodes. Rows are in the order of the `ScheduleBatch`, not sorted."""

    new_lens: np.ndarray  # int64 [batch_size]: new tokens of each request, drafts included
    num_prompts: int
    """Number of requests that are prefilled: the first ones."""
    spec_info: SpecInput | None
    """The drafts of this step; None: there are none."""

    def with_drafts(self, drafts: Sequence[Sequence[int]]) -> "ModelWorkerBatch":
        """Return this step with `drafts`, by row, in place of the placeholders of the scheduler."""
        input_ids = self.input_ids.copy()  # the scheduler's batch has the same array
        for end, own in zip(np.cumsum(self.new_lens).tolist(), drafts, strict=True):
            input_ids[end - len(own) : end] = own
        return replace(self, input_ids=input_ids)
