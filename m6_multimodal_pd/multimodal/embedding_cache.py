"""Step 9 of an image's way: its embeddings, kept for the next request with the same image.

The prefix cache saves the KV of an image after the same text; this cache saves the work of the vision tower wherever
the image stands, and the rest of an image for the next piece of a prompt that was cut inside it. An entry is found by
the hash of its content. The least recently used entries are evicted when another one needs the memory, but never in a
step that reads them. New in this milestone. vLLM: `EncoderCacheManager`; SGLang: `MultiModalStaticCache`.
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
        """Size of all entries, in bytes."""
        return sum(entry.nbytes for entry in self._entries.values())

    def __contains__(self, content: str) -> bool:
        return content in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, content: str) -> Tensor | None:
        """Return the embeddings `[tokens, width]` of a content and mark them as the latest used; None on a miss."""
        entry = self._entries.get(content)
        if entry is not None:
            self._entries.move_to_end(content)
        return entry

    def put(self, content: str, embeddings: Tensor, in_use: Collection[str], rid: str | None = None) -> bool:
        """Keep these embeddings; evict others for them, but none of those that are `in_use`.

        Returns False if that leaves too little room: then nothing is kept and nothing evicted.
        `rid`: id of the request that brings the content, for the trace.
        """
        if content in self._entries:
            return True
        needed = self.used_bytes + embeddings.nbytes - self.capacity_bytes
        victims: list[str] = []
        for other, entry in self._entries.items():
            if needed <= 0:
                break
            if other not in in_use:
                victims.append(other)
                needed -= entry.nbytes
        if needed > 0:
            return False
        for victim in victims:
            self._evict(victim, rid)
        self._entries[content] = embeddings
        return True

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError if the entries exceed the capacity; tests call it after each step."""
        assert self.used_bytes <= self.capacity_bytes

    def _evict(self, content: str, rid: str | None) -> None:
        entry = self._entries.pop(content)
        self.num_evicted += 1
        num_bytes, used_bytes = entry.nbytes, self.used_bytes
        self.tracer.emit(
            ItemEvicted, rid=rid, hash=content, num_tokens=len(entry), num_bytes=num_bytes, used_bytes=used_bytes
        )
