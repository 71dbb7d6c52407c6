"""Which KV slots are free: numbers only, handed out and taken back in whole pages.

A slot is `page * page_size + offset`, one token's place in m3's `KVStorage`, where a page was called a block. m3
counted the holders of each block. Here a page has one owner, a request or the prefix cache, and sharing is the cache's
matter; so there is nothing to count, and every verb works on arrays: no loop over tokens, none over requests. Page 0 is
never handed out: padding is written there. SGLang: `mem_cache/allocator.py`; vLLM: the free queue of
`v1/core/block_pool.py`.
"""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from m1_single_request.errors import ConfigError
from m4_radix_cache.errors import PoolError

Slots = npt.NDArray[np.int64]
"""KV slots of tokens in their order, `[num_tokens]`; also used for lengths and page numbers."""


class BaseTokenToKVPoolAllocator(ABC):
    """`size` slots in pages of `page_size`. What was freed first is handed out first.

    Whoever asks for more than there is gets None, and nothing changes: the caller evicts from the prefix cache, and
    then retracts a request. In `checked` mode a free of what is not in use raises `PoolError`, and changes nothing;
    otherwise it is not noticed.
    """

    def __init__(self, *, size: int, page_size: int, checked: bool = False) -> None:
        """Raises `ConfigError` unless `size` is a positive number of whole pages."""
        if page_size < 1 or size < page_size or size % page_size:
            raise ConfigError(f"size={size} is no positive multiple of page_size={page_size}")
        self.size = size
        self.page_size = page_size
        self.num_pages = size // page_size
        self.checked = checked
        self.clear()

    def clear(self) -> None:
        """Take all pages back; a group of frees that was begun is forgotten."""
        self._ring: Slots = np.arange(1, self.num_pages + 1)  # free ones: _num_free entries from _head on
        self._head = 0
        self._num_free = self.num_pages
        self._in_use = np.zeros(self.num_pages + 1, dtype=np.bool_)
        self._group: list[Slots] = []
        self._group_depth = 0

    def available_size(self) -> int:
        """Free slots. What a group of frees has gathered counts when the group ends."""
        return self._num_free * self.page_size

    def owned_pages(self) -> Slots:
        """The pages that are in use, ascending."""
        return np.flatnonzero(self._in_use)

    # --- handing out --------------------------------------------------------------------------------------------------

    @abstractmethod
    def alloc(self, num_tokens: int) -> Slots | None:
        """Whole new pages, `num_tokens` slots (a multiple of the page size)."""

    @abstractmethod
    def alloc_extend(self, prefix_lens: Slots, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        """Slots for the tokens `prefix_len` to `seq_len - 1` of each request, one request behind the other.

        All arrays are `[batch_size]`. `last_locs` are the slots of the tokens `prefix_len - 1`: a page that a request
        has started is filled before it gets new ones. Where `prefix_len` is a whole number of pages it does not matter.
        """

    @abstractmethod
    def alloc_decode(self, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        """One slot each, `[batch_size]`, for the token `seq_len - 1`, whose predecessor lies in `last_loc`."""

    def num_pages_for_extend(self, prefix_lens: Slots, seq_lens: Slots) -> int:
        """New pages that `alloc_extend` would take."""
        return int((self._num_pages(seq_lens) - self._num_pages(prefix_lens)).sum())

    def num_pages_for_decode(self, seq_lens: Slots) -> int:
        """New pages that `alloc_decode` would take."""
        return int(np.count_nonzero((seq_lens - 1) % self.page_size == 0))

    def _num_pages(self, num_tokens: Slots) -> Slots:
        """Pages that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.page_size)

    def _take(self, num_pages: int) -> Slots | None:
        """The `num_pages` pages at the head of the ring."""
        if num_pages > self._num_free:
            return None
        end = self._head + num_pages
        if end <= self.num_pages:
            pages = self._ring[self._head : end].copy()
        else:
            pages = np.concatenate((self._ring[self._head :], self._ring[: end - self.num_pages]))
        self._head = end % self.num_pages
        self._num_free -= num_pages
        self._in_use[pages] = True
        return pages

    # --- taking back --------------------------------------------------------------------------------------------------

    def free(self, slots: Slots) -> None:
        """Free every page that one of these slots lies in. Never give part of a page of which somebody owns the rest.

        Inside a group this takes effect when the group ends; the slots must not be written to until then.
        """
        if not len(slots):
            return
        if self.checked:
            self._check(slots)
        if self._group_depth:
            self._group.append(slots)
        else:
            self._put_back(self._pages_of(slots))

    def free_group_begin(self) -> None:
        """From now on frees are only gathered. Two of them may name different slots of one page. Groups may nest."""
        self._group_depth += 1

    def free_group_end(self) -> None:
        """Free what was gathered, if no outer group is open."""
        assert self._group_depth, "no group was begun"
        self._group_depth -= 1
        if self._group and not self._group_depth:
            gathered, self._group = np.concatenate(self._group), []
            self._put_back(self._pages_of(gathered))

    @abstractmethod
    def _pages_of(self, slots: Slots) -> Slots:
        """The pages that these slots lie in, each once."""

    def _put_back(self, pages: Slots) -> None:
        """Append pages to the ring."""
        count = len(pages)
        assert self._num_free + count <= self.num_pages, "more pages are free than there are: some were freed twice"
        start = (self._head + self._num_free) % self.num_pages
        fit = self.num_pages - start
        self._ring[start : start + count] = pages[:fit]
        if count > fit:
            self._ring[: count - fit] = pages[fit:]
        self._num_free += count
        self._in_use[pages] = False

    def _check(self, slots: Slots) -> None:
        pages = slots // self.page_size
        if pages.min() < 1 or pages.max() > self.num_pages:
            wrong = slots[(pages < 1) | (pages > self.num_pages)][0]
            in_page_0 = 0 <= wrong < self.page_size
            raise PoolError(f"slot {wrong} {'lies in page 0, which nobody owns' if in_page_0 else 'does not exist'}")
        if not self._in_use[pages].all():
            wrong = pages[~self._in_use[pages]][0]
            raise PoolError(f"page {wrong} is not in use: it was freed already, or never handed out")
        together, counts = np.unique(np.concatenate([*self._group, slots]), return_counts=True)
        if len(together) < counts.sum():
            raise PoolError(f"slot {together[counts > 1][0]} is freed twice at once")


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Pages of one slot: every free slot is as good as any other."""

    def __init__(self, *, size: int, checked: bool = False) -> None:
        super().__init__(size=size, page_size=1, checked=checked)

    def alloc(self, num_tokens: int) -> Slots | None:
        return self._take(num_tokens)

    def alloc_extend(self, prefix_lens: Slots, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        return self._take(int((seq_lens - prefix_lens).sum()))

    def alloc_decode(self, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        return self._take(len(seq_lens))

    def _pages_of(self, slots: Slots) -> Slots:
        return slots


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Pages of several slots: a request fills the page that it has started before it gets another."""

    def __init__(self, *, size: int, page_size: int, checked: bool = False) -> None:
        super().__init__(size=size, page_size=page_size, checked=checked)
        self._offsets = np.arange(page_size)

    def alloc(self, num_tokens: int) -> Slots | None:
        assert num_tokens % self.page_size == 0, f"{num_tokens} slots are no whole pages of {self.page_size}"
        pages = self._take(num_tokens // self.page_size)
        return None if pages is None else self._slots_of(pages).ravel()

    def alloc_extend(self, prefix_lens: Slots, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        new = self._take(self.num_pages_for_extend(prefix_lens, seq_lens))
        if new is None:
            return None
        if len(seq_lens) == 1:
            return self._slots_of_one(int(prefix_lens[0]), int(seq_lens[0]), int(last_locs[0]), new)
        # All pages that get tokens, request by request: a started one is known from last_loc, the others are new.
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
        """`alloc_extend` for one request, as prompts often come: the rest of the started page, then the new ones."""
        rest = last_loc + 1 + np.arange(-prefix_len % self.page_size)
        return np.concatenate((rest, self._slots_of(new).ravel()))[: seq_len - prefix_len]

    def alloc_decode(self, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        starts_page = (seq_lens - 1) % self.page_size == 0
        new = self._take(int(np.count_nonzero(starts_page)))
        if new is None:
            return None
        slots = last_locs + 1
        slots[starts_page] = new * self.page_size
        return slots

    def _slots_of(self, pages: Slots) -> Slots:
        """`[num_pages, page_size]`."""
        return pages[:, None] * self.page_size + self._offsets

    def _pages_of(self, slots: Slots) -> Slots:
        pages = _without_repeats(slots // self.page_size)  # mostly that is all, and few are left to sort
        pages.sort()
        return _without_repeats(pages)


def _without_repeats(values: Slots) -> Slots:
    """A copy in which no value follows its like."""
    is_first = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return values[is_first]


def make_allocator(*, size: int, page_size: int, checked: bool = False) -> BaseTokenToKVPoolAllocator:
    """The allocator that fits the page size."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size=size, checked=checked)
    return PagedTokenToKVPoolAllocator(size=size, page_size=page_size, checked=checked)
