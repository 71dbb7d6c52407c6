"""The graders of m3's notebook, `check` as in `checks.py`, and the picture of blocks that it draws again and again.

The reference is always the package itself: its KV manager, its admission, its scheduler, and the tokens that m1 gives
to the same prompts.
"""

from collections.abc import Sequence
from typing import Any

from m3_paged_attention.block_map import Frame

GAP = 0.7  # between blocks, in widths of a slot


def draw_blocks(axis: Any, frames: Sequence[Frame], *, labels: Sequence[str] = ()) -> dict[str, str]:
    """Draw a row of blocks for each frame, a cell for each slot; returns the colour of each request.

    A filled cell holds the KV of a token, and the number in it is the token's position. A block that several requests
    hold has a stripe for each of them.
    """
    requests = frames[-1].requests
    colours = {request_id: f"C{number % 10}" for number, request_id in enumerate(requests)}
    for row, frame in enumerate(frames):
        for block in frame.blocks:
            left = (block.block_id - 1) * (frame.block_size + GAP)
            axis.barh(row, frame.block_size, left=left, height=0.8, color="0.94", align="center")
            for number, holder in enumerate(block.holders):
                first = frame.tables[holder].index(block.block_id) * frame.block_size
                filled = max(0, min(frame.num_kv[holder] - first, frame.block_size))
                height = 0.8 / len(block.holders)
                top = row - 0.4 + number * height
                axis.barh([top] * filled, 1, left=[left + slot for slot in range(filled)], height=height,
                          color=colours[holder], edgecolor="white", align="edge")  # fmt: skip
                for slot in range(filled):
                    place = (left + slot + 0.5, top + height / 2)
                    axis.annotate(first + slot, place, color="white", fontsize=7, ha="center", va="center")
    width = frames[0].block_size + GAP
    axis.set_xticks([width * i + frames[0].block_size / 2 for i in range(frames[0].num_blocks)],
                    [f"block {i + 1}" for i in range(frames[0].num_blocks)], fontsize=8)  # fmt: skip
    axis.set_yticks(range(len(frames)), labels or [f"step {frame.step}" for frame in frames], fontsize=8)
    axis.tick_params(length=0)
    axis.invert_yaxis()
    for side in ("top", "right", "bottom", "left"):
        axis.spines[side].set_visible(False)
    return colours
