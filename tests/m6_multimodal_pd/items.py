"""Items and requests for tests that need no model: pictures of any number of tokens at any place."""

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from m6_multimodal_pd.multimodal.inputs import Modality, MultimodalDataItem, MultimodalInputs
from m6_multimodal_pd.multimodal.mrope import Block, get_rope_index
from m6_multimodal_pd.request import Req
from tests.m4_radix_cache.reqs import make_req as make_radix_req

make_req = partial(make_radix_req, request_class=Req)


def item(content: str, *offsets: tuple[int, int], pad_value: int = 5000) -> MultimodalDataItem:
    """An image, or a video of as many frames as there are ranges; each is one row of merged patches."""
    return MultimodalDataItem(
        modality=Modality.IMAGE if len(offsets) == 1 else Modality.VIDEO,
        offsets=offsets,
        feature=np.zeros((4 * sum(end - start for start, end in offsets), 1), dtype=np.float32),
        grid_thw=(len(offsets), 2, 2 * (offsets[0][1] - offsets[0][0])),
        hash=content,
        size=(4, 4),
        pad_value=pad_value,
    )


def inputs(num_tokens: int, *items: MultimodalDataItem) -> MultimodalInputs:
    """The pictures of a prompt of so many tokens."""
    blocks = [Block(start, 1, end - start) for own in items for start, end in own.offsets]
    positions, delta = get_rope_index(num_tokens, blocks)
    return MultimodalInputs(items, positions, delta)


def req(num_tokens: int, *items: MultimodalDataItem) -> Any:
    """What a budget must know of a request."""
    return SimpleNamespace(multimodal_inputs=inputs(num_tokens, *items) if items else None)


def rows_of(own: MultimodalDataItem, start: int, end: int) -> list[int]:
    """Which of its embeddings belong to the tokens `start` to `end`, one by one."""
    places = [place for begin, stop in own.offsets for place in range(begin, stop)]
    return [row for row, place in enumerate(places) if start <= place < end]


def flat(runs: Sequence[tuple[int, int, int]]) -> list[int]:
    """The same of what `rows` says."""
    return [row for _, first, last in runs for row in range(first, last)]
