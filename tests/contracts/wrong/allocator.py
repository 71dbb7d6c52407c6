"""Typical mistakes in an allocator, each with the hint that it must get."""

from typing import Any

import numpy as np

from m4_radix_cache.errors import PoolError
from m4_radix_cache.mem_cache.allocator import Slots, TokenToKVPoolAllocator


class HandsOutPage0(TokenToKVPoolAllocator):
    """Pages are counted from 0."""

    def clear(self) -> None:
        super().clear()
        self._ring -= 1


class TakesWhatThereIs(TokenToKVPoolAllocator):
    """Too few pages are taken, and None is returned."""

    def _take(self, num_pages: int) -> Slots | None:
        if num_pages > self._num_free:
            super()._take(self._num_free)
            return None
        return super()._take(num_pages)


class FreesEachSlot(TokenToKVPoolAllocator):
    """A page is freed once for each of its slots."""

    def available_size(self) -> int:
        return super().available_size() + self.more

    def clear(self) -> None:
        super().clear()
        self.more = 0

    def free(self, slots: Slots) -> None:
        super().free(slots)
        self.more += (len(slots) - len(np.unique(slots // self.page_size))) * self.page_size


class FreesWholePagesOnly(TokenToKVPoolAllocator):
    """A page is freed if its first slot is among the slots."""

    def free(self, slots: Slots) -> None:
        super().free(slots[slots % self.page_size == 0])


class AlwaysANewPage(TokenToKVPoolAllocator):
    """What a request has started is not filled."""

    def alloc_extend(self, prefix_lens: Slots, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        return super().alloc_extend(np.zeros_like(prefix_lens), seq_lens - prefix_lens, last_locs)


class GivesWholePages(TokenToKVPoolAllocator):
    """A prompt gets the slots of all of its pages."""

    def alloc_extend(self, prefix_lens: Slots, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        return super().alloc_extend(prefix_lens, -(-seq_lens // self.page_size) * self.page_size, last_locs)


class OneByOne(TokenToKVPoolAllocator):
    """The first requests of a batch that does not fit keep their pages."""

    def alloc_extend(self, prefix_lens: Slots, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        slots = []
        for number in range(len(seq_lens)):
            one = slice(number, number + 1)
            more = super().alloc_extend(prefix_lens[one], seq_lens[one], last_locs[one])
            if more is None:
                return None
            slots.append(more)
        return np.concatenate(slots)


class DecodesOneTooLate(TokenToKVPoolAllocator):
    """The new token is taken for number `seq_len`."""

    def alloc_decode(self, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        return super().alloc_decode(seq_lens + 1, last_locs)


class WritesIntoLastLocs(TokenToKVPoolAllocator):
    """The array of the caller is changed."""

    def alloc_decode(self, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        slots = super().alloc_decode(seq_lens, last_locs)
        if slots is not None:
            last_locs[:] = slots
        return slots


class CountsTokens(TokenToKVPoolAllocator):
    """New pages are counted as if no page was started."""

    def num_pages_for_extend(self, prefix_lens: Slots, seq_lens: Slots) -> int:
        return int((-(-(seq_lens - prefix_lens) // self.page_size)).sum())

    def alloc_extend(self, prefix_lens: Slots, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        self.num_pages_for_extend = super().num_pages_for_extend  # type: ignore[method-assign]
        try:
            return super().alloc_extend(prefix_lens, seq_lens, last_locs)
        finally:
            del self.num_pages_for_extend


class ChecksNothing(TokenToKVPoolAllocator):
    """A page that is free is freed again."""

    def _check(self, slots: Slots) -> None:
        pass

    def _put_back(self, pages: Slots) -> None:
        super()._put_back(pages[(pages > 0) & (pages <= self.num_pages)][: self.num_pages - self._num_free])


class ChecksWhileItFrees(TokenToKVPoolAllocator):
    """The slots before a wrong one are freed."""

    def free(self, slots: Any) -> None:
        done: set[int] = set()
        for slot in slots.tolist():
            if slot in done:
                raise PoolError(f"slot {slot} twice")
            if not {other // self.page_size for other in done} & {slot // self.page_size}:
                super().free(np.array([slot]))
            done.add(slot)


class OnlyPagesAreChecked(TokenToKVPoolAllocator):
    """The same slot twice is not noticed."""

    def _check(self, slots: Slots) -> None:
        super()._check(np.unique(slots))


class FreesFromTheEnd(TokenToKVPoolAllocator):
    """A negative slot is looked up from the end of the array of pages, so it frees the last one."""

    def _check(self, slots: Slots) -> None:
        super()._check(np.where(slots < 0, slots % ((self.num_pages + 1) * self.page_size), slots))


class ReturnsLists(TokenToKVPoolAllocator):
    """Slots are handed out as a list."""

    def alloc(self, num_tokens: int) -> Any:
        slots = super().alloc(num_tokens)
        return None if slots is None else slots.tolist()


class RefusesNoSlots(TokenToKVPoolAllocator):
    """A free of no slots is an error."""

    def free(self, slots: Slots) -> None:
        slots.min()
        super().free(slots)


WRONG = [
    (ChecksWhileItFrees, "Check all slots before you free"),
    (HandsOutPage0, "The pages are 1 to num_pages"),
    (TakesWhatThereIs, "Count before you take"),
    (FreesEachSlot, "it must not be free four times"),
    (FreesWholePagesOnly, "A page is freed with any of its slots"),
    (AlwaysANewPage, "after B1 come B2 and B3"),
    (GivesWholePages, "the rest of the second page stays for later tokens"),
    (OneByOne, "Count the pages of the whole batch"),
    (DecodesOneTooLate, "number 4 begins a page"),
    (WritesIntoLastLocs, "It is the caller's array"),
    (CountsTokens, "whose number is a multiple of the page size"),
    (ChecksNothing, "gives one page to two owners"),
    (OnlyPagesAreChecked, "gives one page to two owners"),
    (FreesFromTheEnd, "a negative index of an array counts from its end"),
    (ReturnsLists, "a list, not an int64 array"),
    (RefusesNoSlots, "zero-size array"),
]
