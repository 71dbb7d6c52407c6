"""The prefix cache as a table of block hashes: vLLM's design, with the same interface as the tree.

Every full page of a sequence has a digest of its tokens and of the digest before it. So a digest stands for the whole
prefix, and one dictionary finds it: no tree, no splits, no search for a mismatch. The price is a hash per page where
the tree compares a whole run at once, and eviction page by page. Unlocked blocks are kept in LRU order, in each chain
the last one first, so that a match is always a prefix. vLLM: `v1/core/kv_cache_utils.py` (the chained hash),
`v1/core/block_pool.py` (the table); there several blocks may have the same digest, here the first one stays.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.base_prefix_cache import NO_SLOTS, BasePrefixCache, MatchResult
from m4_radix_cache.mem_cache.events import Inserted
from m4_radix_cache.mem_cache.radix_key import RadixKey

DIGEST_BYTES = 32
"""256 bits: two different prefixes with the same digest do not occur."""


@dataclass(slots=True, eq=False)
class Block:
    """A cached page. Handle of a match; only the cache changes it."""

    id: int
    """The page; 0 for the root, which holds none."""
    parent: "Block | None"
    """The page before it; None for the root."""
    digest: bytes
    """Digest of its tokens and all before them."""
    lock_ref: int = 0
    """Locks on it or on blocks after it."""


class BlockHashCache(BasePrefixCache):
    """Cached pages by digest. Evicts in LRU order."""

    eviction_policies = ("lru",)

    def _start_empty(self) -> None:
        self.root = Block(0, None, b"")
        self._blocks: dict[bytes, Block] = {}
        self._unlocked: OrderedDict[bytes, Block] = OrderedDict()  # next to be evicted first; children before parents

    # --- match and insert ---------------------------------------------------------------------------------------------

    def match_prefix(self, key: RadixKey, max_len: int | None = None) -> MatchResult:
        num_tokens = len(key) if max_len is None else max(0, min(len(key), max_len))
        chain = []
        for digest in self._digests(key, num_tokens // self.page_size):
            block = self._blocks.get(digest)
            if block is None:
                break
            chain.append(block)
        if not chain:
            return MatchResult(NO_SLOTS, self.root)
        self._touch(chain)
        pages = np.array([block.id for block in chain])
        slots = (pages[:, None] * self.page_size + np.arange(self.page_size)).ravel()
        return MatchResult(slots, chain[-1])

    def insert(self, key: RadixKey, value: Slots, priority: int = 0) -> int:
        """As in the base class; `priority` has no effect, because the table only evicts in LRU order."""
        if not len(value):
            return 0
        num_pages, rest = divmod(len(value), self.page_size)
        assert not rest and len(value) <= len(key), f"{len(value)} slots for {key!r}: no whole pages"
        pages: list[int] = (value[:: self.page_size] // self.page_size).tolist()
        parent, chain, num_new = self.root, [], 0
        for digest, page in zip(self._digests(key, num_pages), pages, strict=True):
            block = self._blocks.get(digest)
            if block is None:
                block = self._blocks[digest] = self._unlocked[digest] = Block(page, parent, digest)
                num_new += 1
            chain.append(block)
            parent = block
        self._touch(chain)
        self._evictable += num_new * self.page_size
        existing = len(value) - num_new * self.page_size
        above = chain[-1 - num_new] if num_new < len(chain) else self.root
        self.tracer.emit(Inserted.of, self, parent, above, key, value, existing, priority)
        return existing

    def _digests(self, key: RadixKey, num_pages: int) -> list[bytes]:
        """Return the digests of the first pages of `key`, each chained to the one before. Computed once per key."""
        digests, size, data = key.page_digests.setdefault(self.page_size, []), self.page_key_bytes, key.data
        if len(digests) < num_pages:
            digest = digests[-1] if digests else _root_digest(key.extra_key)
            for start in range(len(digests) * size, num_pages * size, size):
                digest = blake2b(digest + data[start : start + size], digest_size=DIGEST_BYTES).digest()
                digests.append(digest)
        return digests[:num_pages]

    def _touch(self, chain: list[Block]) -> None:
        """Make the unlocked blocks of a chain the most recently used, the last of them first."""
        for block in reversed(chain):
            if not block.lock_ref:
                self._unlocked.move_to_end(block.digest)

    # --- lock and evict -----------------------------------------------------------------------------------------------

    def inc_lock_ref(self, node: Block, rid: str | None = None) -> None:
        last, moved = node, 0
        while node.parent is not None:
            if not node.lock_ref:
                del self._unlocked[node.digest]
                moved += self.page_size
            node.lock_ref += 1
            node = node.parent
        self._lock_moved(last, 1, moved, rid)

    def dec_lock_ref(self, node: Block, rid: str | None = None) -> None:
        last, moved = node, 0
        while node.parent is not None:
            assert node.lock_ref > 0, f"page {node.id} is not locked"
            node.lock_ref -= 1
            if not node.lock_ref:
                self._unlocked[node.digest] = node
                moved += self.page_size
            node = node.parent
        self._lock_moved(last, -1, moved, rid)

    def evict(self, num_tokens: int, rids: Sequence[str] = ()) -> int:
        """Free unlocked pages, least recently used first."""
        pages: list[int] = []
        while len(pages) * self.page_size < num_tokens and self._unlocked:
            digest, block = self._unlocked.popitem(last=False)  # the blocks after it were evicted before it
            del self._blocks[digest]
            pages.append(block.id)
        if not pages:
            return 0
        slots = np.array(pages) * self.page_size
        evicted = [(page, self.page_size) for page in pages]
        return self._evicted(num_tokens, rids, slots, evicted, len(pages) * self.page_size)

    def check_invariants(self) -> None:
        seen: set[bytes] = set()
        for digest in self._unlocked:
            parent = self._blocks[digest].parent
            assert parent is not None and parent.digest not in seen, "a page goes before one that is behind it"
            seen.add(digest)
        num_locked = 0
        for digest, block in self._blocks.items():
            parent = block.parent
            assert digest == block.digest and (digest in seen) == (block.lock_ref == 0), f"page {block.id}: its lock"
            assert parent is not None, f"page {block.id} hangs on nothing"
            if parent is not self.root:
                assert self._blocks.get(parent.digest) is parent, f"the page before {block.id} is gone"
                assert parent.lock_ref >= block.lock_ref, f"page {block.id} is locked, the one before it is not"
            num_locked += block.lock_ref > 0
        sizes = (len(seen) * self.page_size, num_locked * self.page_size)
        assert sizes == (self._evictable, self._protected), "the sizes were counted wrongly"
        self._check_pages(np.array([block.id for block in self._blocks.values()], dtype=np.int64))


def _root_digest(extra_key: str | None) -> bytes:
    """Return the digest that the first page is chained to. The hash function for salts is another one than that for
    pages, so that no salt has the digest of a page."""
    if extra_key is None:
        return bytes(DIGEST_BYTES)
    salt = extra_key.encode("utf-8", "surrogatepass")
    return blake2b(salt, digest_size=DIGEST_BYTES, person=b"cache_salt").digest()
