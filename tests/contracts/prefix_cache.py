"""Contract of the prefix cache of m4: a tree of cached tokens, in whole pages.

Tokens are written as letters, a page has four: `AAAABBBB` are two pages.
"""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.allocator import Slots, TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.radix_key import RadixKey
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from tests.contracts.part import Broken, Part, same
from tests.m4_radix_cache.caches import admit, allocator_of, row_of

PAGE = 4
PART = Part(
    name="prefix_cache",
    target="m4_radix_cache.mem_cache.radix_cache:RadixCache",
    role="prefix_cache",
    lesson="docs/m4_radix_cache.md#radixcache-match-insert-split",
    starter="MyRadixCache",
    variant="m4_radix_cache-evicting",
    changes={"cache_config": {"debug": True}},
)


def cache_of(part: Any, policy: str = "lru", num_pages: int = 32) -> Any:
    """An empty cache over an allocator that raises an error for every wrong free."""
    return part(
        req_to_token_pool=ReqToTokenPool(size=8, max_context_len=64),
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(size=num_pages * PAGE, page_size=PAGE, checked=True),
        eviction_policy=policy,
        tracer=Tracer(),
    )


def key_of(text: str, extra_key: str | None = None) -> RadixKey:
    """The key of these tokens."""
    return RadixKey([ord(letter) for letter in text], extra_key)


def put(cache: Any, text: str, *, extra_key: str | None = None, priority: int = 0) -> Slots:
    """Insert all tokens with new slots, free those that were there already, and return the new slots."""
    slots = allocator_of(cache).alloc(len(text))
    assert slots is not None
    given = slots.copy()
    existing = cache.insert(key_of(text, extra_key), slots, priority)
    allocator_of(cache).free(slots[:existing])
    return given


def found(cache: Any, text: str, max_len: int | None = None, *, extra_key: str | None = None) -> Slots:
    """The slots of the longest cached prefix."""
    slots: Slots = cache.match_prefix(key_of(text, extra_key), max_len).device_indices
    return slots


def node_of(cache: Any, text: str) -> Any:
    """The handle of the longest cached prefix."""
    return cache.match_prefix(key_of(text)).last_device_node


def sizes(cache: Any) -> dict[str, int]:
    """Cached tokens without and with a lock."""
    return {"evictable": cache.evictable_size(), "protected": cache.protected_size()}


def sized(evictable: int, protected: int) -> dict[str, int]:
    return {"evictable": evictable, "protected": protected}


def cached(cache: Any, *texts: str) -> list[int]:
    """How many tokens of each are cached."""
    return [len(found(cache, text)) for text in texts]


def slots_of(*pages: int) -> Slots:
    """All slots of these pages."""
    return np.array([page * PAGE + offset for page in pages for offset in range(PAGE)], dtype=np.int64)


# --- match and insert -------------------------------------------------------------------------------------------------


def test_an_empty_cache_has_nothing(part: Any) -> None:
    """In an empty cache a lookup finds no token."""
    hint = "Without a common page it is MatchResult(NO_SLOTS, self.root)."
    same(found(cache_of(part), "AAAA"), slots_of(), on="match_prefix AAAA in an empty cache", hint=hint)
    same(found(cache_of(part), ""), slots_of(), on="match_prefix of a key without tokens", hint=hint)


def test_what_was_inserted_is_found(part: Any) -> None:
    """A lookup finds the slots of the tokens that were inserted."""
    cache = cache_of(part)
    same(cache.insert(key_of("AAAABBBB"), slots_of(3, 7)), 0, on="insert AAAABBBB into an empty cache: what it returns")
    on = "insert AAAABBBB with the slots 12-15 and 28-31; match_prefix "
    same(found(cache, "AAAABBBB"), slots_of(3, 7), on=f"{on}AAAABBBB")
    hint = "Of a longer key the cached beginning is found."
    same(found(cache, "AAAABBBBCCCC"), slots_of(3, 7), on=f"{on}AAAABBBBCCCC", hint=hint)
    same(found(cache, "BBBB"), slots_of(), on=f"{on}BBBB", hint="A match begins with the first token of the key.")


def test_a_match_is_a_whole_number_of_pages(part: Any) -> None:
    """A lookup finds whole pages only, and at most `max_len` tokens."""
    cache = cache_of(part)
    cache.insert(key_of("AAAABBBB"), slots_of(3, 7))
    on, hint = "page_size=4; insert AAAABBBB; match_prefix ", "A page belongs to a match as a whole or not at all."
    same(found(cache, "AAAABB"), slots_of(3), on=f"{on}AAAABB", hint=hint)
    same(found(cache, "AAAABBBC"), slots_of(3), on=f"{on}AAAABBBC", hint=hint)
    same(found(cache, "AAA"), slots_of(), on=f"{on}AAA", hint=hint)
    hint = "The limit is the smaller of max_len and the number of tokens, rounded down to whole pages."
    for max_len, pages in ((7, (3,)), (4, (3,)), (3, ()), (0, ()), (99, (3, 7))):
        same(found(cache, "AAAABBBB", max_len), slots_of(*pages), on=f"{on}AAAABBBB, max_len={max_len}", hint=hint)


def test_a_longer_sequence_continues_the_path(part: Any) -> None:
    """Of tokens that are cached already the tree keeps its own slots, and `insert` returns their number."""
    cache = cache_of(part)
    cache.insert(key_of("AAAABBBB"), slots_of(1, 2))
    longer = slots_of(11, 12, 13)
    existing = cache.insert(key_of("AAAABBBBCCCC"), longer)
    on = "insert AAAABBBB, then AAAABBBBCCCC: "
    same(existing, 8, on=f"{on}what the second returns", hint="It is the number of tokens that were cached before.")
    longer[:] = 0
    hint = "Only the new tokens get slots of `value`, and the tree has a copy of them: the caller's array may change."
    same(found(cache, "AAAABBBBCCCC"), slots_of(1, 2, 13), on=f"{on}the slots, after the array was set to 0", hint=hint)
    hint = "What was cached already is not counted again."
    same(sizes(cache), sized(12, 0), on=f"{on}the sizes", hint=hint)
    same(cache.insert(key_of("AAAABBBBCCCC"), slots_of(21, 22, 23)), 12, on="insert AAAABBBBCCCC again", hint=hint)
    same(cache.insert(key_of("AAAABBBBCCCC"), slots_of(21)), 4, on="insert the first 4 tokens of it again", hint=hint)
    same(cache.insert(key_of("AAAA"), slots_of()), 0, on="insert no slots, so no tokens", hint=hint)
    same(sizes(cache), sized(12, 0), on="the sizes after that", hint=hint)


def test_sequences_that_differ_share_their_beginning(part: Any) -> None:
    """Two sequences share their common pages, wherever they differ, and each keeps its own end."""
    cache = cache_of(part)
    cache.insert(key_of("AAAABBBBCCCC"), slots_of(1, 2, 3))
    existing = cache.insert(key_of("AAAABBBBDDDD"), slots_of(11, 12, 4))
    hint = "Where the new tokens leave a node, it is split; the rest hangs below the upper half."
    same(existing, 8, on="insert AAAABBBBCCCC, then AAAABBBBDDDD: what the second returns", hint=hint)
    same(cache.insert(key_of("AAAAEEEE"), slots_of(21, 5)), 4, on="then AAAAEEEE", hint=hint)
    same(cache.insert(key_of("AAAF"), slots_of(6)), 0, on="then AAAF, which has no page in common", hint=hint)
    on = "insert AAAABBBBCCCC, AAAABBBBDDDD, AAAAEEEE, AAAF; match_prefix "
    for text, pages in {
        "AAAABBBBCCCC": (1, 2, 3),
        "AAAABBBBDDDD": (1, 2, 4),
        "AAAAEEEE": (1, 5),
        "AAAF": (6,),
        "AAAABBBBEEEE": (1, 2),
        "AAAACCCC": (1,),
    }.items():
        same(found(cache, text), slots_of(*pages), on=on + text, hint=hint)
    same(sizes(cache), sized(24, 0), on=f"{on.partition(';')[0]}: the sizes", hint="Each page is counted once.")


def test_a_namespace_is_of_its_own(part: Any) -> None:
    """The same tokens under another `extra_key` are other tokens."""
    cache = cache_of(part)
    cache.insert(key_of("AAAABBBB"), slots_of(1, 2))
    hint = "extra_key belongs to what finds the first node below the root."
    on = "insert AAAABBBB without an extra_key; "
    same(found(cache, "AAAABBBB", extra_key="x"), slots_of(), on=f"{on}match it with extra_key='x'", hint=hint)
    existing = cache.insert(key_of("AAAACCCC", "x"), slots_of(3, 4))
    same(existing, 0, on=f"{on}insert AAAACCCC with extra_key='x': what it returns", hint=hint)
    same(found(cache, "AAAACCCC", extra_key="x"), slots_of(3, 4), on="then match it with extra_key='x'", hint=hint)
    same(found(cache, "AAAACCCC"), slots_of(1), on="and match AAAACCCC without an extra_key", hint=hint)


# --- lock -------------------------------------------------------------------------------------------------------------


def test_a_lock_protects_a_path(part: Any) -> None:
    """A lock makes the tokens from the root to its node protected, until its last lock is removed."""
    cache = cache_of(part)
    for text in ("AAAABBBB", "AAAACCCC"):
        put(cache, text)
    on = "insert AAAABBBB and AAAACCCC; "
    cache.inc_lock_ref(node_of(cache, "DDDD"))
    same(sizes(cache), sized(12, 0), on=f"{on}lock the match of DDDD, the root", hint="The root has no tokens.")
    first, second = node_of(cache, "AAAABBBB"), node_of(cache, "AAAACCCC")
    cache.inc_lock_ref(first)
    hint = "A lock counts for the node and for all above it, up to the root, and for no other."
    same(sizes(cache), sized(4, 8), on=f"{on}lock the match of AAAABBBB", hint=hint)
    cache.inc_lock_ref(second)
    hint = "A node that was locked already is protected already: only a first lock moves its tokens."
    same(sizes(cache), sized(0, 12), on=f"{on}lock both", hint=hint)
    cache.dec_lock_ref(first)
    hint = "Tokens become evictable with the last unlock: AAAA is still locked for AAAACCCC."
    same(sizes(cache), sized(4, 8), on=f"{on}lock both; unlock AAAABBBB", hint=hint)
    cache.dec_lock_ref(second)
    same(sizes(cache), sized(12, 0), on=f"{on}lock both; unlock both", hint=hint)


def test_a_lock_survives_a_split(part: Any) -> None:
    """A handle that was locked before its node was split stands for the whole path as before."""
    divide: dict[str, Callable[[Any], Any]] = {
        "match_prefix AAAADDDD": lambda cache: found(cache, "AAAADDDD"),
        "insert AAAADDDD": lambda cache: put(cache, "AAAADDDD"),
    }
    for more, (how, split) in zip((0, 4), divide.items(), strict=True):
        cache = cache_of(part)
        put(cache, "AAAABBBBCCCC")
        handle = node_of(cache, "AAAABBBBCCCC")
        cache.inc_lock_ref(handle)
        split(cache)
        on = f"insert AAAABBBBCCCC, lock its match, {how}; "
        hint = "A split makes nothing protected, and nothing evictable."
        same(sizes(cache), sized(more, 12), on=f"{on}the sizes", hint=hint)
        cache.inc_lock_ref(handle)
        cache.dec_lock_ref(handle)
        same(sizes(cache), sized(more, 12), on=f"{on}lock the handle once more, and unlock it once", hint=hint)
        cache.dec_lock_ref(handle)
        hint = (
            "The handle that a request holds must still be the end of its path: the old object keeps the tail, and the "
            "new one above it has as many locks."
        )
        same(sizes(cache), sized(more + 12, 0), on=f"{on}unlock the handle", hint=hint)


# --- evict ------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_leaf_goes_first(part: Any) -> None:
    """`evict` frees whole leaves, of `lru` the one that was used longest ago, until enough tokens are free."""
    cache = cache_of(part)
    for text in ("AAAAAAAA", "BBBB", "CCCC", "DDDD"):
        put(cache, text)
    found(cache, "AAAAAAAA")
    put(cache, "BBBB")
    before = allocator_of(cache).available_size()
    on = "insert AAAAAAAA, BBBB, CCCC, DDDD; match AAAAAAAA; insert BBBB again; "
    texts = ("AAAAAAAA", "BBBB", "CCCC", "DDDD")
    same(cache.evict(0), 0, on=f"{on}evict(0)", hint="Nothing is missing, so nothing goes.")
    hint = (
        "CCCC goes, with all its 4 tokens. A lookup or an insert is a use: the access time of the nodes on its path is "
        "new, and so is the rank of a candidate."
    )
    same(cache.evict(1), 4, on=f"{on}evict(1)", hint=hint)
    hint = "BBBB was used by the second insert, CCCC was not. What is evicted leaves the `children` of its parent."
    same(cached(cache, "CCCC"), [0], on=f"{on}evict(1); match_prefix CCCC", hint=hint)
    same(cache.evict(5), 12, on=f"{on}evict(1), evict(5)", hint="4 are too few: DDDD goes, and AAAAAAAA after it.")
    same(cached(cache, *texts), [0, 4, 0, 0], on=f"{on}evict(1), evict(5); what is left of each", hint=hint)
    hint = "self._evicted(...) frees the slots of all evicted nodes."
    same(
        allocator_of(cache).available_size() - before, 16, on=f"{on}evict(1), evict(5): slots that are free", hint=hint
    )
    same(sizes(cache), sized(4, 0), on=f"{on}evict(1), evict(5): the sizes", hint=hint)

    cache = cache_of(part)
    for text in ("AAAA", "BBBB"):
        put(cache, text)
    cache.insert(key_of("AAAA"), slots_of())
    cache.evict(1)
    on = "insert AAAA, BBBB; insert AAAA with no slots; evict(1)"
    hint = "The path has the first len(value) tokens of the key. Without any, no node is on its path, and none is used."
    same(cached(cache, "AAAA", "BBBB"), [0, 4], on=on, hint=hint)


def test_ends_go_before_beginnings(part: Any) -> None:
    """A node with children stays until they are gone, and then goes like any other leaf."""
    cache = cache_of(part, "fifo")
    for text in ("AAAA", "AAAABBBB", "AAAACCCC", "DDDD"):
        put(cache, text)
    on = "fifo: insert AAAA, AAAABBBB, AAAACCCC, DDDD; "
    hint = "Only leaves are evicted: an end without its beginning is found by no lookup."
    same(cache.evict(4), 4, on=f"{on}evict(4)", hint=hint)
    same(cached(cache, "AAAABBBB"), [4], on=f"{on}evict(4); match_prefix AAAABBBB", hint=hint)
    hint = "A parent that has lost its last child is a leaf: it is a candidate now, within the same evict, too."
    same(cache.evict(100), 12, on=f"{on}evict(4), evict(100)", hint=hint)
    same(sizes(cache), sized(0, 0), on=f"{on}evict(4), evict(100): the sizes", hint=hint)
    same(cached(cache, "AAAACCCC", "DDDD"), [0, 0], on=f"{on}evict(4), evict(100); what is left", hint=hint)
    same(cache.evict(4), 0, on="evict(4) of an empty cache", hint="Without a candidate nothing is freed.")
    put(cache, "AAAABBBB")
    same(cached(cache, "AAAABBBB"), [8], on="then insert AAAABBBB again", hint="The cache can be filled again.")


def test_what_is_locked_stays(part: Any) -> None:
    """`evict` frees no token that has a lock, even if too few are free then."""
    cache = cache_of(part)
    for text in ("AAAABBBB", "AAAACCCC", "DDDD"):
        put(cache, text)
    handle = node_of(cache, "AAAABBBB")
    cache.inc_lock_ref(handle)
    on, hint = "insert AAAABBBB, AAAACCCC, DDDD; lock AAAABBBB; ", "A node with a lock is no candidate, leaf or not."
    same(cache.evict(100), 8, on=f"{on}evict(100)", hint=hint)
    same(cached(cache, "AAAABBBB", "AAAACCCC", "DDDD"), [8, 4, 0], on=f"{on}evict(100); what is left", hint=hint)
    put(cache, "AAAABBBBEEEE")
    hint = "What is inserted below a locked node is not locked."
    same(cache.evict(100), 4, on=f"{on}evict(100); insert AAAABBBBEEEE; evict(100)", hint=hint)
    cache.dec_lock_ref(handle)
    hint = "After the last unlock a leaf is a candidate again."
    same(cache.evict(100), 8, on=f"{on}evict(100) twice; unlock; evict(100)", hint=hint)
    put(cache, "AAAABBBB")
    handle = node_of(cache, "AAAA")
    cache.inc_lock_ref(handle)
    put(cache, "DDDD")
    same(
        cache.evict(100),
        8,
        on="insert AAAABBBB, lock AAAA, insert DDDD; evict(100)",
        hint="AAAA is a locked leaf then.",
    )


def test_the_policy_names_who_goes(part: Any) -> None:
    """The rank is that of the eviction policy: its counts are kept on every node, also of one that is split."""
    cache = cache_of(part, "fifo")
    for text in ("AAAA", "BBBB"):
        put(cache, text)
    found(cache, "AAAA")
    cache.evict(1)
    hint = "Of fifo the oldest node goes first, used or not: the rank is that of self.eviction_policy."
    same(cached(cache, "AAAA", "BBBB"), [0, 4], on="fifo: insert AAAA, BBBB; match AAAA; evict(1)", hint=hint)
    check_hits(part)
    check_priorities(part)


def check_hits(part: Any) -> None:
    """By hits."""
    cache = cache_of(part, "lfu")
    put(cache, "AAAABBBB")
    cache.record_hit(node_of(cache, "AAAABBBB"))
    put(cache, "CCCC")
    cache.evict(1)
    hint = "record_hit adds a hit, and the rank of a candidate changes with it."
    on = "lfu: insert AAAABBBB, record_hit of it; insert CCCC; evict(1)"
    same(cached(cache, "AAAABBBB", "CCCC"), [8, 0], on=on, hint=hint)
    cached(cache, "AAAA")
    cache.evict(4)
    put(cache, "DDDD")
    cache.evict(4)
    hint = "The upper half of a split has the hits of the old node."
    on = f"{on}; match AAAA; evict(4); insert DDDD; evict(4)"
    same(cached(cache, "AAAA", "DDDD"), [4, 0], on=on, hint=hint)

    cache = cache_of(part, "lfu")
    for text in ("AAAA", "AAAABBBB"):
        put(cache, text)
    cache.record_hit(node_of(cache, "AAAABBBB"))
    cache.evict(4)
    put(cache, "CCCC")
    cache.evict(4)
    hint = "record_hit counts for the node and for all above it."
    on = "lfu: insert AAAA, AAAABBBB; record_hit of AAAABBBB; evict(4); insert CCCC; evict(4)"
    same(cached(cache, "AAAA", "CCCC"), [4, 0], on=on, hint=hint)


def check_priorities(part: Any) -> None:
    """By priority."""
    cache = cache_of(part, "priority")
    put(cache, "AAAABBBB", priority=2)
    put(cache, "CCCC", priority=1)
    cache.evict(1)
    on = "priority: insert AAAABBBB with 2, CCCC with 1; evict(1)"
    hint = "A new node has the priority of its insert."
    same(cached(cache, "AAAABBBB", "CCCC"), [8, 0], on=on, hint=hint)
    cached(cache, "AAAA")
    cache.evict(4)
    put(cache, "DDDD", priority=1)
    cache.evict(4)
    hint = "The upper half of a split has the priority of the old node, and a lookup changes no priority."
    on = f"{on}; match AAAA; evict(4); insert DDDD with 1; evict(4)"
    same(cached(cache, "AAAA", "DDDD"), [4, 0], on=on, hint=hint)
    put(cache, "EEEE", priority=3)
    put(cache, "AAAA", priority=4)
    put(cache, "AAAA", priority=1)
    cache.evict(4)
    hint = "An insert raises the priority of the nodes on its path to its own, if that is higher."
    on = f"{on}; insert EEEE with 3, AAAA with 4, AAAA with 1; evict(4)"
    same(cached(cache, "AAAA", "EEEE"), [4, 0], on=on, hint=hint)
    check_priorities_of_a_path(part)


def check_priorities_of_a_path(part: Any) -> None:
    """By priority, of nodes with others below them."""
    cache = cache_of(part, "priority")
    for text, priority in (("AAAA", 1), ("AAAABBBB", 5), ("DDDD", 6)):
        put(cache, text, priority=priority)
    cache.evict(4)
    put(cache, "CCCC", priority=3)
    cache.evict(4)
    on = "priority: insert AAAA with 1, AAAABBBB with 5, DDDD with 6; evict(4); insert CCCC with 3; evict(4)"
    hint = "An insert raises the priority of all nodes on its path: AAAA has 5 since AAAABBBB came."
    same(cached(cache, "AAAA", "CCCC", "DDDD"), [4, 0, 4], on=on, hint=hint)

    cache = cache_of(part, "priority")
    for text, priority in (("AAAABBBB", 1), ("AAAA", 5), ("CCCC", 3)):
        put(cache, text, priority=priority)
    cache.evict(4)
    on = "priority: insert AAAABBBB with 1, AAAA with 5, CCCC with 3; evict(4)"
    hint = "AAAA was a part of a node: of the two halves the tail is not on the path, so that BBBB still has 1."
    same(cached(cache, "AAAABBBB", "CCCC"), [4, 4], on=on, hint=hint)


# --- all of it --------------------------------------------------------------------------------------------------------


def test_requests_start_from_each_other(part: Any) -> None:
    """Two requests that computed the same prompt keep one copy of its whole pages, and lock it while they run."""
    cache = cache_of(part)
    first, second = admit(cache, "first", ids("AAAABBBBC")), admit(cache, "second", ids("AAAABBBBD"))
    cache.cache_unfinished_req(first)
    cache.cache_unfinished_req(second)
    on = "requests AAAABBBBC and AAAABBBBD are computed at once; cache_unfinished_req of both: "
    hint = "The second finds the pages cached: insert() returns 8, and match_prefix() their slots."
    same(row_of(cache, second)[:8], row_of(cache, first)[:8], on=f"{on}the slots of their common tokens", hint=hint)
    same(sizes(cache), sized(0, 8), on=f"{on}the sizes", hint="Both have locked the two pages.")
    for req in (first, second):
        cache.cache_finished_req(req)
    same(sizes(cache), sized(8, 0), on=f"{on}then both finish: the sizes", hint="A finished request has no lock.")
    third = admit(cache, "third", ids("AAAABBBBCCCC"))
    same(third.cache_protected_len, 8, on="then request AAAABBBBCCCC starts: its tokens from the cache")
    cache.cache_finished_req(third)
    allocator = allocator_of(cache)
    total = allocator.available_size() + cache.evictable_size()
    same(total, allocator.size, on="then it finishes: free slots and evictable tokens", hint="Each page has one owner.")
    cache.check_invariants()


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


class PlainList:
    """What must be cached: for each page its slots, by namespace and all tokens up to its end."""

    def __init__(self) -> None:
        self.pages: dict[tuple[str | None, str], list[int]] = {}
        self.locks: Counter[tuple[str | None, str]] = Counter()

    def path(self, space: str | None, text: str) -> list[tuple[str | None, str]]:
        """The pages of these tokens that are cached, from the first on."""
        path: list[tuple[str | None, str]] = []
        for end in range(PAGE, len(text) + 1, PAGE):
            if (space, text[:end]) not in self.pages:
                break
            path.append((space, text[:end]))
        return path

    def size(self, *, locked: bool) -> int:
        return PAGE * sum((self.locks[page] > 0) == locked for page in self.pages)


class Pair:
    """A cache and the plain list: each operation is done to both, and they must agree."""

    def __init__(self, part: Any, seed: int) -> None:
        self.rng, self.cache, self.plain = Random(seed), cache_of(part, num_pages=12), PlainList()
        self.handles: list[tuple[Any, list[tuple[str | None, str]]]] = []
        self.done: list[str] = []

    def step(self) -> None:
        """One random operation."""
        text = "".join(self.rng.choice(("AAAA", "AAAB", "BBBB")) for _ in range(self.rng.randrange(1, 5)))
        text, space = text + "C" * self.rng.randrange(3), self.rng.choice((None, None, "x"))
        action = self.rng.choice((self.match, self.insert, self.insert, self.lock, self.unlock, self.evict))
        action(space, text)
        expected = sized(self.plain.size(locked=False), self.plain.size(locked=True))
        same(sizes(self.cache), expected, on=f"{self.history()}: the sizes")

    def history(self) -> str:
        return "...; " + "; ".join(self.done[-8:])

    def match(self, space: str | None, text: str) -> tuple[Any, list[tuple[str | None, str]]]:
        self.done.append(f"match {text}{'' if space is None else ' of x'}")
        path = self.plain.path(space, text)
        match = self.cache.match_prefix(key_of(text, space))
        expected = np.array([slot for page in path for slot in self.plain.pages[page]], dtype=np.int64)
        same(match.device_indices, expected, on=self.history())
        return match.last_device_node, path

    def insert(self, space: str | None, text: str) -> None:
        length = len(text) // PAGE * PAGE
        slots = allocator_of(self.cache).alloc(length)
        if slots is None:
            return self.evict(space, text)
        self.done.append(f"insert {text[:length]}{'' if space is None else ' of x'}")
        path = self.plain.path(space, text)
        existing = self.cache.insert(key_of(text, space), slots)
        same(existing, len(path) * PAGE, on=f"{self.history()}: what it returns")
        for end in range(len(path) * PAGE, length, PAGE):
            self.plain.pages[space, text[: end + PAGE]] = slots[end : end + PAGE].tolist()
        allocator_of(self.cache).free(slots[:existing])
        return None

    def lock(self, space: str | None, text: str) -> None:
        node, path = self.match(space, text)
        self.done[-1] = self.done[-1].replace("match", "lock")
        self.cache.inc_lock_ref(node)
        self.plain.locks.update(path)
        self.handles.append((node, path))

    def unlock(self, _: str | None = None, __: str = "") -> None:
        if self.handles:
            node, path = self.handles.pop(self.rng.randrange(len(self.handles)))
            self.done.append(f"unlock {path[-1][1] if path else 'the root'}{' of x' if path and path[-1][0] else ''}")
            self.cache.dec_lock_ref(node)
            self.plain.locks.subtract(path)

    def evict(self, _: str | None, __: str) -> None:
        """Nodes are the cache's own affair. So not which pages go, but that these may go."""
        asked = self.rng.randrange(1, 5) * PAGE
        self.done.append(f"evict({asked})")
        unlocked = self.plain.size(locked=False)
        freed = self.cache.evict(asked)
        owned = set(allocator_of(self.cache).owned_pages().tolist())
        gone = {page for page, slots in self.plain.pages.items() if slots[0] // PAGE not in owned}
        same(freed, len(gone) * PAGE, on=f"{self.history()}: what it returns, and the pages that are free then")
        if freed < min(asked, unlocked):
            raise Broken(self.history(), f"at least {min(asked, unlocked)} tokens: {unlocked} have no lock", freed)
        if locked := sorted(text for space, text in gone if self.plain.locks[space, text] > 0):
            raise Broken(self.history(), "only tokens without a lock", f"the last page of {locked[0]} is free")
        for page in gone:
            del self.plain.pages[page]
        if orphans := sorted(text for space, text in self.plain.pages if (space, text[:-PAGE]) in gone):
            hint = "Only leaves are candidates: an unlocked node with children is none, nor a leaf that got a child."
            got = f"{orphans[0]} has lost the page before its last one"
            raise Broken(self.history(), "ends before beginnings", got, hint)


def test_it_is_right_after_many_operations(part: Any) -> None:
    """After any lookups, inserts, locks and evictions it has what a plain list of pages has."""
    for seed in range(3):
        pair = Pair(part, seed)
        for _ in range(200):
            pair.step()
        while pair.handles:
            pair.unlock()
        allocator = allocator_of(pair.cache)
        pair.cache.evict(allocator.size)
        hint = "Without locks everything can be evicted."
        same(allocator.available_size(), allocator.size, on=f"{pair.history()}; unlock and evict all: free", hint=hint)
