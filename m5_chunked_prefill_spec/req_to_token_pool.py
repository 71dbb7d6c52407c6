"""Rows of slots for requests that get several slots at once, and give back those of wrong drafts."""

import numpy as np
import numpy.typing as npt

from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool as SingleTokenPool
from m5_chunked_prefill_spec.forward_batch import ranges


class ReqToTokenPool(SingleTokenPool):
    """m4's pool, whose rows grow by several tokens and shrink again behind wrong drafts."""

    def append_runs(self, rows: npt.NDArray[np.int64], slots: Slots, counts: npt.NDArray[np.int64]) -> None:
        """Append `counts[i]` slots to `rows[i]`. `slots`: those of the first row, then those of the next one."""
        self.req_to_token[np.repeat(rows, counts), ranges(self.lens[rows], counts)] = slots
        self.lens[rows] += counts

    def truncate(self, row: int, num_tokens: int, *, page_size: int) -> Slots:
        """Shorten `row` to `num_tokens` tokens. Return the slots of the pages that are empty now."""
        end = int(self.lens[row])
        first_free = -(-num_tokens // page_size) * page_size
        slots = self.read(row, first_free, max(end, first_free))
        self.req_to_token[row, num_tokens:end] = 0
        self.lens[row] = num_tokens
        return slots
