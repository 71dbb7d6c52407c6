"""Build M-RoPE's positions of m6: time, height and width of every token of a prompt with pictures.

A prompt is a row of tokens, and a picture in it is a block of rows and columns. If its tokens were numbered one after
another, two patches that touch in the picture would be a whole row apart. So every token has three positions. A text
advances all three together; a block holds the time and counts its rows and columns. The text after it must not use a
position again, and the engine has to know where the answer begins.

Explained in docs/m6_multimodal_pd.md#m-rope-positions-on-three-axes.

    cp starters/mrope_positions.py my_positions.py
    pytest --part mrope_positions=my_positions.py:my_rope_index
"""

from collections.abc import Iterable

import numpy as np

from m6_multimodal_pd.multimodal.mrope import Block


def my_rope_index(num_tokens: int, blocks: Iterable[Block]) -> tuple[np.ndarray, int]:
    """Return `(positions, delta)` of a prompt of `num_tokens` tokens.

    `blocks`: ranges of tokens that belong to a picture, or to one layer of a video, in the order of the prompt. They do
    not overlap, and may touch. A `Block` has `start`, the index of its first token; `height` and `width`, its rows and
    columns, each at least 1; and `end`, the index after its last token, which is `start + height * width`. Its tokens
    come row by row. All other tokens are text. Do not change `blocks`.

    `positions`: a new int64 array `[3, num_tokens]`; the rows are time, height and width. Go through the prompt with
    the next free position, which is 0 at first:

    - A token of text has the next free position on all three axes. The next free position grows by 1.
    - All tokens of a block have the next free position as their time. The height of a token is this position plus its
      row in the block, its width this position plus its column; both count from 0. After the block the next free
      position is one more than the block's largest position, on any axis.

    `delta`: an int, the next free position after the whole prompt minus `num_tokens`. The engine adds it to the index
    of every token of the answer.

    A token of text, a block of 2 x 2 and a token of text have the positions

        time     0 | 1 1 1 1 | 3
        height   0 | 1 1 2 2 | 3
        width    0 | 1 2 1 2 | 3

    and the delta is 4 - 6 = -2.
    """
    raise NotImplementedError
