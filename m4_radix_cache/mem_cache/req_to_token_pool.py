"""Slots of the tokens of each running request: one row of slot numbers per request.

m3 kept a block table per request, a list that grew. Here it is one matrix for all, so that a step reads the slots of 64
prefixes, or writes a new slot for each of 200 decodes, with one array operation and no loop over requests. A row holds
the place of the KV, not its owner: the slots at its start may belong to the prefix cache, the rest belong to the
request (see `base_prefix_cache.py`). SGLang: `ReqToTokenPool` in `mem_cache/memory_pool.py`.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from m1_single_request.errors import ConfigError
from m4_radix_cache.errors import PoolError
from m4_radix_cache.mem_cache.allocator import Slots

FIRST_ROWS = 64  # the arrays grow with the number of running requests


class ReqToTokenPool:
    """Up to `size` rows of `max_context_len` slots. A row belongs to one request from `alloc` to `free`."""

    def __init__(self, *, size: int, max_context_len: int) -> None:
        """Raises `ConfigError` unless there is room for at least one request of one token."""
        if size < 1 or max_context_len < 1:
            raise ConfigError(f"a pool of {size} rows of {max_context_len} tokens has no room; both must be at least 1")
        self.size = size
        self.max_context_len = max_context_len
        num_rows = min(size, FIRST_ROWS)
        self.req_to_token: npt.NDArray[np.int32] = np.zeros((num_rows, max_context_len), dtype=np.int32)
        """`[rows so far, max_context_len]`: the slot of each token; 0 without a token, because page 0 has no owner."""
        self.lens: npt.NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        """`[rows so far]`: number of tokens with a slot in each row, the `kv_allocated_len` of its request."""
        self.clear()

    def available_size(self) -> int:
        """Return the number of free rows."""
        return self.size - len(self._in_use) + len(self._free)

    @property
    def num_used(self) -> int:
        """Rows that requests hold."""
        return self.size - self.available_size()

    def alloc(self, need_size: int) -> list[int] | None:
        """Allocate rows, all entries 0, those that were freed first first. None, and no change, if fewer are free."""
        if need_size > self.available_size():
            return None
        if need_size > len(self._free):
            self._grow(need_size - len(self._free))
        rows = [self._free.popleft() for _ in range(need_size)]
        for row in rows:
            self._in_use[row] = 1
            self.req_to_token[row] = 0
            self.lens[row] = 0
        return rows

    def free(self, rows: int | Sequence[int]) -> None:
        """Free one row or several. Raises `PoolError`, changing nothing, for a row that is not in use."""
        given = [rows] if isinstance(rows, int | np.integer) else list(rows)
        for row in given:
            if not (0 <= row < len(self._in_use) and self._in_use[row]):
                raise PoolError(f"row {row} is not in use: it was freed already, or never handed out")
        if len(set(given)) < len(given):
            raise PoolError(f"a row is freed twice: {given}")
        for row in given:
            self._in_use[row] = 0
            self._free.append(row)

    def write(self, row: int, start: int, slots: Slots) -> None:
        """Set the slots of the tokens from index `start` on."""
        end = start + len(slots)
        self.req_to_token[row, start:end] = slots
        self.lens[row] = max(self.lens[row], end)

    def append(self, rows: npt.NDArray[np.int64], lens: npt.NDArray[np.int64], slots: Slots) -> None:
        """Append one token to each of `rows`, which have `lens` tokens, with these slots."""
        self.req_to_token[rows, lens] = slots
        self.lens[rows] = lens + 1

    def read(self, row: int, start: int, end: int) -> Slots:
        """Return the slots of the tokens `start` to `end - 1`: int64, a copy."""
        return self.req_to_token[row, start:end].astype(np.int64)

    def page_tables(self, rows: npt.NDArray[np.int64], num_tokens: int, page_size: int) -> npt.NDArray[np.int32]:
        """Return the pages of the first `num_tokens` tokens of each of `rows`, int32 `[len(rows), pages]`; 0: no page.

        These are the block tables of the kernels; a token's page follows from its slot.
        """
        return self.req_to_token[rows, :num_tokens:page_size] // page_size

    def clear(self) -> None:
        """Take all rows back."""
        self._free = deque(range(len(self.lens)))
        self._in_use = bytearray(len(self.lens))

    def _grow(self, missing: int) -> None:
        """Add at least `missing` rows."""
        before = len(self._in_use)
        num_rows = min(self.size, max(2 * before, before + missing))
        rows = np.zeros((num_rows, self.max_context_len), dtype=np.int32)
        rows[:before] = self.req_to_token[:before]
        self.req_to_token = rows
        self.lens = np.concatenate((self.lens, np.zeros(num_rows - before, dtype=np.int64)))
        self._in_use.extend(bytes(num_rows - before))
        self._free.extend(range(before, num_rows))
