"""Node of the tree with tiers: where the KV of its tokens is.

`TreeNode` has slots on the device only. SGLang: `TreeNode` in `mem_cache/radix_cache.py`, with
`host_value` and `hash_value`.
"""

from dataclasses import dataclass, field

from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.base_prefix_cache import NO_SLOTS
from m4_radix_cache.mem_cache.host_copies import CopyJob
from m4_radix_cache.mem_cache.tree_node import TreeNode


@dataclass(slots=True, eq=False, repr=False)
class TieredNode(TreeNode):
    """A node with KV on the device (`value`), on the host, or both. Without KV on the device `value` is empty."""

    host_pages: Slots = field(default_factory=lambda: NO_SLOTS)
    """Its pages in host memory, int64 `[num_pages]`; empty if it has none."""
    num_on_device: int = 0
    """Children with KV on the device."""
    host_ref: int = 0
    """Uses that protect its host pages although it is a leaf."""
    digests: list[bytes] | None = None
    """Names of its pages on the disk, as far as they have one; None: not computed yet."""
    is_on_disk: bool = False
    """Whether its pages were given to the disk tier."""
    job: CopyJob | None = None
    """The copy that is not acknowledged."""

    @property
    def is_backed(self) -> bool:
        """Whether the host has its pages, or gets them."""
        return len(self.host_pages) > 0

    @property
    def state(self) -> str:
        """Return `device`, `writing`, `both`, `loading` or `host`."""
        if not len(self.value):
            return "host"
        if self.job is not None:
            return "writing" if self.job.kind == "write" else "loading"
        return "both" if self.is_backed else "device"

    def check(self, page_size: int) -> None:
        """Raise `AssertionError` if its fields contradict each other, or those of its neighbours."""
        parent, sizes = self.parent, (len(self.value), len(self.host_pages) * page_size)
        assert parent is not None and parent.children[self.edge] is self, f"{self!r} is not below its parent"
        assert any(sizes) and set(sizes) <= {0, self.num_tokens}, f"{self!r}: its sizes are {sizes}"
        is_top = parent.parent is None
        assert not len(self.value) or is_top or len(parent.value), f"{self!r}: its parent is not there"
        on_device = [child for child in self.children.values() if len(child.value)]
        assert self.num_on_device == len(on_device), f"{self!r} miscounts its children"
        below = sum(child.lock_ref for child in on_device)
        assert self.lock_ref >= below and (len(self.value) or not self.lock_ref), f"{self!r}: its locks"
        assert not self.host_ref, f"{self!r} is in use on the host, between two calls"
        is_candidate = (not self.num_on_device and not self.lock_ref) if len(self.value) else not self.children
        assert (self.entry is not None) == is_candidate, f"{self!r} is a candidate wrongly, or should be one"
