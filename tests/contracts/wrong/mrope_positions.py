"""Typical mistakes in M-RoPE's positions, each with the hint that it must get."""

from collections.abc import Iterable
from functools import partial

import numpy as np

from m6_multimodal_pd.multimodal.mrope import Block, get_rope_index

right = partial(get_rope_index)  # the engine's own, also while a mistake is in its place


def rows_and_columns_swapped(num_tokens: int, blocks: Iterable[Block]) -> tuple[np.ndarray, int]:
    """Height and width are exchanged."""
    positions, delta = right(num_tokens, blocks)
    return positions[[0, 2, 1]], delta


def rows_of_the_height(num_tokens: int, blocks: Iterable[Block]) -> tuple[np.ndarray, int]:
    """A row has as many tokens as there are rows: right for squares alone."""
    known = list(blocks)
    positions, delta = right(num_tokens, known)
    for block in known:
        rows, columns = np.divmod(np.arange(block.end - block.start), block.height)
        positions[1:, block.start : block.end] = positions[0, block.start] + np.stack([rows, columns])
    return positions, delta


def counts_from_nought(num_tokens: int, blocks: Iterable[Block]) -> tuple[np.ndarray, int]:
    """Rows and columns count from 0 in every picture."""
    known = list(blocks)
    positions, delta = right(num_tokens, known)
    for block in known:
        positions[1:, block.start : block.end] -= positions[0, block.start]
    return positions, delta


def all_tokens_count(num_tokens: int, blocks: Iterable[Block]) -> tuple[np.ndarray, int]:
    """The text after a block continues after the number of its tokens, as if they were text."""
    known = list(blocks)
    positions, _ = right(num_tokens, known)
    for block in known:
        positions[:, block.start :] += block.start - positions[0, block.start]
        positions[:, block.end :] += block.end - positions[0, block.end] if block.end < num_tokens else 0
    return positions, 0


def the_width_alone(num_tokens: int, blocks: Iterable[Block]) -> tuple[np.ndarray, int]:
    """A block advances the position by its columns, although it may be taller than wide."""
    positions, free = np.tile(np.arange(num_tokens), (3, 1)), 0
    done = 0
    for block in blocks:
        free += block.start - done
        rows, columns = np.divmod(np.arange(block.end - block.start), block.width)
        positions[:, block.start : block.end] = free + np.stack([rows * 0, rows, columns])
        free, done = free + block.width, block.end
        positions[:, done:] = free + np.arange(num_tokens - done)
    return positions, free - done


def from_the_last_time(num_tokens: int, blocks: Iterable[Block]) -> tuple[np.ndarray, int]:
    """The next position is one after the last token's time: right unless the prompt ends with a picture."""
    positions, _ = right(num_tokens, blocks)
    return positions, int(positions[0, -1]) + 1 - num_tokens


def number_of_numpy(num_tokens: int, blocks: Iterable[Block]) -> tuple[np.ndarray, int]:
    """The delta is a number of numpy."""
    positions, _ = right(num_tokens, blocks)
    return positions, positions.max() + 1 - num_tokens


WRONG = [
    (rows_and_columns_swapped, "Height is the row and width the column"),
    (rows_of_the_height, "a block of 2 rows and 3 columns has rows of 3 tokens"),
    (counts_from_nought, "count from the next free position, not from 0"),
    (all_tokens_count, "not as many as it has tokens"),
    (the_width_alone, "as many positions as its longer side has tokens"),
    (from_the_last_time, "after the largest one on any axis, not after the last time"),
    (number_of_numpy, "not those of numpy"),
]
