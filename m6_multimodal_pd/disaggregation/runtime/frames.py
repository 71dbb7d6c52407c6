"""Frames: the places for pages in the memory between two engines, and which of them hold pages in transit.

A frame is held from the moment a page is copied into it until the other engine reports that it has read the page. Only
held frames are recorded, by the number of their ticket; all others are free. So no frame can be lost between two lists.
The pages of a ticket are side by side. New in this milestone. SGLang: `StagingAllocator` in
`disaggregation/common/staging_buffer.py`, a ring; vLLM's NIXL connector needs no frames, its card reads the KV memory.

    frames   0   1   2   3   4   5   6   7      held  {7: [0, 2), 9: [5, 6)}
             7   7   .   .   .   9   .   .      holes [2, 5), [6, 8)
"""


class FramePool:
    """Which of `num_frames` frames are held, by which ticket."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self._held: dict[int, range] = {}

    @property
    def num_free(self) -> int:
        """Number of frames that no ticket holds."""
        return self.num_frames - sum(map(len, self._held.values()))

    def find(self, count: int) -> range | None:
        """Return the first `count` free frames side by side; None if there is no such hole. Holds nothing."""
        start = 0
        for held in [*sorted(self._held.values(), key=lambda frames: frames.start), range(self.num_frames, 0)]:
            if held.start - start >= count:
                return range(start, start + count)
            start = max(start, held.stop)  # no frames may be held, too
        return None

    def hold(self, number: int, frames: range) -> None:
        """Record that the ticket `number` holds these free frames."""
        self._held[number] = frames

    def free(self, number: int) -> bool:
        """Free the frames of ticket `number`; return False if there is no such ticket."""
        return self._held.pop(number, None) is not None

    def check_invariants(self) -> None:
        """Raise AssertionError unless every held frame exists and is held once."""
        held = [frame for frames in self._held.values() for frame in frames]
        assert len(set(held)) == len(held) and set(held) <= set(range(self.num_frames)), f"held frames: {held}"
