"""Allocator of KV slots: numbers only, handed out and taken back in whole pages.

A slot is `page * page_size + offset`, the place of one token in m3's `KVStorage`, where a page is called a block. m3
counted the holders of each block. Here a page has one owner, a request or the prefix cache, and the cache does the
sharing; so nothing is counted, and every method works on arrays, without a loop over tokens or requests. Page 0 is
never handed out: padding is written there. SGLang: `mem_cache/allocator.py`, with a class of its own for pages of one
slot; vLLM: the free queue of `v1/core/block_pool.py`.
"""

import numpy as np
import numpy.typing as npt

from m1_single_request.errors import ConfigError
from m4_radix_cache.errors import PoolError

Slots = npt.NDArray[np.int64]
"""KV slots of tokens in their order, `[num_tokens]`; also used for lengths and page numbers."""


class TokenToKVPoolAllocator:
    """`size` slots in pages of `page_size`. Pages that were freed first are handed out first.

    An allocation that exceeds the free pages returns None and changes nothing: the caller evicts from the prefix cache,
    and then retracts a request. In `checked` mode a free of pages that are not in use raises `PoolError` and changes
    nothing; otherwise it is not noticed.
    """

    def __init__(self, *, size: int, page_size: int, checked: bool = False) -> None:
        """Raises `ConfigError` unless `size` is a positive number of whole pages."""
        if page_size < 1 or size < page_size or size % page_size:
            raise ConfigError(f"size={size} is no positive multiple of page_size={page_size}")
        self.size = size
        self.page_size = page_size
        self.num_pages = size // page_size
        self.checked = checked
        self._offsets = np.arange(page_size)
        self.clear()

    def clear(self) -> None:
        """Take all pages back."""
        self._ring: Slots = np.arange(1, self.num_pages + 1)  # the free pages are _num_free entries from _head on
        self._head = 0
        self._num_free = self.num_pages
        self._in_use = np.zeros(self.num_pages + 1, dtype=np.bool_)

    def available_size(self) -> int:
        """Return the number of free slots."""
        return self._num_free * self.page_size

    def owned_pages(self) -> Slots:
        """Return the pages that are in use, ascending."""
        return np.flatnonzero(self._in_use)

    # --- allocation ---------------------------------------------------------------------------------------------------

    def alloc(self, num_tokens: int) -> Slots | None:
        """Allocate whole new pages, `num_tokens` slots (a multiple of the page size)."""
        assert num_tokens % self.page_size == 0, f"{num_tokens} slots are no whole pages of {self.page_size}"
        pages = self._take(num_tokens // self.page_size)
        return None if pages is None else self._slots_of(pages).ravel()

    def alloc_extend(self, prefix_lens: Slots, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        """Allocate slots for the tokens `prefix_len` to `seq_len - 1` of each request, request after request.

        All arrays are `[batch_size]`. `last_locs` are the slots of the tokens `prefix_len - 1`: a page that a request
        has started is filled before it gets new ones. Where `prefix_len` is a whole number of pages they are not read.
        """
        new = self._take(self.num_pages_for_extend(prefix_lens, seq_lens))
        if new is None:
            return None
        if len(seq_lens) == 1:
            return self._slots_of_one(int(prefix_lens[0]), int(seq_lens[0]), int(last_locs[0]), new)
        # All pages that get tokens, request by request: a started one follows from last_loc, the others are new.
        # With pages of 4, prefix 6 and length 13:   | . . . . | . . 6 7 | 8 9 10 11 | 12 . . . |
        #                                              not touched  started    new        new
        size = self.page_size
        first = prefix_lens // size
        counts = np.where(seq_lens > prefix_lens, self._num_pages(seq_lens) - first, 0)
        ends = np.cumsum(counts)
        is_started = (prefix_lens % size > 0) & (counts > 0)
        at = (ends - counts)[is_started]
        pages = np.empty(int(counts.sum()), dtype=np.int64)
        is_new = np.ones(len(pages), dtype=np.bool_)
        is_new[at] = False
        pages[at] = last_locs[is_started] // size
        pages[is_new] = new
        # Of their slots, those whose position lies between prefix and length.
        page_numbers = np.arange(len(pages)) - np.repeat(ends - counts - first, counts)
        positions = page_numbers[:, None] * size + self._offsets  # [touched pages, page_size]
        wanted = (positions >= np.repeat(prefix_lens, counts)[:, None]) & (
            positions < np.repeat(seq_lens, counts)[:, None]
        )
        return self._slots_of(pages)[wanted]

    def _slots_of_one(self, prefix_len: int, seq_len: int, last_loc: int, new: Slots) -> Slots:
        """Return `alloc_extend` for one request, the most frequent case: rest of the started page, then new pages."""
        rest = last_loc + 1 + np.arange(-prefix_len % self.page_size)
        return np.concatenate((rest, self._slots_of(new).ravel()))[: seq_len - prefix_len]

    def alloc_decode(self, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        """Allocate the slot of token `seq_len - 1` of each request, `[batch_size]`; the one before is in `last_loc`."""
        starts_page = (seq_lens - 1) % self.page_size == 0
        slots, num_pages = last_locs + 1, int(np.count_nonzero(starts_page))
        if not num_pages:  # as in most steps
            return slots
        new = self._take(num_pages)
        if new is None:
            return None
        slots[starts_page] = new * self.page_size
        return slots

    def num_pages_for_extend(self, prefix_lens: Slots, seq_lens: Slots) -> int:
        """Return the number of new pages that `alloc_extend` takes."""
        return int((self._num_pages(seq_lens) - self._num_pages(prefix_lens)).sum())

    def num_pages_for_decode(self, seq_lens: Slots) -> int:
        """Return the number of new pages that `alloc_decode` takes."""
        return int(np.count_nonzero((seq_lens - 1) % self.page_size == 0))

    def _num_pages(self, num_tokens: Slots) -> Slots:
        """Return the number of pages for each number of tokens; the last page may be filled in part."""
        return -(-num_tokens // self.page_size)

    def _slots_of(self, pages: Slots) -> Slots:
        """Return the slots of pages, `[num_pages, page_size]`."""
        return pages[:, None] * self.page_size + self._offsets

    def _take(self, num_pages: int) -> Slots | None:
        """Take the `num_pages` pages at the head of the ring."""
        if num_pages > self._num_free:
            return None
        pages = self._ring.take(self._head + np.arange(num_pages), mode="wrap")
        self._head = (self._head + num_pages) % self.num_pages
        self._num_free -= num_pages
        self._in_use[pages] = True
        return pages

    # --- free ---------------------------------------------------------------------------------------------------------

    def free(self, slots: Slots) -> None:
        """Free every page that contains one of these slots. No other slot of such a page may have an owner."""
        if not len(slots):
            return
        if self.checked:
            self._check(slots)
        pages = _without_repeats(slots // self.page_size)  # in most cases that is all, and few are left to sort
        pages.sort()
        self._put_back(_without_repeats(pages))

    def _put_back(self, pages: Slots) -> None:
        """Append pages to the ring."""
        count = len(pages)
        assert self._num_free + count <= self.num_pages, "more pages are free than there are: some were freed twice"
        self._ring.put(self._head + self._num_free + np.arange(count), pages, mode="wrap")
        self._num_free += count
        self._in_use[pages] = False

    def _check(self, slots: Slots) -> None:
        """Raise `PoolError` for slots of a page that is not in use, and for a slot that is in the array twice."""
        pages = slots // self.page_size
        if pages.min() < 1 or pages.max() > self.num_pages:
            wrong = slots[(pages < 1) | (pages > self.num_pages)][0]
            in_page_0 = 0 <= wrong < self.page_size
            raise PoolError(f"slot {wrong} {'lies in page 0, which has no owner' if in_page_0 else 'does not exist'}")
        if not self._in_use[pages].all():
            wrong = pages[~self._in_use[pages]][0]
            raise PoolError(f"page {wrong} is not in use: it was freed already, or never handed out")
        together, counts = np.unique(slots, return_counts=True)
        if len(together) < len(slots):
            raise PoolError(f"slot {together[counts > 1][0]} is freed twice at once")


def _without_repeats(values: Slots) -> Slots:
    """Return a copy without the values that equal the one before them."""
    is_first = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return values[is_first]
