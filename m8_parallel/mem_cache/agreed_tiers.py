"""m4's tiers on a rank. Each keeps the KV of its heads in its own host memory and directory, and all decide the same.

No decision of the tree depends on when a copy between device and host ends. Two results may differ between ranks: a
copy fails on one of them, and a disk is slower or has lost a page. Both are reduced by MIN: what one rank lacks counts
as missing on all. SGLang does the same: `HiRadixCache` reduces the numbers of acknowledged copies and of pages by MIN.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.mem_cache.disk_radix_cache import DiskRadixCache
from m4_radix_cache.mem_cache.disk_tier import DiskTier, Prefetch
from m4_radix_cache.mem_cache.hiradix_cache import HiRadixCache
from m4_radix_cache.mem_cache.host_copies import CopyJob
from m8_parallel.ranks import Ranks


def agree(job: CopyJob, ranks: Ranks) -> None:
    """Wait for a write of this rank; one that has failed on another rank has failed here, too."""
    if job.kind == "write" and not ranks.is_lost:
        job.wait()
        if not ranks.smallest(job.error is None)[0]:
            job.error = job.error or OSError("another rank could not copy its part")


class AgreedCache(HiRadixCache):
    """The tree over both memories. A write that has failed on one rank has failed on all (`_acknowledge`)."""

    def __init__(self, *, ranks: Ranks, **parts: Any) -> None:
        """`parts`: as m4's."""
        self.ranks = ranks
        super().__init__(**parts)

    def _acknowledge(self) -> None:
        agree(self._jobs[0], self.ranks)
        super()._acknowledge()


class AgreedDiskCache(DiskRadixCache):
    """The tree over three tiers. A page is on the disk if all ranks have it (`_acknowledge`, `_host_pages`,
    `_take`)."""

    def __init__(self, *, ranks: Ranks, open_disk: Callable[[str | None], DiskTier], **parts: Any) -> None:
        """`parts`: as m4's."""
        self.ranks, self.prefetch_class = ranks, partial(AgreedPrefetch, ranks)  # type: ignore[misc, assignment]

        def opened(model: str | None) -> Any:
            if model is None:  # the engine is built, and the ranks agree on the whole of that
                return AgreedDisk(open_disk(None), ranks)
            return AgreedDisk(ranks.agreed(lambda: open_disk(model)), ranks)

        super().__init__(open_disk=opened, **parts)

    def _acknowledge(self) -> None:
        agree(self._jobs[0], self.ranks)
        super()._acknowledge()

    def _host_pages(self, num_pages: int, rids: Sequence[str | None]) -> Slots | None:
        """As in m4; the disk tier of one rank may use pages that are free on another one."""
        self.evict_host(int(self.ranks.largest(self.host.num_missing(num_pages))[0]), rids)
        pages = self.host.alloc(num_pages)
        if not self.ranks.smallest(pages is not None)[0] and pages is not None:
            self.host.free(pages)
            return None
        return pages

    def _take(self, prefetch: Prefetch) -> None:
        assert isinstance(prefetch, AgreedPrefetch)
        prefetch.agree()
        super()._take(prefetch)


class AgreedDisk:
    """The disk tier of a rank."""

    def __init__(self, tier: DiskTier, ranks: Ranks) -> None:
        self._tier, self._ranks = tier, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def contains(self, digest: bytes) -> bool:
        """Return whether all ranks have a page."""
        return bool(self._ranks.smallest(self._tier.contains(digest))[0])


class AgreedPrefetch(Prefetch):
    """A prefetch of all ranks: it is over when it is on each of them (`is_over`), and what has arrived is what all
    have."""

    def __init__(self, ranks: Ranks, *arguments: Any) -> None:
        """`arguments`: as m4's."""
        self.ranks = ranks
        self._agreed: int | None = None
        super().__init__(*arguments)

    @property
    def num_arrived(self) -> int:
        """Pages that are complete here; once they are agreed on, those that are complete on all ranks."""
        return self._here if self._agreed is None else self._agreed

    @num_arrived.setter
    def num_arrived(self, number: int) -> None:
        self._here = number

    def is_over(self, page_size: int) -> bool:
        """As in m4, for all ranks."""
        return bool(self.ranks.smallest(super().is_over(page_size))[0])

    def agree(self) -> None:
        """Limit `num_arrived` to the pages that are complete on all ranks. Every rank calls this."""
        self._agreed = int(self.ranks.smallest(self._here)[0])
