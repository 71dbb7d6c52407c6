"""Contract of the allocator of m4: slots of tokens, in whole pages.

Which page is handed out is the allocator's choice. So a slot is written as the letter of its page, in the order in
which a test meets them, and its offset: `A0 A1 B0`.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from m4_radix_cache.errors import PoolError
from tests.contracts.part import Broken, Part, same

PART = Part(
    name="allocator",
    target="m4_radix_cache.mem_cache.allocator:TokenToKVPoolAllocator",
    role="token_to_kv_pool_allocator",
    lesson="docs/m4_radix_cache.md#the-pools-rows-and-slots",
    starter="MyAllocator",
    variant="m4_radix_cache-evicting",
    changes={"cache_config": {"debug": True}},
)

PAGE = 4


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


class Pool:
    """An allocator of pages of 4 slots, whose pages get letters."""

    def __init__(self, part: Any, num_pages: int = 8, page_size: int = PAGE) -> None:
        self.allocator = part(size=num_pages * page_size, page_size=page_size, checked=True)
        self.page_size, self.num_pages = page_size, num_pages
        self.letters: dict[int, str] = {}

    def named(self, slots: Any) -> Any:
        """The slots as letters and offsets; None as it is, and of anything else what it is."""
        if slots is None:
            return None
        if not isinstance(slots, np.ndarray):
            return f"a {type(slots).__name__}, not an int64 array"
        if slots.dtype != np.int64 or slots.ndim != 1:
            return f"an array {slots.dtype} {list(slots.shape)}"
        return " ".join(self.name_of(slot) for slot in slots.tolist())

    def name_of(self, slot: int) -> str:
        page, offset = divmod(slot, self.page_size)
        if page == 0:
            return f"slot {slot} of page 0, which has no owner"
        if not 1 <= page <= self.num_pages:
            return f"slot {slot}, which does not exist"
        return f"{self.letters.setdefault(page, chr(ord('A') + len(self.letters)))}{offset}"

    def state(self) -> dict[str, Any]:
        """What others see of it."""
        return {"available_size": self.allocator.available_size(), "owned_pages": len(self.allocator.owned_pages())}


def state(free_slots: int, owned_pages: int) -> dict[str, Any]:
    return {"available_size": free_slots, "owned_pages": owned_pages}


# --- whole pages ------------------------------------------------------------------------------------------------------


def test_at_first_every_page_is_free(part: Any) -> None:
    """A new allocator has `size` free slots, and no page is in use."""
    allocator = part(size=32, page_size=4, checked=True)
    same(allocator.available_size(), 32, on="size=32, page_size=4: available_size()", hint="It is a number of slots.")
    same(allocator.owned_pages(), ints(), on="size=32, page_size=4: owned_pages()", hint="An empty int64 array.")


def test_whole_pages_are_handed_out(part: Any) -> None:
    """`alloc` returns all slots of pages that were free, page after page; page 0 is never among them."""
    pool = Pool(part)
    hint = "The slots of page p are p * page_size + 0, 1, ... The pages are 1 to num_pages. The array is int64."
    on = "page_size=4; "
    same(pool.named(pool.allocator.alloc(8)), "A0 A1 A2 A3 B0 B1 B2 B3", on=f"{on}alloc(8)", hint=hint)
    hint = "A page that is in use is not handed out again."
    same(pool.named(pool.allocator.alloc(4)), "C0 C1 C2 C3", on=f"{on}alloc(8), alloc(4): the second", hint=hint)
    same(pool.state(), state(20, 3), on="size=32, page_size=4; alloc(8), alloc(4)", hint="3 of 8 pages are in use.")
    pages = pool.allocator.owned_pages()
    same(pages, ints(*sorted(pool.letters)), on="alloc(8), alloc(4); owned_pages()", hint="Ascending, int64.")
    same(pool.named(pool.allocator.alloc(0)), "", on=f"{on}alloc(0)", hint="No slots are an empty int64 array.")
    pool.named(pool.allocator.alloc(20))
    on = "size=32, page_size=4; alloc(8), alloc(4), alloc(20): the pages"
    same(sorted(pool.letters), list(range(1, 9)), on=on, hint="All pages from 1 to num_pages can be in use.")


def test_too_few_pages_change_nothing(part: Any) -> None:
    """If too few pages are free, `alloc` returns None, and the next smaller request is served."""
    pool = Pool(part, num_pages=3)
    pool.named(pool.allocator.alloc(4))
    on = "size=12, page_size=4; alloc(4), alloc(12)"
    same(pool.allocator.alloc(12), None, on=f"{on}: the second", hint="2 pages are free, and 3 are needed.")
    hint = "Count before you take: a request that cannot be served takes no page."
    same(pool.state(), state(8, 1), on=on, hint=hint)
    same(pool.named(pool.allocator.alloc(8)), "B0 B1 B2 B3 C0 C1 C2 C3", on=f"{on}, alloc(8): the third", hint=hint)
    same(pool.allocator.alloc(4), None, on=f"{on}, alloc(8), alloc(4): the fourth", hint="No page is free.")


def test_a_page_that_was_freed_can_be_handed_out(part: Any) -> None:
    """`free` takes pages back, each once, whether it gets all of their slots or one."""
    pool = Pool(part, num_pages=3)
    slots = pool.allocator.alloc(12)
    on = "size=12, page_size=4; alloc(12): A0 to C3; "
    pool.allocator.free(slots[:4])
    hint = "Four slots of a page are one page: it must not be free four times."
    same(pool.state(), state(4, 2), on=f"{on}free A0 A1 A2 A3", hint=hint)
    pool.allocator.free(slots[[9, 4, 5]])
    hint = "A page is freed with any of its slots, in any order."
    same(pool.state(), state(12, 0), on=f"{on}free A0 A1 A2 A3, then C1 B0 B1", hint=hint)
    pool.allocator.free(ints())
    same(pool.state(), state(12, 0), on=f"{on}free all, then free no slots", hint="No slots are no page.")
    again = pool.allocator.alloc(12)
    hint = "Each free page is handed out once."
    same(sorted(again.tolist()), sorted(slots.tolist()), on=f"{on}free all, alloc(12): the slots, sorted", hint=hint)


def test_clear_takes_all_pages_back(part: Any) -> None:
    """After `clear` the allocator is as new."""
    pool = Pool(part)
    slots = pool.allocator.alloc(12)
    pool.allocator.free(slots[:4])
    pool.allocator.clear()
    on = "size=32, page_size=4; alloc(12), free one page, clear()"
    same(pool.state(), state(32, 0), on=on)
    same(len(set((pool.allocator.alloc(32) // PAGE).tolist())), 8, on=f"{on}, alloc(32): the number of pages")


# --- extend and decode ------------------------------------------------------------------------------------------------


def test_a_prompt_begins_a_page(part: Any) -> None:
    """`alloc_extend` of a request without a prefix returns as many slots as it has tokens, from a new page on."""
    pool = Pool(part)
    slots = pool.allocator.alloc_extend(ints(0), ints(6), ints(-1))
    on = "page_size=4; alloc_extend(prefix_lens=[0], seq_lens=[6], last_locs=[-1])"
    hint = "Six tokens need two pages, and get six slots: the rest of the second page stays for later tokens."
    same(pool.named(slots), "A0 A1 A2 A3 B0 B1", on=on, hint=hint)
    same(pool.state(), state(24, 2), on=on, hint="A page that is used in part is in use.")


def test_a_started_page_is_filled_first(part: Any) -> None:
    """`alloc_extend` goes on behind the last token in its page, and takes new pages only for what is left."""
    pool = Pool(part)
    first = pool.allocator.alloc_extend(ints(0), ints(6), ints(-1))
    pool.named(first)
    on = "page_size=4; the first 6 tokens of a request have A0 to B1; "
    hint = "Token i lies at offset i % page_size: after B1 come B2 and B3, and then a new page."
    slots = pool.allocator.alloc_extend(ints(6), ints(7), first[-1:])
    same(pool.named(slots), "B2", on=f"{on}alloc_extend([6], [7], [B1])", hint=hint)
    slots = pool.allocator.alloc_extend(ints(7), ints(13), slots[-1:])
    same(pool.named(slots), "B3 C0 C1 C2 C3 D0", on=f"{on}alloc_extend([7], [13], [B2]) after it", hint=hint)
    slots = pool.allocator.alloc_extend(ints(8), ints(10), ints(99))
    hint = "8 tokens are two whole pages: nothing is started, and last_locs is not read."
    same(pool.named(slots), "E0 E1", on=f"{on}alloc_extend([8], [10], [99]) of another request", hint=hint)
    slots = pool.allocator.alloc_extend(ints(6), ints(6), first[-1:])
    same(pool.named(slots), "", on=f"{on}alloc_extend([6], [6], [B1])", hint="No new tokens, no slots.")
    same(pool.state(), state(12, 5), on=f"{on}the state after these", hint="A started page is not taken once more.")


def test_a_batch_is_extended_request_after_request(part: Any) -> None:
    """`alloc_extend` of several requests returns their slots one request after the other, and no page twice."""
    pool = Pool(part)
    first = pool.allocator.alloc_extend(ints(0, 0), ints(3, 5), ints(-1, -1))
    on = "page_size=4; alloc_extend([0, 0], [3, 5], [-1, -1])"
    hint = "Two requests do not share a page, even if one has room in it."
    same(pool.named(first), "A0 A1 A2 B0 B1 B2 B3 C0", on=on, hint=hint)
    prefix_lens, seq_lens, last_locs = ints(3, 0, 5, 5), ints(5, 2, 5, 8), ints(first[2], -1, first[7], first[7])
    slots = pool.allocator.alloc_extend(prefix_lens, seq_lens, last_locs)
    hint = "The slots of a request stand together, in the order of its tokens; one without new tokens has none."
    on = f"{on}; then alloc_extend([3, 0, 5, 5], [5, 2, 5, 8], [A2, -1, C0, C0])"
    same(pool.named(slots), "A3 D0 E0 E1 C1 C2 C3", on=on, hint=hint)
    same(pool.state(), state(12, 5), on=on)


def test_a_batch_is_served_as_a_whole_or_not(part: Any) -> None:
    """If the pages are too few for a whole batch, `alloc_extend` returns None, and takes no page for any request."""
    pool = Pool(part, num_pages=3)
    on, hint = "size=12, page_size=4; ", "Count the pages of the whole batch before you take the first."
    slots = pool.allocator.alloc_extend(ints(0, 0), ints(8, 5), ints(-1, -1))
    same(slots, None, on=f"{on}alloc_extend([0, 0], [8, 5], [-1, -1])", hint=f"It needs 2 + 2 pages. {hint}")
    same(pool.state(), state(12, 0), on=f"{on}alloc_extend([0, 0], [8, 5], [-1, -1])", hint=hint)
    slots = pool.allocator.alloc_extend(ints(0, 0), ints(8, 4), ints(-1, -1))
    same(pool.named(slots), "A0 A1 A2 A3 B0 B1 B2 B3 C0 C1 C2 C3", on=f"{on}then alloc_extend([0, 0], [8, 4], ...)")


def test_a_decode_takes_the_next_slot(part: Any) -> None:
    """`alloc_decode` returns the slot behind the last one, and a new page for a request whose page is full."""
    pool = Pool(part, num_pages=4)
    prompts = pool.allocator.alloc_extend(ints(0, 0), ints(3, 4), ints(-1, -1))
    pool.named(prompts)
    last = prompts[[2, 6]]
    before = last.copy()
    slots = pool.allocator.alloc_decode(ints(4, 5), last)
    on = "page_size=4; requests with A0 A1 A2 and B0 B1 B2 B3; alloc_decode(seq_lens=[4, 5], last_locs=[A2, B3])"
    hint = "The new token is number seq_len - 1. Number 3 lies in the page of number 2; number 4 begins a page."
    same(pool.named(slots), "A3 C0", on=on, hint=hint)
    same(last, before, on=f"{on}: last_locs after it", hint="It is the caller's array: compute in a copy.")
    slots = pool.allocator.alloc_decode(ints(6), slots[1:])
    same(pool.named(slots), "C1", on=f"{on}; alloc_decode([6], [C0])", hint=hint)
    on = "3 of 4 pages are in use; alloc_decode([5, 5, 3], ...): two new pages are needed"
    same(pool.allocator.alloc_decode(ints(5, 5, 3), ints(7, 11, 13)), None, on=on, hint="Too few pages: None.")
    same(pool.state(), state(4, 3), on=on, hint="None means that nothing has changed.")


def test_the_number_of_new_pages_is_known_before(part: Any) -> None:
    """`num_pages_for_extend` and `num_pages_for_decode` return the number of pages that an allocation will take."""
    for page_size in (1, 4):
        allocator = part(size=16, page_size=page_size, checked=True)
        for prefix_lens in ((0,), (3,), (4,), (5, 0), (3, 4, 8)):
            for more in (0, 1, 4, 6):
                seq_lens = [length + more for length in prefix_lens]
                spans = zip(prefix_lens, seq_lens, strict=True)
                expected = sum(i % page_size == 0 for start, end in spans for i in range(start, end))
                got = allocator.num_pages_for_extend(ints(*prefix_lens), ints(*seq_lens))
                on = f"page_size={page_size}; num_pages_for_extend({list(prefix_lens)}, {seq_lens})"
                same(got, expected, on=on, hint="A token whose number is a multiple of the page size begins a page.")
        for seq_lens in ([1], [4], [5], [4, 5, 9, 8]):
            expected = sum((length - 1) % page_size == 0 for length in seq_lens)
            got = allocator.num_pages_for_decode(ints(*seq_lens))
            on = f"page_size={page_size}; num_pages_for_decode({seq_lens})"
            same(got, expected, on=on, hint="The new token is number seq_len - 1.")
        same(allocator.available_size(), 16, on="available_size() after these", hint="To count takes no page.")


# --- wrong frees ------------------------------------------------------------------------------------------------------


def test_a_wrong_free_is_an_error(part: Any) -> None:
    """`free` of a page that is not in use, or of a slot twice, raises `PoolError`."""
    for what, wrong in WRONG_FREES.items():
        pool = pool_to_free(part)
        slots = wrong(pool)
        try:
            pool.allocator.free(slots)
        except PoolError:
            continue
        hint = "A wrong free gives one page to two owners, and nothing else shows it."
        raise Broken(f"{TO_FREE}{what}", "PoolError", "no error", hint)


def test_a_wrong_free_changes_nothing(part: Any) -> None:
    """After a `PoolError` the same pages are in use as before."""
    for what, wrong in WRONG_FREES.items():
        pool = pool_to_free(part)
        before = pool.allocator.owned_pages()
        try:
            pool.allocator.free(wrong(pool))
        except PoolError:
            hint = "Check all slots before you free the first page."
            same(pool.state(), state(12, 2), on=f"{TO_FREE}{what}", hint=hint)
            same(pool.allocator.owned_pages(), before, on=f"{TO_FREE}{what}; owned_pages()", hint=hint)
        else:
            raise Broken(f"{TO_FREE}{what}", "PoolError", "no error", "See the behaviour before this one.")


def test_a_negative_slot_is_an_error(part: Any) -> None:
    """`free` of a negative slot raises `PoolError` and changes nothing, also if all pages are in use."""
    hint = "No slot is negative, but a negative index of an array counts from its end: -1 is the last page."
    for more in (0, 1):
        pool = Pool(part, num_pages=3)
        slots = pool.allocator.alloc(12)
        wrong = ints(*slots[:more], -1)
        on = f"size=12, page_size=4; alloc(12): all pages are in use; free {'A0 and ' * more}slot -1"
        try:
            pool.allocator.free(wrong)
        except PoolError:
            same(pool.state(), state(0, 3), on=on, hint=hint)
        else:
            raise Broken(on, "PoolError", "no error", hint)


TO_FREE = "size=20, page_size=4; pages A, B and C are handed out, and A is freed; free "


def pool_to_free(part: Any) -> Pool:
    """Pages A, B and C are handed out, and A is freed again."""
    pool = Pool(part, num_pages=5)
    slots = pool.allocator.alloc(12)
    pool.named(slots)
    pool.allocator.free(slots[:4])
    return pool


def slots_in(pool: Pool, *names: str) -> Any:
    """The slots with these names."""
    pages = {letter: page for page, letter in pool.letters.items()}
    return ints(*(pages[name[0]] * PAGE + int(name[1]) for name in names))


def untouched(pool: Pool) -> int:
    """A page that was never handed out."""
    return min(page for page in range(1, pool.num_pages + 1) if page not in pool.letters)


WRONG_FREES: dict[str, Callable[[Pool], Any]] = {
    "A0 again": lambda pool: slots_in(pool, "A0"),
    "B0 and A0": lambda pool: slots_in(pool, "B0", "A0"),
    "a slot of a page that was never handed out": lambda pool: ints(untouched(pool) * PAGE + 1),
    "C0 and slot 0": lambda pool: ints(*slots_in(pool, "C0"), 0),
    "slot 3, of page 0": lambda pool: ints(3),
    "slot -1": lambda pool: ints(-1),
    "B0 and slot -5": lambda pool: ints(*slots_in(pool, "B0"), -5),
    "slot 24, behind the last page": lambda pool: ints(24),
    "B0, B1 and B0": lambda pool: slots_in(pool, "B0", "B1", "B0"),
}


# --- all of it --------------------------------------------------------------------------------------------------------


def test_it_is_right_after_many_operations(part: Any) -> None:
    """After any extends, decodes and frees each request has the slots that a token-by-token allocator gives."""
    for page_size, seed in ((1, 0), (4, 1), (4, 2), (16, 3)):
        tokens = TokenByToken(part, page_size, seed)
        for _ in range(150):
            tokens.step()


class TokenByToken:
    """Requests, each with the slots of its tokens; each new token must lie where it has to."""

    def __init__(self, part: Any, page_size: int, seed: int) -> None:
        self.rng, self.pool = Random(seed), Pool(part, num_pages=12, page_size=page_size)
        self.page_size = page_size
        self.requests: dict[int, list[int]] = {number: [] for number in range(4)}
        self.done: list[str] = [f"size={12 * page_size}, page_size={page_size}"]

    def step(self) -> None:
        """One random operation, and what is free after it."""
        numbers = self.rng.sample(range(4), self.rng.randint(1, 4))
        action = self.rng.choice((self.extend, self.extend, self.decode, self.free))
        action(numbers)
        owned = sorted(self.owned())
        same(self.pool.allocator.owned_pages().tolist(), owned, on=f"{self.history()}: owned_pages()")
        free_slots = (12 - len(owned)) * self.page_size
        same(self.pool.allocator.available_size(), free_slots, on=f"{self.history()}: available_size()")

    def owned(self) -> set[int]:
        """Pages of requests: each begins with a token whose number is a multiple of the page size."""
        firsts = (slot for slots in self.requests.values() for slot in slots[:: self.page_size])
        return {slot // self.page_size for slot in firsts}

    def history(self) -> str:
        return f"{self.done[0]}; ...; {'; '.join(self.done[1:][-5:])}"

    def extend(self, numbers: Sequence[int]) -> None:
        lens = [len(self.requests[number]) for number in numbers]
        more = [self.rng.randrange(2 * self.page_size + 2) for _ in numbers]
        ends = [length + count for length, count in zip(lens, more, strict=True)]
        last = [self.requests[number][-1] if self.requests[number] else -1 for number in numbers]
        self.done.append(f"alloc_extend({lens}, {ends}, {last})")
        self.given(numbers, more, self.pool.allocator.alloc_extend(ints(*lens), ints(*ends), ints(*last)))

    def decode(self, numbers: Sequence[int]) -> None:
        numbers = [number for number in numbers if self.requests[number]]
        if numbers:
            ends = [len(self.requests[number]) + 1 for number in numbers]
            last = [self.requests[number][-1] for number in numbers]
            self.done.append(f"alloc_decode({ends}, {last})")
            self.given(numbers, [1] * len(numbers), self.pool.allocator.alloc_decode(ints(*ends), ints(*last)))

    def free(self, numbers: Sequence[int]) -> None:
        slots = [slot for number in numbers for slot in self.requests[number]]
        self.rng.shuffle(slots)
        self.done.append(f"free({slots})")
        self.pool.allocator.free(ints(*slots))
        for number in numbers:
            self.requests[number] = []

    def given(self, numbers: Sequence[int], more: Sequence[int], slots: Any) -> None:
        """Compare the slots that were allocated: `more` for each of these requests."""
        spans = [(len(self.requests[number]), count) for number, count in zip(numbers, more, strict=True)]
        needed = sum(i % self.page_size == 0 for length, count in spans for i in range(length, length + count))
        num_free = 12 - len(self.owned())
        if needed > num_free:
            return same(slots, None, on=f"{self.history()}: {needed} pages are needed, {num_free} are free")
        if not isinstance(slots, np.ndarray) or len(slots) != sum(more):
            raise Broken(self.history(), f"{sum(more)} slots", self.pool.named(slots))
        left, owned = slots.tolist(), self.owned()
        for number, count in zip(numbers, more, strict=True):
            for slot in left[:count]:
                self.check_slot(self.requests[number], slot, owned)
                self.requests[number].append(slot)
            left = left[count:]
        return None

    def check_slot(self, mine: Sequence[int], slot: int, owned: set[int]) -> None:
        """A token lies behind the one before it, or begins a page that was free."""
        expected = f"for token {len(mine)} of a request "
        page, offset = divmod(slot, self.page_size)
        if len(mine) % self.page_size:
            is_right, expected = slot == mine[-1] + 1, f"{expected}slot {mine[-1] + 1}, behind the token before it"
        else:
            is_right = not offset and 1 <= page <= 12 and page not in owned
            expected += "the first slot of a free page"
            owned.add(page)
        if not is_right:
            raise Broken(self.history(), expected, f"slot {slot}")
