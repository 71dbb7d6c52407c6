"""Build the prefix cache of m4: a tree in which requests find the KV of tokens that others have computed.

A node holds a run of tokens and the slots of their KV, in whole pages. Its children continue it. A lookup follows the
tokens of a request from the root; a node in which the common tokens end is split in two. Running requests lock the
path that they read, and `evict` frees leaves without a lock. It is hard because all of this happens at once: a node is
split while a request holds it, and a page that is freed too early belongs to two requests, without any error.

Build `eviction_heap` and `eviction_strategy` first: `eviction.py`, which this starter imports, has the answers of both.

Explained in docs/m4_radix_cache.md#radixcache-match-insert-split.

    cp starters/prefix_cache.py my_radix.py
    pytest --part prefix_cache=my_radix.py:MyRadixCache
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.base_prefix_cache import NO_SLOTS, BasePrefixCache, MatchResult
from m4_radix_cache.mem_cache.events import Inserted, Split
from m4_radix_cache.mem_cache.eviction import STRATEGIES, EvictionHeap, EvictionStrategy
from m4_radix_cache.mem_cache.radix_key import (
    TOKEN_BYTES,  # noqa: F401 - for you
    RadixKey,
)
from m4_radix_cache.mem_cache.tree_node import Edge, TreeNode


class GivenTree(BasePrefixCache):
    """What is given: the empty tree, new nodes, events of the trace, and checks. There is nothing to write here.

    `BasePrefixCache` has the sizes and the way of a request's KV into the cache. In it `page_size` is in tokens, and
    `page_key_bytes` is the size of a page in bytes of a key.
    """

    strategies: ClassVar[Mapping[str, EvictionStrategy]] = STRATEGIES
    """From a node to its rank, by the name of the policy. A subclass may have others, if its
    `eviction_policies` names them, too."""

    def _start_empty(self) -> None:
        """Make the cache empty. Called at the start and by `reset`."""
        self.root: Any = TreeNode(0, None, edge=b"", key=b"", value=NO_SLOTS, lock_ref=1)  # it is never evicted
        self.time = 0
        """Number of lookups so far."""
        self.candidates = EvictionHeap(self.strategies[self.eviction_policy])
        """For unlocked leaves: `push`, `discard`, `pop`. A candidate whose rank changes must be pushed again; the
        `entry` of a node is None if it is no candidate."""
        self._num_nodes_ever = 0

    def new_node(self, parent: TreeNode, edge: Edge, key: bytes, value: Slots) -> TreeNode:
        """Put a new node into `parent.children[edge]`. `key`: its tokens, 4 bytes each. `value`: their slots."""
        self._num_nodes_ever += 1
        node = TreeNode(self._num_nodes_ever, parent, edge, key, value, self.time, self.time)
        parent.children[edge] = node
        return node

    def was_inserted(
        self, node: TreeNode, parent: TreeNode, key: RadixKey, value: Slots, existing: int, priority: int
    ) -> int:
        """Count the new tokens as evictable, and trace. `node`: where the tokens end. `parent`: the node above the new
        one; the same as `node` if no token was new. Return `existing`."""
        self._evictable += len(value) - existing
        self.tracer.emit(Inserted.of, self, node, parent, key, value, existing, priority)
        return existing

    def was_split(self, upper: TreeNode, node: TreeNode, rid: str | None) -> None:
        """Trace a split."""
        self.tracer.emit(Split.of, upper, node, rid)

    def node_len(self, node: TreeNode) -> int:
        return len(node.value)

    def nodes(self) -> Iterator[TreeNode]:
        """Yield all nodes but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_invariants(self) -> None:
        nodes = list(self.nodes())
        sizes = [sum(len(node.value) for node in nodes if bool(node.lock_ref) == locked) for locked in (False, True)]
        assert sizes == [self._evictable, self._protected], "the sizes were counted wrongly"
        assert all(len(node.value) % self.page_size == 0 for node in nodes), "a node has a part of a page"
        firsts = [node.value[:: self.page_size] for node in nodes]
        self._check_pages(np.concatenate([NO_SLOTS, *firsts]) // self.page_size)


class MyRadixCache(GivenTree):
    """The tree. All sizes are in tokens, and everything in it is a whole number of pages.

    A node is a `TreeNode`: `parent`, `children`, `key`, `value`, and the fields by which it is evicted. The keys of
    `children` are your choice, as long as it finds a child by its first page. `key.data` has the tokens of a
    `RadixKey` as bytes, 4 each (`TOKEN_BYTES`), and `key.token_ids(start, end)` as a list. Tokens are the same only in
    the same namespace, `key.extra_key`.

    `new_node` sets `edge` of a node to its key among the `children` of its parent. Only your own methods read it. If
    they do, set it again when a node gets another parent or another first page.
    """

    def match_prefix(self, key: RadixKey, max_len: int | None = None) -> MatchResult:
        """Return the longest cached prefix of the first `max_len` tokens of `key` (None: of all), in whole pages.

        That is `MatchResult(slots, node)`: int64 `[num_tokens]`, and the node at which they end; without a common page
        `NO_SLOTS` and the root. A node in which the common pages end is split, so that one ends there. A lookup counts
        as a use: `self.time` grows by one, and is the new `last_access_time` of all nodes on the path.
        """
        raise NotImplementedError

    def insert(self, key: RadixKey, value: Slots, priority: int = 0) -> int:
        """Cache the first `len(value)` tokens of `key`, a whole number of pages, whose KV lies in the slots `value`.

        Return how many of them were cached already. Of these the tree keeps the slots that it has, and those in `value`
        still belong to the caller. The rest becomes one new leaf, with a copy of its slots; it is a candidate, and the
        node above it is none. An insert is a lookup, too: it splits, and sets access times. Every node on the path, new
        or not, has at least this `priority` afterwards. The lower half of a node that was split is not on the path.

        Without tokens no node is on the path: none is used, and 0 is returned. Otherwise end with
        `return self.was_inserted(...)`.
        """
        raise NotImplementedError

    def _split(self, node: TreeNode, num_bytes: int, rid: str | None) -> TreeNode:
        """Divide `node`: the first `num_bytes` of its key go to a new node above it, which is returned.

        A request may hold `node` as its handle, with a lock that it will remove later. So the old object keeps the
        tail, and stands for the whole path as before. The new one has as many locks and hits and the same priority. Its
        `creation_time` is your choice: the present time, which `new_node` sets, or that of the old one. The access time
        of the tail is your choice, too: it stays, or is that of the lookup, which has used a part of the node.

        End with `self.was_split(upper, node, rid)`; `rid` is `key.rid` of the lookup. It is called by your own methods
        only.
        """
        raise NotImplementedError

    def inc_lock_ref(self, node: TreeNode, rid: str | None = None) -> None:
        """Add one to `lock_ref` of `node` and of all above it, except the root. None of them is a candidate any more.

        End with `self._lock_moved(node, 1, num_tokens, rid)`, where `num_tokens` is the number of tokens on this path
        that had no lock before: they become protected. The root may be passed; then nothing changes.
        """
        raise NotImplementedError

    def dec_lock_ref(self, node: TreeNode, rid: str | None = None) -> None:
        """Remove one such lock: on the path as it is now. A leaf without a lock is a candidate again.

        End with `self._lock_moved(node, -1, num_tokens, rid)`, where `num_tokens` is the number of tokens on this path
        that have no lock any more.
        """
        raise NotImplementedError

    def record_hit(self, node: TreeNode, rid: str | None = None) -> None:
        """Add one to `hit_count` of `node` and of all above it, except the root. `rid`: given, for the trace."""
        raise NotImplementedError

    def evict(self, num_tokens: int, rids: Sequence[str] = ()) -> int:
        """Free whole leaves without a lock until at least `num_tokens` are free, or no such leaf is left.

        The leaf with the smallest rank goes first: `self.strategies[self.eviction_policy](node)`; `self.candidates`
        pops them in this order. A node that has lost its last child is a leaf, and may be next; the root stays. Nobody
        reads the `parent` of an evicted node: it may be None, or stay as it is.

        Return the number of freed tokens, 0 if there are none; otherwise end with
        `return self._evicted(num_tokens, rids, slots, nodes, freed)`, which frees the pages: `slots` are those of all
        evicted nodes in one array, `nodes` is a list of (id, number of tokens), and `freed` the number of tokens.
        """
        raise NotImplementedError
