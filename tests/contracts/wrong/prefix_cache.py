"""Typical mistakes in a prefix cache, each with the hint that it must get."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES
from tests.m4_radix_cache.caches import ForgetsSalts


class PartsOfPages(RadixCache):
    """A match ends at the first token that differs."""

    def match_prefix(self, key: Any, max_len: int | None = None) -> Any:
        match = super().match_prefix(key, max_len)
        end = len(key) if max_len is None else min(len(key), max_len)
        rest = key.data[len(match.device_indices) * TOKEN_BYTES : end * TOKEN_BYTES]
        for child in match.last_device_node.children.values():
            if rest and child.key.startswith(rest):
                slots = np.concatenate((match.device_indices, child.value[: len(rest) // TOKEN_BYTES]))
                return match._replace(device_indices=slots)
        return match


class TakesTheCallersArray(RadixCache):
    """A new leaf has a view of the slots that were passed."""

    def insert(self, key: Any, value: Any, priority: int = 0) -> int:
        if not len(value):
            return 0
        existing, leaf = self._insert(key, value, priority)
        if existing < len(value):
            leaf.value = value[existing:]
        return existing


class NewObjectKeepsTheTail(RadixCache):
    """After a split the handle of a request ends in the middle of its path."""

    def _split(self, node: Any, num_bytes: int, rid: str | None) -> Any:
        upper = super()._split(node, num_bytes, rid)
        lower, parent = node, upper.parent
        for name in ("key", "value", "edge", "children"):
            old, new = getattr(upper, name), getattr(lower, name)
            setattr(upper, name, new)
            setattr(lower, name, old)
        parent.children[lower.edge] = lower
        lower.parent, upper.parent = parent, lower
        lower.children = {upper.edge: upper}
        for child in upper.children.values():
            child.parent = upper
        self._candidates.discard(lower)
        if not upper.children and not upper.lock_ref:
            self._candidates.push(upper)
        return lower


class UpperHalfIsUnlocked(RadixCache):
    """The new node of a split has no locks."""

    def _split(self, node: Any, num_bytes: int, rid: str | None) -> Any:
        upper = super()._split(node, num_bytes, rid)
        upper.lock_ref = 0
        return upper

    def dec_lock_ref(self, node: Any, rid: str | None = None) -> None:
        last, moved = node, 0
        while node is not self.root:
            node.lock_ref -= 1
            if node.lock_ref == 0:
                moved += len(node.value)
                if not node.children:
                    self._candidates.push(node)
            node = node.parent
        self._lock_moved(last, -1, moved, rid)


class LocksOneNode(RadixCache):
    """What is above a locked node is not locked."""

    def inc_lock_ref(self, node: Any, rid: str | None = None) -> None:
        if node is not self.root:
            is_first = not node.lock_ref
            node.lock_ref += 1
            self._candidates.discard(node)
            self._lock_moved(node, 1, len(node.value) * is_first, rid)


class EveryLockMoves(RadixCache):
    """A second lock moves the tokens to the protected ones once more."""

    def _lock_moved(self, node: Any, delta: int, num_tokens: int, rid: str | None) -> None:
        length, above = 0, node
        while above is not self.root:
            length += len(above.value)
            above = above.parent
        super()._lock_moved(node, delta, length, rid)


class LookupsAreNoUse(RadixCache):
    """Access times change, but no rank."""

    def _touched(self, last: Any) -> None:
        pass


class ParentsStay(RadixCache):
    """A node that has lost its last child is no candidate."""

    def evict(self, num_tokens: int, rids: Sequence[str] = ()) -> int:
        parents = {node for node in self.nodes() if node.children}
        push = self._candidates.push
        self._candidates.push = lambda node: None if node in parents else push(node)  # type: ignore[method-assign]
        try:
            return super().evict(num_tokens, rids)
        finally:
            self._candidates.push = push  # type: ignore[method-assign]


class EvictsInnerNodes(RadixCache):
    """The smallest rank goes first, children or not."""

    def evict(self, num_tokens: int, rids: Sequence[str] = ()) -> int:
        freed: list[Any] = []
        unlocked = [node for node in self.nodes() if not node.lock_ref]
        for node in sorted(unlocked, key=lambda node: (self._candidates.strategy(node), node.id)):
            if sum(len(each.value) for each in freed) < num_tokens:
                freed.append(node)
                self._candidates.discard(node)
                del node.parent.children[node.edge]
        if not freed:
            return 0
        slots = np.concatenate([node.value for node in freed])
        return self._evicted(num_tokens, rids, slots, [(node.id, len(node.value)) for node in freed], len(slots))


class CountsNoHits(RadixCache):
    """Least frequently used is least recently used."""

    def record_hit(self, node: Any, rid: str | None = None) -> None:
        pass


class UnlockedLeavesAreForgotten(RadixCache):
    """A leaf whose last lock is removed does not become a candidate."""

    def dec_lock_ref(self, node: Any, rid: str | None = None) -> None:
        super().dec_lock_ref(node, rid)
        if not node.lock_ref:
            self._candidates.discard(node)


class OldPriority(RadixCache):
    """An insert does not raise the priority of what is there."""

    def _walk(self, key: Any, end: int, priority: int) -> Any:
        return super()._walk(key, end, 0)


class RaisesTheLastNode(RadixCache):
    """An insert raises the priority of the node at which it ends, and of none above it."""

    def _insert(self, key: Any, value: Any, priority: int) -> Any:
        existing, leaf = super()._insert(key, value, 0)
        leaf.priority = max(leaf.priority, priority)
        self._touched(leaf)
        return existing, leaf


class RaisesTheTail(RadixCache):
    """The priority is raised before a node is split."""

    priority = 0

    def _walk(self, key: Any, end: int, priority: int) -> Any:
        self.priority = priority
        return super()._walk(key, end, priority)

    def _split(self, node: Any, num_bytes: int, rid: str | None) -> Any:
        node.priority = max(node.priority, self.priority)
        return super()._split(node, num_bytes, rid)


class NothingIsAUse(RadixCache):
    """An insert looks its whole key up, with or without tokens to insert."""

    def insert(self, key: Any, value: Any, priority: int = 0) -> int:
        self.match_prefix(key)
        return super().insert(key, value, priority)


WRONG = [
    (NewObjectKeepsTheTail, "the old object keeps the tail"),
    (PartsOfPages, "A page belongs to a match as a whole"),
    (TakesTheCallersArray, "the caller's array may change"),
    (ForgetsSalts, "extra_key belongs to what finds the first node"),
    (UpperHalfIsUnlocked, "the new one above it has as many locks"),
    (LocksOneNode, "for all above it, up to the root"),
    (EveryLockMoves, "only a first lock moves its tokens"),
    (LookupsAreNoUse, "A lookup or an insert is a use"),
    (ParentsStay, "A parent that has lost its last child is a leaf"),
    (EvictsInnerNodes, "Only leaves are evicted"),
    (CountsNoHits, "record_hit adds a hit"),
    (UnlockedLeavesAreForgotten, "After the last unlock a leaf is a candidate again"),
    (OldPriority, "An insert raises the priority"),
    (RaisesTheLastNode, "of all nodes on its path"),
    (RaisesTheTail, "the tail is not on the path"),
    (NothingIsAUse, "no node is on its path"),
]
