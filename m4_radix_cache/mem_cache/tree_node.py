"""Node of the radix tree: a run of tokens, the slots of their KV, and the counts by which it is evicted.

SGLang: `TreeNode` in `mem_cache/radix_cache.py`.
"""

from dataclasses import dataclass, field
from typing import Any

from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES

Edge = bytes | tuple[str | None, bytes]
"""Key of a node among its siblings: its first page; below the root with the namespace before it."""


@dataclass(slots=True, eq=False, repr=False)
class TreeNode:
    """A run of cached tokens that follow those of its parent. Handle of a match; only the cache changes it."""

    id: int
    """Its number; 0 is the root."""
    parent: "TreeNode | None"
    """None for the root, and for a node that was evicted."""
    edge: Edge
    key: bytes
    """Its tokens, as in `RadixKey.data`."""
    value: Slots
    """Slots of its tokens, `[num_tokens]`."""
    creation_time: int = 0
    """Number of lookups in the cache before it was created."""
    last_access_time: int = 0
    """Number of the last lookup that passed it."""
    lock_ref: int = 0
    """Locks on it or below it."""
    hit_count: int = 0
    """Requests that started from it or from below it."""
    priority: int = 0
    """The highest priority of the requests that inserted it."""
    children: dict[Edge, "TreeNode"] = field(default_factory=dict)
    entry: tuple[Any, int, "TreeNode"] | None = None
    """Its valid entry in the `EvictionHeap`; None if it is no candidate."""

    @property
    def num_tokens(self) -> int:
        return len(self.key) // TOKEN_BYTES

    def __repr__(self) -> str:
        return f"TreeNode({self.id}, {self.num_tokens} tokens, {len(self.children)} children, lock_ref={self.lock_ref})"
