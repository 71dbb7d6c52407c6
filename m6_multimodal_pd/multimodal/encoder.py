"""Step 8 of an image's way: the embeddings that a batch needs, from the embedding cache or from the vision tower.

All items that are new in a step go through the vision tower in one pass, those of different requests together; an item
that two requests have is encoded once. The embeddings are kept by content, for the next piece of a prompt that ends
inside an image, and for later requests. New in this milestone. SGLang: `general_mm_embed_routine`; vLLM:
`_execute_mm_encoder` and `_gather_mm_embeddings` of its model runner.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m1_single_request.tracer import Tracer
from m6_multimodal_pd.events import EncoderHit, EncoderRun
from m6_multimodal_pd.models.vision import VisionTower
from m6_multimodal_pd.multimodal.embedding_cache import EmbeddingCache
from m6_multimodal_pd.multimodal.inputs import MultimodalDataItem
from m6_multimodal_pd.outputs import EngineStats


@dataclass(frozen=True)
class ItemSlice:
    """Consecutive embeddings of one item that a step reads for one request."""

    item: MultimodalDataItem
    rid: str
    """Request id."""
    row: int
    """Row of the request in the batch."""
    place: int
    """Index of the first of their tokens among the request's new tokens."""
    first: int
    """Index of the first embedding in the item."""
    count: int
    """Number of embeddings."""


TOTALS = [name for name in EngineStats.__annotations__ if name != "embedding_cache_bytes"]
"""The fields that m6's `EngineStats` adds and the encoder counts."""


class Encoder:
    """Computes embeddings of images and videos, keeps them, and counts the work."""

    def __init__(self, *, tower: VisionTower | None, cache: EmbeddingCache, budget: int, tracer: Tracer) -> None:
        """`tower`: None for a model without vision. `budget`: maximum number of embeddings computed per step; the
        scheduler observes it, the encoder only traces it."""
        self.tower, self.cache, self.budget, self.tracer = tower, cache, budget, tracer
        self.totals: dict[str, Any] = dict.fromkeys(TOTALS, 0)
        """By field of `EngineStats`. A new dictionary each time, so that a caller can keep an earlier one."""

    def embed(self, slices: Sequence[ItemSlice]) -> list[Tensor]:
        """Return the embeddings of each slice of a step, `[count, width]`; compute those that the cache lacks."""
        items = {s.item.hash: s.item for s in slices}
        known = {content: found for content in items if (found := self.cache.get(content)) is not None}
        missing = [item for content, item in items.items() if content not in known]
        self._count_hits(slices, known)
        if missing:
            rids = dict.fromkeys(s.rid for s in slices if s.item.hash not in known)
            first_rid = {s.item.hash: s.rid for s in reversed(slices)}
            known |= self._run(missing, tuple(rids))
            num_evicted = self.cache.num_evicted
            for item in missing:
                if known[item.hash].isfinite().all():  # NaN and infinity end this step's request, and no later one
                    # if the cache keeps none of it, the next step that needs it encodes it again
                    self.cache.put(item.hash, known[item.hash], items.keys(), first_rid[item.hash])
            self._add(num_evicted_items=self.cache.num_evicted - num_evicted)
        return [known[s.item.hash][s.first : s.first + s.count] for s in slices]

    def clear(self) -> None:
        """Remove all embeddings."""
        self.cache.clear()

    def close(self) -> None:
        """Remove all embeddings and the vision tower; the engine object may live on."""
        self.clear()
        self.tower = None

    def _run(self, items: list[MultimodalDataItem], rids: tuple[str, ...]) -> dict[str, Tensor]:
        """Run the vision tower over items of these requests; return their embeddings by content."""
        assert self.tower is not None
        began = time.perf_counter()
        embeddings = self.tower.encode([(torch.from_numpy(item.feature), item.grid_thw) for item in items])
        seconds = time.perf_counter() - began
        num_tokens = sum(item.num_tokens for item in items)
        self._add(
            num_encoder_runs=1, num_encoded_items=len(items), num_encoded_tokens=num_tokens, encoder_seconds=seconds
        )
        self.tracer.emit(
            EncoderRun,
            rids=rids,
            hashes=tuple(item.hash for item in items),
            num_tokens=num_tokens,
            num_patches=sum(len(item.feature) for item in items),
            budget=self.budget,
            milliseconds=seconds * 1e3,
        )
        return {item.hash: own for item, own in zip(items, embeddings, strict=True)}

    def _add(self, **amounts: float) -> None:
        self.totals = {name: total + amounts.get(name, 0) for name, total in self.totals.items()}

    def _count_hits(self, slices: Sequence[ItemSlice], known: dict[str, Tensor]) -> None:
        """Count the requests' reads of embeddings that another step, or another request of this step, computes."""
        makers: dict[str, int] = {}
        read: dict[tuple[str, str], int] = {}
        for s in slices:
            if s.item.hash in known or makers.setdefault(s.item.hash, s.row) != s.row:
                read[s.rid, s.item.hash] = read.get((s.rid, s.item.hash), 0) + s.count
        self._add(num_encoder_hits=len(read))
        sizes = {s.item.hash: s.item.num_tokens for s in slices}
        for (rid, content), num_read in read.items():
            self.tracer.emit(EncoderHit, rid=rid, hash=content, num_tokens=sizes[content], num_read=num_read)
