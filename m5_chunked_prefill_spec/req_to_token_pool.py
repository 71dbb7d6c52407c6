"""m4's rows of slots, for requests that get several slots at once and give some of them back."""

import numpy as np
import numpy.typing as npt

from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool as SingleTokenPool
from m5_chunked_prefill_spec.forward_batch import ranges


class ReqToTokenPool(SingleTokenPool):
    """Rows that grow by a run of tokens and shrink again where guesses were wrong."""

    def append_runs(self, rows: npt.NDArray[np.int64], slots: Slots, counts: npt.NDArray[np.int64]) -> None:
        """`counts[i]` tokens more for `rows[i]`; `slots` are those of the first row, then those of the next one."""
        self.req_to_token[np.repeat(rows, counts), ranges(self.lens[rows], counts)] = slots
        self.lens[rows] += counts

    def truncate(self, row: int, num_tokens: int, *, page_size: int) -> Slots:
        """Forget all tokens of `row` from number `num_tokens` on. Returns the slots of the pages that are empty now."""
        end = int(self.lens[row])
        first_free = -(-num_tokens // page_size) * page_size
        slots = self.read(row, first_free, max(end, first_free))
        self.req_to_token[row, num_tokens:end] = 0
        self.lens[row] = num_tokens
        return slots
