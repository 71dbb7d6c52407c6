"""Step 6 of an image's way: the data of it that its request keeps.

A prompt with an image is a list of token ids like any other: the image is a range of equal placeholder tokens, one for
each embedding that the vision tower computes. To the prefix cache two prompts with different images would be equal, and
would share KV. So in the cache's key each placeholder is replaced by its image's `pad_value`, a number outside the
vocabulary. Such a key is a `PaddedKey` and never a list: the ids of a list are token ids, which a tokenizer or the
model may read. New in this milestone. SGLang: `MultimodalInputs` and `MultimodalDataItem` in
`managers/schedule_batch.py`; vLLM: `MultiModalFeatureSpec`, whose `identifier` is part of a block's hash.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import accumulate, count

import numpy as np

from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES, RadixKey
from m6_multimodal_pd.events import ItemReceived, PositionsAssigned

LARGEST_PAD_VALUE = 2**31 - 1  # the cache's key has four bytes for a token

Range = tuple[int, int]
Grid = tuple[int, int, int]


class Modality(Enum):
    """Kind of an item."""

    IMAGE = "image"
    VIDEO = "video"


@dataclass(frozen=True, eq=False)
class MultimodalDataItem:
    """One image, or one video, of a prompt."""

    modality: Modality
    offsets: tuple[Range, ...]
    """Ranges `[start, end)` of its placeholders in the prompt: one for an image, one per frame for a video, because the
    time of each frame stands before it as text. Empty until the prompt is written."""
    feature: np.ndarray
    """float32 `[patches, patch_dim]`: the input of the vision tower."""
    grid_thw: Grid
    """Patches along time, height and width."""
    hash: str
    """sha256 of the content, in hex: of the feature, its shape and type, and of the processor's options."""
    size: tuple[int, int]
    """Width and height before resizing, in pixels."""
    pad_value: int | None = None
    """Number that replaces each of its placeholders in the cache's key: at least the size of the vocabulary. An engine
    sets it at intake, for its own cache; None before."""

    def __post_init__(self) -> None:
        if self.feature.dtype != np.float32 or self.feature.ndim != 2:
            raise ValueError("a feature is float32 [patches, patch_dim]")

    @property
    def num_tokens(self) -> int:
        """Number of its placeholders, and of its embeddings."""
        return sum(end - start for start, end in self.offsets)

    @property
    def start(self) -> int:
        """Index in the prompt of its first placeholder."""
        return self.offsets[0][0]

    @property
    def end(self) -> int:
        """Index after its last placeholder."""
        return self.offsets[-1][1]

    def rows(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Return its embeddings among the prompt's tokens `start` to `end`: runs of (index in prompt, first, last + 1).

        Such a range may begin or end inside an image: it is a piece of a prompt, or the part after a cache hit.
        """
        firsts = accumulate((stop - begin for begin, stop in self.offsets), initial=0)
        found = []
        for (begin, stop), first in zip(self.offsets, firsts, strict=False):
            low, high = max(begin, start), min(stop, end)
            if low < high:
                found.append((low, first + low - begin, first + high - begin))
        return found


class PaddedKey(RadixKey):
    """Key of a prompt with images: every placeholder is its item's `pad_value`, and `token_ids` ends before them.

    A pad value is no token id, and the placeholders of two images are equal; so neither is ever returned in a list.
    """

    __slots__ = ("offsets",)

    def __init__(
        self,
        token_ids: Sequence[int],
        extra_key: str | None,
        items: Sequence[MultimodalDataItem],
        rid: str | None = None,
    ) -> None:
        super().__init__(token_ids, extra_key, rid)
        self.offsets = [one for item in items for one in item.offsets]
        data = bytearray(self.data)
        for item in items:
            assert item.pad_value is not None, "the prompt has not passed the intake of an engine"
            for start, end in item.offsets:
                data[start * TOKEN_BYTES : end * TOKEN_BYTES] = RadixKey([item.pad_value] * (end - start)).data
        self.data = bytes(data)

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the token ids from index `start` to `end`, to the next image, or to the end of the key."""
        images = (max(first, start) for first, stop in self.offsets if stop > start)
        return super().token_ids(start, min([end, *images]))


@dataclass(frozen=True, eq=False)
class MultimodalInputs:
    """All images and videos of a prompt, and the positions that they give to its tokens."""

    mm_items: tuple[MultimodalDataItem, ...]
    """In the order of their placeholders."""
    mrope_positions: np.ndarray
    """int64 `[3, prompt length]`: time, height and width of every token of the prompt."""
    mrope_position_delta: int
    """Position of a token after the prompt minus its index, on all axes."""
    options_key: bytes = b""
    """All settings of the processor that made the features; they fit a model with the same settings only."""

    def __post_init__(self) -> None:
        if self.mrope_positions.dtype != np.int64 or self.mrope_positions.ndim != 2 or len(self.mrope_positions) != 3:
            raise ValueError("M-RoPE positions are int64 [3, tokens]")

    def within(self, start: int, end: int) -> list[MultimodalDataItem]:
        """Return the items with placeholders among the tokens `start` to `end`."""
        return [item for item in self.mm_items if item.rows(start, end)]

    def positions(self, start: int, end: int) -> np.ndarray:
        """Return the positions of these tokens of prompt and output, int64 `[3, end - start]`."""
        known = self.mrope_positions.shape[1]
        behind = np.arange(max(start, known), max(end, known)) + self.mrope_position_delta
        return np.concatenate([self.mrope_positions[:, start:end], np.tile(behind, (3, 1))], axis=1)

    def trace_arrival(self, rid: str, tracer: Tracer) -> None:
        """Emit the images of request `rid`, and the positions that they give to its tokens."""
        for index, item in enumerate(self.mm_items):
            tracer.emit(
                ItemReceived,
                rid=rid,
                index=index,
                modality=item.modality.value,
                size=item.size,
                grid_thw=item.grid_thw,
                num_tokens=item.num_tokens,
                offsets=item.offsets,
                hash=item.hash,
                pad_value=item.pad_value,
            )
        tracer.emit(PositionsAssigned.of, rid, self)

    def of_length(self, num_tokens: int) -> "MultimodalInputs":
        """Return the same for a prompt of `num_tokens`: text after the last image may have been added or removed."""
        return replace(self, mrope_positions=self.positions(0, num_tokens))

    def with_pad_values(self, pad_values: "PadValues") -> "MultimodalInputs":
        """Return the same with the pad values of one engine's cache."""
        return replace(self, mm_items=tuple(replace(i, pad_value=pad_values.of(i.hash)) for i in self.mm_items))


def content_hash(modality: Modality, feature: np.ndarray, grid_thw: Grid, options: bytes) -> str:
    """Return the sha256, in hex, of everything that the embeddings of an item depend on.

    Not of the bytes alone: the same bytes in another shape are another image.
    """
    digest = hashlib.sha256()
    for part in (modality.value, str(feature.dtype), str(feature.shape), str(tuple(grid_thw))):
        digest.update(part.encode() + b"\0")
    digest.update(len(options).to_bytes(8, "little") + options)
    digest.update(np.ascontiguousarray(feature).data)
    return digest.hexdigest()


class PadValues:
    """Assigns a number to every content.

    The low bits of the hash would do nearly always, but two images may have the same ones, and then a request would
    read the KV of another image. So contents are numbered, from the size of the vocabulary on, and no number is
    assigned twice. The last `max_known` contents are remembered; an older one gets a new number with its next request,
    and only misses the cache.
    """

    max_known: int = 65_536

    def __init__(self, vocab_size: int) -> None:
        self._numbers = count(vocab_size)
        self.of = lru_cache(self.max_known)(self._new)
        """Return the number of the content with this hash."""

    def _new(self, _content: str) -> int:
        number = next(self._numbers)  # after an interrupt it is not assigned to another content
        assert number <= LARGEST_PAD_VALUE, "two billion different images have been received"
        return number
