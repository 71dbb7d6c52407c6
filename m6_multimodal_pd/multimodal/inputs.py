"""What a request keeps of its pictures: where they stand, what the tower reads, what the cache knows them by.

A prompt with a picture is a list of tokens like any other: the picture is a run of placeholder tokens, one for each
embedding that the tower makes. To the model they are where embeddings go; to the prefix cache they are all alike, and
two prompts with different pictures would share KV. So in the cache's key each placeholder is a number that stands for
the picture's content, `pad_value`, outside the vocabulary so that no text can mean it. New in this milestone. SGLang:
`MultimodalInputs` and `MultimodalDataItem` in `managers/schedule_batch.py`; vLLM: `MultiModalFeatureSpec`, whose
`identifier` goes into the hash of a block.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate

import numpy as np

from m1_single_request.tracer import Tracer
from m6_multimodal_pd.events import ItemReceived, PositionsAssigned

MAX_KNOWN = 65_536
LARGEST_PAD_VALUE = 2**31 - 1  # the cache's key has four bytes for a token

Range = tuple[int, int]
Grid = tuple[int, int, int]


class Modality(Enum):
    """What an item is."""

    IMAGE = "image"
    VIDEO = "video"


@dataclass(frozen=True, eq=False)
class MultimodalDataItem:
    """One image, or one video, of a prompt."""

    modality: Modality
    offsets: tuple[Range, ...]
    """Where its placeholders stand in the prompt: `[start, end)`, one range for an image, one per frame for a video,
    because texts with the time stand between frames."""
    feature: np.ndarray
    """float32 `[patches, patch_dim]`: what the vision tower reads."""
    grid_thw: Grid
    """Patches along time, height and width."""
    hash: str
    """sha256 of the content, in hex: of the feature, its shape and type, and of the processor's options."""
    size: tuple[int, int]
    """Width and height in pixels, as it was handed in."""
    pad_value: int | None = None
    """What stands for each of its placeholders in the cache's key: not below the size of the vocabulary. An engine
    gives it when it takes a request in, for its own cache; None before."""

    @property
    def num_tokens(self) -> int:
        """Placeholders, and embeddings."""
        return sum(end - start for start, end in self.offsets)

    @property
    def start(self) -> int:
        """Its first placeholder in the prompt."""
        return self.offsets[0][0]

    @property
    def end(self) -> int:
        """Behind its last one."""
        return self.offsets[-1][1]

    def rows(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Its embeddings among the prompt's tokens `start` to `end`: runs of (place in the prompt, first, last + 1).

        A range of tokens may begin or end inside a picture: a piece of a prompt, or what a cache hit has left.
        """
        firsts = accumulate((stop - begin for begin, stop in self.offsets), initial=0)
        found = []
        for (begin, stop), first in zip(self.offsets, firsts, strict=False):
            low, high = max(begin, start), min(stop, end)
            if low < high:
                found.append((low, first + low - begin, first + high - begin))
        return found


@dataclass(frozen=True, eq=False)
class MultimodalInputs:
    """All pictures of a prompt, and the positions that they give to its tokens."""

    mm_items: tuple[MultimodalDataItem, ...]
    """In the order in which they stand."""
    mrope_positions: np.ndarray
    """int64 `[3, prompt length]`: time, height and width of every token of the prompt."""
    mrope_position_delta: int
    """Token `i` behind the prompt sits at `i + mrope_position_delta`, on all axes."""
    im_token_id: int
    video_token_id: int
    im_start_id: int
    im_end_id: int
    options_key: bytes = b""
    """All settings of the processor that made the features: another model's would be seen wrong."""

    @property
    def image_pad_len(self) -> list[int]:
        """Placeholders of each item."""
        return [item.num_tokens for item in self.mm_items]

    def within(self, start: int, end: int) -> list[MultimodalDataItem]:
        """The items of which the tokens `start` to `end` hold a part."""
        return [item for item in self.mm_items if item.rows(start, end)]

    def positions(self, start: int, end: int) -> np.ndarray:
        """int64 `[3, end - start]`: the positions of these tokens of prompt and output."""
        known = self.mrope_positions.shape[1]
        behind = np.arange(max(start, known), max(end, known)) + self.mrope_position_delta
        return np.concatenate([self.mrope_positions[:, start:end], np.tile(behind, (3, 1))], axis=1)

    def padded(self, token_ids: Sequence[int]) -> list[int]:
        """The prompt as the prefix cache knows it: every placeholder is its item's `pad_value`."""
        padded = list(token_ids)
        for item in self.mm_items:
            assert item.pad_value is not None, "no engine has taken this prompt in"
            for start, end in item.offsets:
                padded[start:end] = [item.pad_value] * (end - start)
        return padded

    def trace_arrival(self, rid: str, tracer: Tracer) -> None:
        """Emit the pictures of request `rid`, and the positions that they give to its tokens."""
        for index, item in enumerate(self.mm_items):
            tracer.emit(ItemReceived.of, rid, index, item)
        tracer.emit(PositionsAssigned.of, rid, self)

    def of_length(self, num_tokens: int) -> "MultimodalInputs":
        """The same for a prompt of so many tokens: behind the last picture text may have been added, or left out."""
        return replace(self, mrope_positions=self.positions(0, num_tokens))

    def taken_in(self, pad_values: "PadValues") -> "MultimodalInputs":
        """The same for one engine, with the numbers that its cache knows the contents by."""
        return replace(self, mm_items=tuple(replace(i, pad_value=pad_values.of(i.hash)) for i in self.mm_items))


def content_hash(modality: Modality, feature: np.ndarray, grid_thw: Grid, options: bytes) -> str:
    """sha256, in hex, of all that decides what the tower makes of an item.

    Not of the bytes alone: the same bytes of another shape are another picture.
    """
    digest = hashlib.sha256()
    for part in (modality.value, str(feature.dtype), str(feature.shape), str(tuple(grid_thw))):
        digest.update(part.encode() + b"\0")
    digest.update(len(options).to_bytes(8, "little") + options)
    digest.update(np.ascontiguousarray(feature).data)
    return digest.hexdigest()


class PadValues:
    """Gives every content a number of its own.

    The low bits of the hash would do nearly always, and now and then give two pictures one number: then a request would
    read another picture's KV. So contents are numbered, from the size of the vocabulary on, and no number is ever given
    twice. Of those that came, the last `max_known` are remembered; an older one gets a new number when it comes again,
    and only misses the cache.
    """

    def __init__(self, vocab_size: int, max_known: int = MAX_KNOWN) -> None:
        self.max_known = max_known
        self._next = vocab_size
        self._known: OrderedDict[str, int] = OrderedDict()  # by hash, the latest last

    def of(self, content: str) -> int:
        """The number of the content with this hash."""
        if content not in self._known:
            assert self._next <= LARGEST_PAD_VALUE, "two billion different pictures have come"
            number = self._next
            self._next += 1  # first: after an interrupt it must not be given to another content
            self._known[content] = number
            if len(self._known) > self.max_known:
                self._known.popitem(last=False)
        self._known.move_to_end(content)
        return self._known[content]
