"""What the vision tower has made, kept for whoever brings the same picture again.

The prefix cache saves the KV of a picture that stands behind the same text; this one saves the tower's work wherever
the picture stands, and for a prompt that is cut inside a picture it keeps the rest for the next piece. Entries are
known by content. They leave, the least recently used first, only when another one needs the room, and never in a step
that uses them. New in this milestone. vLLM: `EncoderCacheManager`; SGLang: `MultiModalStaticCache`.
"""

from collections import OrderedDict
from collections.abc import Collection

from torch import Tensor

from m1_single_request.tracer import Tracer
from m6_multimodal_pd.events import ItemEvicted


class EmbeddingCache:
    """Embeddings by the hash of their content, at most `capacity_bytes` together."""

    def __init__(self, *, capacity_bytes: int, tracer: Tracer) -> None:
        self.capacity_bytes = capacity_bytes
        self.tracer = tracer
        self.num_evicted = 0
        self._entries: OrderedDict[str, Tensor] = OrderedDict()  # the least recently used first

    @property
    def used_bytes(self) -> int:
        """What all entries take. Counted when it is asked for: an interrupt cannot leave it wrong."""
        return sum(entry.nbytes for entry in self._entries.values())

    def __contains__(self, content: str) -> bool:
        return content in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, content: str) -> Tensor | None:
        """The embeddings `[tokens, width]` of this content, which are now the latest used; None: they are not here."""
        entry = self._entries.get(content)
        if entry is not None:
            self._entries.move_to_end(content)
        return entry

    def put(self, content: str, embeddings: Tensor, in_use: Collection[str]) -> bool:
        """Keep these embeddings; others may have to leave for them, but none of those that are `in_use`.

        False if even then there is no room: nothing was kept, and nothing left.
        """
        if content in self._entries:
            return True
        needed = self.used_bytes + embeddings.nbytes - self.capacity_bytes
        leaving: list[str] = []
        for other, entry in self._entries.items():
            if needed <= 0:
                break
            if other not in in_use:
                leaving.append(other)
                needed -= entry.nbytes
        if needed > 0:
            return False
        for other in leaving:
            self._evict(other)
        self._entries[content] = embeddings
        return True

    def clear(self) -> None:
        """Keep nothing."""
        self._entries.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError if it holds more than it may; tests call it after each step."""
        assert self.used_bytes <= self.capacity_bytes

    def _evict(self, content: str) -> None:
        entry = self._entries.pop(content)
        self.num_evicted += 1
        self.tracer.emit(ItemEvicted.of, content, entry, self._entries.values())
