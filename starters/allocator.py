"""Build the allocator of m4: it hands out the KV slots of tokens, and takes them back in whole pages.

A slot is `page * page_size + offset`. A page has one owner, a request or the prefix cache, so nothing is counted. But a
request grows by any number of tokens: a page that it has started is filled before it gets a new one, for a whole batch
at once. It is hard because it must never be wrong: a page that is handed out or freed twice belongs to two requests,
and their answers mix without any error. So every free is checked, and an operation that cannot be done changes nothing.

Explained in docs/m4_radix_cache.md#the-pools-rows-and-slots.

    cp starters/allocator.py my_allocator.py
    pytest --part allocator=my_allocator.py:MyAllocator
"""

import numpy as np  # noqa: F401 - for you

from m1_single_request.errors import ConfigError
from m4_radix_cache.errors import PoolError  # noqa: F401 - for you
from m4_radix_cache.mem_cache.allocator import Slots


class MyAllocator:
    """`size` slots in pages of `page_size`.

    Pages have the numbers 1 to `num_pages`; page `p` has the slots `p * page_size` to `(p + 1) * page_size - 1`. Page 0
    is never handed out: padding is written there. Which of the free pages is handed out is your choice.

    `Slots` are int64 arrays `[number]`, never lists. If too few pages are free for an allocation, it returns None and
    changes nothing.
    """

    def __init__(self, *, size: int, page_size: int, checked: bool = False) -> None:
        """Given. `checked`: whether `free` must notice its errors; you may always check."""
        if page_size < 1 or size < page_size or size % page_size:
            raise ConfigError(f"size={size} is no positive multiple of page_size={page_size}")
        self.size = size
        self.page_size = page_size
        self.num_pages = size // page_size
        self.checked = checked
        self.clear()

    def clear(self) -> None:
        """Take all pages back: all of them are free. It is called at the start, too."""
        raise NotImplementedError

    def available_size(self) -> int:
        """Return the number of free slots: those of free pages."""
        raise NotImplementedError

    def owned_pages(self) -> Slots:
        """Return the pages that are in use, ascending, int64."""
        raise NotImplementedError

    def alloc(self, num_tokens: int) -> Slots | None:
        """Allocate whole pages: `num_tokens` slots, a multiple of the page size, page after page, each in order."""
        raise NotImplementedError

    def alloc_extend(self, prefix_lens: Slots, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        """Allocate slots for the tokens `prefix_len` to `seq_len - 1` of each request, request after request.

        The arguments are `[batch_size]`. Token `i` of a request lies at offset `i % page_size` of its page. `last_locs`
        has the slot of token `prefix_len - 1` of each: if `prefix_len` is no whole number of pages, the tokens go on
        behind it in the same page, and then in new pages. Otherwise `last_locs` has any value, and a new page begins. A
        request whose `seq_len` equals its `prefix_len` gets no slot. None is returned for the batch as a whole.
        """
        raise NotImplementedError

    def alloc_decode(self, seq_lens: Slots, last_locs: Slots) -> Slots | None:
        """Allocate the slot of one token for each request, that of token `seq_len - 1`: `[batch_size]`.

        `last_locs` has the slot of the token before it, and is not changed. A new page begins if `seq_len - 1` is a
        whole number of pages.
        """
        raise NotImplementedError

    def num_pages_for_extend(self, prefix_lens: Slots, seq_lens: Slots) -> int:
        """Return the number of new pages that `alloc_extend` takes: of all requests together."""
        raise NotImplementedError

    def num_pages_for_decode(self, seq_lens: Slots) -> int:
        """Return the number of new pages that `alloc_decode` takes."""
        raise NotImplementedError

    def free(self, slots: Slots) -> None:
        """Free every page that contains one of these slots; they may be some of the slots of a page, or all.
        An empty array is allowed, and frees nothing.

        Raise `PoolError`, and change nothing, if one of the slots does not exist (a negative one, or one behind the
        last page), lies in page 0 or in a page that is not in use, or is in the array twice.
        """
        raise NotImplementedError
