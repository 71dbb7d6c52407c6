"""The prefix cache as a tree: a common prefix is one path from the root, and is stored once.

A node holds a run of tokens and the slots of their KV, both in whole pages. Its children begin with different pages:

    root ── "You are a helpful assistant." ─┬─ " Translate: ..."
             slots 16-47                    └─ " Summarise: ..." ── " In short, ..."

`match_prefix` follows a request's tokens down the tree, `insert` adds the rest below, and both split a node in which
the common tokens end. A lock protects a path while a request reads it; `evict` removes leaves without a lock, so the
ends of conversations are evicted before the prefixes that they share. m3 freed everything at once when a request ended.
SGLang: `mem_cache/radix_cache.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.base_prefix_cache import NO_SLOTS, BasePrefixCache, MatchResult
from m4_radix_cache.mem_cache.events import Inserted, Split
from m4_radix_cache.mem_cache.eviction import STRATEGIES, EvictionHeap, EvictionStrategy
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES, RadixKey
from m4_radix_cache.mem_cache.tree_node import Edge, TreeNode


class RadixCache(BasePrefixCache):
    """The tree. All sizes are in tokens, and everything in it is a whole number of pages."""

    strategies: ClassVar[Mapping[str, EvictionStrategy]] = STRATEGIES
    """Strategies by the name of the policy. A subclass may have others, if its `eviction_policies` names them, too."""
    node_class: ClassVar[type[TreeNode]] = TreeNode

    def _start_empty(self) -> None:
        self.root: Any = self.node_class(0, None, edge=b"", key=b"", value=NO_SLOTS, lock_ref=1)  # it is never evicted
        self._candidates = EvictionHeap(self.strategies[self.eviction_policy])  # unlocked leaves
        self._time = 0
        self._num_nodes_ever = 0

    # --- match --------------------------------------------------------------------------------------------------------

    def match_prefix(self, key: RadixKey, max_len: int | None = None) -> MatchResult:
        num_tokens = len(key) if max_len is None else max(0, min(len(key), max_len))
        node, values, _ = self._walk(key, num_tokens // self.page_size * self.page_key_bytes, 0)
        return MatchResult(np.concatenate(values) if values else NO_SLOTS, node)

    def _walk(self, key: RadixKey, end: int, priority: int) -> tuple[Any, list[Slots], int]:
        """Follow the first `end` bytes of `key` down the tree, and split the node in which they differ from it.

        Returns the last node, the slots on the path, and the number of bytes found.
        """
        node: TreeNode = self.root
        offset, values = 0, list[Slots]()
        if not end:
            return node, values, offset
        data, page_bytes = key.data, self.page_key_bytes
        self._time = now = self._time + 1
        edge: Edge = (key.extra_key, data[:page_bytes])
        while offset < end and (child := node.children.get(edge)) is not None:
            child.last_access_time = now
            if not data.startswith(child.key, offset, end):
                child = self._split(child, self._num_common(child.key, data, offset, end), key.rid)
            if child.priority < priority:
                child.priority = priority
            node = child
            values.append(node.value)
            offset += len(node.key)
            edge = data[offset : offset + page_bytes]
        self._touched(node)
        return node, values, offset

    def _touched(self, last: Any) -> None:
        """Update the rank of the candidates on the path to `last`; only the last node of a path can be a leaf."""
        if last.entry is not None:
            self._candidates.push(last)

    def _num_common(self, node_key: bytes, data: bytes, offset: int, end: int) -> int:
        """Return the number of bytes, in whole pages, that a node shares with `data` at `offset`; at least one page."""
        count = min(len(node_key), end - offset) // TOKEN_BYTES
        ours = np.frombuffer(node_key, dtype=np.int32, count=count)
        theirs = np.frombuffer(data, dtype=np.int32, count=count, offset=offset)
        differs = ours != theirs
        first = int(differs.argmax())
        num_tokens = first if differs[first] else count
        return num_tokens // self.page_size * self.page_key_bytes

    # --- insert and split ---------------------------------------------------------------------------------------------

    def insert(self, key: RadixKey, value: Slots, priority: int = 0) -> int:
        return self._insert(key, value, priority)[0] if len(value) else 0

    def _insert(self, key: RadixKey, value: Slots, priority: int) -> tuple[int, Any]:
        """Return what `insert` returns, and the node at which the tokens end."""
        end = len(value) * TOKEN_BYTES
        is_whole = end % self.page_key_bytes == 0 and end <= len(key.data)
        assert is_whole, f"{len(value)} slots for {key!r}: no whole pages"
        parent, _, offset = self._walk(key, end, priority)
        existing, leaf = self._attach(parent, value[: offset // TOKEN_BYTES], key.rid), parent
        if offset < end:
            page = key.data[offset : offset + self.page_key_bytes]
            edge: Edge = (key.extra_key, page) if parent is self.root else page
            # A copy: the slots of the tree do not change with the caller's array.
            leaf = self._new_node(parent, edge, key.data[offset:end], value[offset // TOKEN_BYTES :].copy())
            leaf.priority = priority
            self._evictable += len(leaf.value)
            self._candidates.discard(parent)
            self._candidates.push(leaf)
        self.tracer.emit(Inserted.of, self, leaf, parent, key, value, offset // TOKEN_BYTES, priority)
        return existing, leaf

    def _attach(self, node: Any, value: Slots, rid: str | None) -> int:
        """Return how many of the tokens down to the end of `node` are cached: all. `value`: the caller's slots."""
        return len(value)

    def _new_node(self, parent: TreeNode, edge: Edge, key: bytes, value: Slots) -> Any:
        self._num_nodes_ever += 1
        now, number = self._time, self._num_nodes_ever
        parent.children[edge] = node = self.node_class(number, parent, edge, key, value, now, now)
        return node

    def _split(self, node: Any, num_bytes: int, rid: str | None) -> Any:
        """Insert a new node with the first `num_bytes` of `node` above it, for the request `rid`; return it.

        The old object keeps the tail: as a handle it still stands for the whole path, locks included.
        """
        num_tokens = num_bytes // TOKEN_BYTES
        assert 0 < num_tokens < node.num_tokens, f"{node!r} cannot be split at {num_tokens}"
        upper = self._new_node(node.parent, node.edge, node.key[:num_bytes], node.value[:num_tokens].copy())
        upper.lock_ref, upper.priority, upper.hit_count = node.lock_ref, node.priority, node.hit_count
        node.key, node.value = node.key[num_bytes:], node.value[num_tokens:].copy()  # a view would keep both alive
        node.parent, node.edge = upper, node.key[: self.page_key_bytes]
        upper.children[node.edge] = node
        self._touched(node)
        self.tracer.emit(Split.of, upper, node, rid)
        return upper

    # --- lock ---------------------------------------------------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode, rid: str | None = None) -> None:
        last, moved = node, 0
        while node is not self.root:
            assert node.parent is not None, f"{node!r} was evicted"
            if not node.lock_ref:
                moved += len(node.value)
                self._candidates.discard(node)
            node.lock_ref += 1
            node = node.parent
        self._lock_moved(last, 1, moved, rid)

    def dec_lock_ref(self, node: TreeNode, rid: str | None = None) -> None:
        last, moved = node, 0
        while node is not self.root:
            assert node.parent is not None and node.lock_ref > 0, f"{node!r} is not locked"
            node.lock_ref -= 1
            if not node.lock_ref:
                moved += len(node.value)
                if self._is_leaf(node):
                    self._candidates.push(node)
            node = node.parent
        self._lock_moved(last, -1, moved, rid)

    def _is_leaf(self, node: Any) -> bool:
        """Return whether nothing that is below a node must be evicted before it."""
        return not node.children

    def record_hit(self, node: TreeNode, rid: str | None = None) -> None:
        """Add one hit to `node` and all above it."""
        last = node
        while node is not self.root:
            assert node.parent is not None, f"{node!r} was evicted"
            node.hit_count += 1
            node = node.parent
        self._touched(last)

    def node_len(self, node: TreeNode) -> int:
        return len(node.value)

    # --- evict --------------------------------------------------------------------------------------------------------

    def evict(self, num_tokens: int, rids: Sequence[str] = ()) -> int:
        """Free whole leaves, the smallest rank first, until at least `num_tokens` are free."""
        freed = 0
        nodes: list[TreeNode] = []
        while freed < num_tokens and (node := self._candidates.pop()) is not None:
            parent = node.parent
            assert parent is not None
            nodes.append(node)
            freed += len(node.value)
            node.parent = None
            del parent.children[node.edge]
            if not parent.children and not parent.lock_ref:
                self._candidates.push(parent)
        if not nodes:
            return 0
        slots = np.concatenate([node.value for node in nodes])
        return self._evicted(num_tokens, rids, slots, [(node.id, len(node.value)) for node in nodes], freed)

    # --- checks -------------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Any]:
        """Yield all nodes but the root, each before its children, the oldest child first."""
        stack = list(reversed(self.root.children.values()))
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def check_invariants(self) -> None:
        evictable = protected = num_candidates = 0
        pages: list[Slots] = [NO_SLOTS]
        for node in self.nodes():
            self._check_node(node)
            num_candidates += node.entry is not None
            evictable += 0 if node.lock_ref else len(node.value)
            protected += len(node.value) if node.lock_ref else 0
            pages.append(node.value[:: self.page_size] // self.page_size)
        assert (evictable, protected) == (self._evictable, self._protected), "the sizes were counted wrongly"
        assert num_candidates == len(self._candidates), "the candidates were counted wrongly"
        self._check_pages(np.concatenate(pages))

    def _check_node(self, node: TreeNode) -> None:
        parent, size = node.parent, len(node.value)
        assert parent is not None and parent.children[node.edge] is node, f"{node!r} is not below its parent"
        assert isinstance(node.edge, tuple) == (parent is self.root), f"{node!r} has an edge of the wrong kind"
        first = node.edge[1] if isinstance(node.edge, tuple) else node.edge
        assert node.key[: self.page_key_bytes] == first, f"{node!r} is found by tokens that it does not have"
        assert size and size % self.page_size == 0 and len(node.key) == size * TOKEN_BYTES, f"{node!r}: no whole pages"
        grid = node.value.reshape(-1, self.page_size)
        starts = grid[:, :1] // self.page_size * self.page_size
        assert (grid == starts + np.arange(self.page_size)).all(), f"{node!r}: its slots are no whole pages"
        below = sum(child.lock_ref for child in node.children.values())
        assert node.lock_ref >= below, f"{node!r} has fewer locks than what is below it"
        is_candidate = not node.children and not node.lock_ref
        assert (node.entry is not None) == is_candidate, f"{node!r} is a candidate wrongly, or should be one"
        if node.entry is not None:
            is_current = node.entry[0] == self._candidates.strategy(node)
            assert is_current, f"{node!r} had another rank: the strategy must be a function of the node, not NaN"
