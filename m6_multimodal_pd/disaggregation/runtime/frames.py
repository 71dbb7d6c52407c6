"""Frames: the places for pages in the memory between two engines, and which of them are on their way.

A frame is held from the moment a page is copied into it until the other side says that it has read it. Only what is
held is written down, by the number of the transfer, and all else is free: so nothing can be lost between two lists, and
a transfer is there or not, never half. New in this milestone. SGLang: `StagingAllocator` in
`disaggregation/common/staging_buffer.py`, a ring; vLLM's NIXL connector needs no frames, its card reads the KV memory.

    frames   0   1   2   3   4   5   6   7      held  {7: [0, 2), 9: [5, 6)}
             7   7   .   .   .   9   .   .      holes [2, 5), [6, 8)
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple


class Extent(NamedTuple):
    """Frames that lie side by side."""

    first: int
    num_frames: int


class Frames:
    """Which of `num_frames` frames are held, by which transfer."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self._held: dict[int, tuple[Extent, ...]] = {}

    @property
    def num_free(self) -> int:
        """Frames that no transfer holds."""
        return self.num_frames - sum(extent.num_frames for extent in self._extents())

    def find(self, count: int) -> tuple[Extent, ...] | None:
        """Where `count` pages could go; None if so many frames are not free. Nothing is held yet.

        The first hole that is large enough; if there is none, as many holes as it takes, the lowest first.
        """
        holes = self._holes()
        for hole in holes:
            if hole.num_frames >= count > 0:
                return (Extent(hole.first, count),)
        found = []
        for hole in holes:
            if not count:
                break
            found.append(Extent(hole.first, min(hole.num_frames, count)))
            count -= found[-1].num_frames
        return None if count else tuple(found)

    def hold(self, number: int, extents: tuple[Extent, ...]) -> None:
        """These frames, found before, are now those of transfer `number`."""
        self._held[number] = extents

    def free(self, number: int) -> bool:
        """Free what transfer `number` holds; False if there is no such transfer."""
        return self._held.pop(number, None) is not None

    def check_invariants(self) -> None:
        """Raise AssertionError unless every held frame exists and is held once, and the holes are all others."""
        fault = fault_of(list(self._extents()), self.num_frames)
        assert fault is None, fault
        assert sum(hole.num_frames for hole in self._holes()) == self.num_free, "holes and free frames differ"

    def _extents(self) -> Iterable[Extent]:
        return chain.from_iterable(self._held.values())

    def _holes(self) -> list[Extent]:
        """What lies between the held extents, from low to high; neighbours are one hole."""
        holes, start = [], 0
        for first, count in [*sorted(self._extents()), Extent(self.num_frames, 0)]:
            if first > start:
                holes.append(Extent(start, first - start))
            start = first + count
        return holes


def fault_of(extents: Sequence[Extent], num_frames: int) -> str | None:
    """What is wrong with these extents of so many frames, in words; None: nothing is.

    Each has at least one frame, all of them exist, and none is in two extents.
    """
    end = 0
    for first, count in sorted(extents):
        if count < 1 or first < 0 or first + count > num_frames:
            return f"{count} frames from frame {first} on are not among {num_frames} frames"
        if first < end:
            return f"frame {first} is in two extents"
        end = first + count
    return None
