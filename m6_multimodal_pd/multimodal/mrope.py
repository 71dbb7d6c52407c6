"""Step 5 of an image's way: M-RoPE, the positions in time, height and width of every token of a prompt.

For text the three are equal and count up, as positions always did. An image is a block: its tokens have the same time,
and the row and the column of their merged patch; the text after it goes on after the largest position so far. So an
image of 10 x 10 tokens advances the position by 10 and not by 100, and patches that are neighbours in the image have
neighbouring positions. New in this milestone. M-RoPE is Qwen2-VL's (Wang et al. 2024); in Qwen3-VL every layer of a
video, two frames, is a block of its own, after a text with its time. SGLang: `MRotaryEmbedding.get_rope_index`; vLLM:
`get_mrope_input_positions`.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Block(NamedTuple):
    """A range of placeholders: an image, or one layer of a video."""

    start: int
    """Index of its first token in the prompt."""
    height: int
    """Rows of merged patches."""
    width: int
    """Columns of merged patches."""

    @property
    def end(self) -> int:
        return self.start + self.height * self.width


def get_rope_index(num_tokens: int, blocks: Iterable[Block]) -> tuple[np.ndarray, int]:
    """Return positions int64 `[3, num_tokens]` (time, height, width), and the next token's position minus its index.

    `blocks` are in the order of the prompt. A text token, one block of 2 x 2 and a text token have the positions
    0 | 1 1 1 1 | 3, 0 | 1 1 2 2 | 3, 0 | 1 2 1 2 | 3, and the delta is 4 - 6.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    done = next_position = 0
    for block in blocks:
        num_text = block.start - done
        positions[:, done : block.start] = next_position + np.arange(num_text)
        next_position += num_text
        rows, columns = np.divmod(np.arange(block.height * block.width), block.width)
        positions[:, block.start : block.end] = next_position + np.stack([np.zeros_like(rows), rows, columns])
        next_position += max(block.height, block.width)
        done = block.end
    positions[:, done:] = next_position + np.arange(num_tokens - done)
    return positions, next_position - done
