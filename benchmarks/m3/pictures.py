"""Pictures of the traced example: the owners of all blocks after each step, and a block table followed to a slot."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.m3.trace import run
from benchmarks.plots import ON_DEEP, bare, ink_on, legend, panels, save
from m3_paged_attention.views.block_map import BlockMap, Frame
from notebooks.checks_m3 import draw_blocks

OWNER, STEP, POSITION = "six/0", 4, 8
"""The token that the picture of a block table follows."""


def block_map(frames: list[Frame]) -> Figure:
    """Draw the owners of the blocks after each step."""
    figure, axis = panels(9, 4.2)
    colors = draw_blocks(axis, frames)
    for number in axis.texts:
        number.set_color(ON_DEEP)
    legend(figure, colors)
    return figure


def block_table(frame: Frame, owner: str, position: int) -> Figure:
    """Draw one token's way from its position over the block table to its slot."""
    figure, axis = panels(9, 3.4)
    size, table = frame.block_size, frame.tables[owner]
    width, index, offset = size + 0.7, position // size, position % size
    slot = table[index] * size + offset

    def cell(x: float, y: float, text: object, *, color: str, span: float = 1) -> None:
        axis.barh(y, span, left=x, height=0.5, color=color, edgecolor="white")
        axis.annotate(str(text), (x + span / 2, y), color=ink_on(color), fontsize=8, ha="center", va="center")

    for token in range(frame.num_kv[owner]):
        cell(token // size * width + token % size, 3, token, color="C3" if token == position else "C1")
    for number, block_id in enumerate(table):
        cell(number * width, 2, f"[{number}]  {block_id}", span=size, color="C3" if number == index else "0.8")
    for block in frame.blocks:
        first = (block.block_id - 1) * width
        for place in range(size):
            filled, here = place < block.num_tokens, block.block_id * size + place
            own = "C1" if block.block_id in table else "0.6"
            color = "C3" if here == slot else own if filled else "0.94"
            cell(first + place, 0.6, here, color=color)
        axis.annotate(f"block {block.block_id}", (first + size / 2, 0.2), fontsize=8, ha="center", va="top")
    arrow: dict[str, Any] = {"arrowstyle": "-|>", "color": "C3"}
    middle, target = index * width + size / 2, (table[index] - 1) * width + offset + 0.5
    axis.annotate("", (middle, 2.27), (index * width + offset + 0.5, 2.73), arrowprops=arrow)
    axis.annotate("", (target, 0.87), (middle, 1.73), arrowprops=arrow)
    axis.annotate(f"position {position} // {size} = {index}", (middle + 1, 2.5), fontsize=8, va="center", color="C3")
    way = f"slot {table[index]} x {size} + {position} % {size} = {slot}"
    axis.annotate(way, ((middle + target) / 2 + 2, 1.35), fontsize=8, va="center", color="C3")
    memory = f"KV memory: slots\n(block 0: slots 0-{size - 1},\nnever handed out)"
    axis.set_yticks([3, 2, 0.6], [f"positions of {owner}", "its block table", memory], fontsize=9)
    axis.set_xticks([])
    axis.tick_params(length=0)
    axis.set_ylim(-0.1, 3.4)
    bare(axis, "top", "right", "bottom", "left")
    return figure


def draw_pictures(folder: Path) -> None:
    """Draw the pictures of this run into a folder."""
    reader = BlockMap()
    run(reader)
    frame = next(frame for frame in reader.frames if frame.step == STEP)
    save(block_map(reader.frames), folder / "m3_block_map.svg")
    save(block_table(frame, OWNER, POSITION), folder / "m3_block_table.svg")
