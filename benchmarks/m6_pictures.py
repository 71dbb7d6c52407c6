"""Two pictures of a prompt with a picture in it: from patches to tokens to positions, and where DeepStack enters.

`python -m benchmarks.m6_trace` draws them. They need matplotlib, which the trace itself does not.
"""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from benchmarks import ASSETS
from benchmarks.m6_trace import MODEL, PICTURES, image, text
from m6_multimodal_pd import LLMEngine
from training.scenes import Thing, draw_scene

SCENE = draw_scene(Random(5), [Thing("big", "red", "star", "left"), Thing("big", "blue", "circle", "right")], (128, 96))
AXES = ("time", "height", "width")
TOWER, MERGER, DECODER, TEXT = "#d9c3e8", "#ffd39b", "#c7dff0", "0.9"
SMALL: dict[str, Any] = {"fontsize": 8}


def positions(engine: LLMEngine) -> Figure:
    """A scene as patches and as merged tokens; the positions of the block; and those of the whole prompt."""
    prompt: Any = engine.chat_prompt(
        [{"role": "user", "content": [text("Look: "), image(SCENE.pixels), text("What is red?")]}]
    )
    inputs = prompt.multimodal_inputs
    (item,) = inputs.mm_items
    _, rows, columns = item.grid_thw
    figure = Figure(figsize=(10, 7.2), layout="constrained")
    upper, middle, lower = figure.subfigures(3, 1, height_ratios=[1.25, 1, 0.95])
    seen = upper.subplots(1, 2)
    _scene(seen[0], rows, columns, f"{rows} x {columns} patches of 16 x 16 pixels")
    _scene(
        seen[1], rows // 2, columns // 2, f"merged: {rows // 2} x {columns // 2} tokens, by their place in the prompt"
    )
    places = np.arange(item.start, item.end).reshape(rows // 2, columns // 2)
    _numbers(seen[1], places, 32, box=True)
    block = inputs.mrope_positions[:, item.start : item.end].reshape(3, rows // 2, columns // 2)
    low, high = int(inputs.mrope_positions.min()), int(inputs.mrope_positions.max())
    for axis, name, values in zip(middle.subplots(1, 3), AXES, block, strict=True):
        axis.imshow(values, cmap="viridis", vmin=item.start - 2, vmax=int(block.max()) + 1)
        _numbers(axis, values, 1, box=False)
        axis.set_title(f"{name} of the picture's tokens", fontsize=10)
        axis.set(xticks=[], yticks=[])
    axis = lower.subplots()
    axis.imshow(inputs.mrope_positions, cmap="viridis", vmin=low, vmax=high, aspect="auto")
    for row, column in np.ndindex(inputs.mrope_positions.shape):
        value = int(inputs.mrope_positions[row, column])
        ink = "white" if value < (low + high) * 0.55 else "black"
        axis.text(column, row, str(value), ha="center", va="center", fontsize=7, color=ink)
    axis.add_patch(Rectangle((item.start - 0.5, -0.5), item.num_tokens, 3, fill=False, edgecolor="C3", lw=2))
    tokenizer: Any = engine.engine_core.input_processor.tokenizer
    axis.set_xticks(
        range(len(prompt)), [_word(tokenizer, token_id) for token_id in prompt], rotation=60, ha="right", fontsize=7
    )
    axis.set_yticks(range(3), AXES, **SMALL)
    axis.set_title("the whole prompt; framed: the picture", fontsize=10)
    return figure


def deepstack(engine: LLMEngine) -> Figure:
    """Tower and decoder side by side, and what goes from one to the other."""
    model: Any = engine.engine_core.executor.worker.model_runner.model
    tower = engine.engine_core.encoder.tower
    taps, depth, layers = list(tower.config.deepstack_visual_indexes), tower.config.depth, len(model.layers)
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    axis = figure.subplots()
    for layer in range(depth):
        _box(axis, 0, 1.2 + layer, f"tower layer {layer}", TOWER)
    _box(axis, 0, 0.2, "patches and their\nrows and columns", TEXT)
    for layer in range(layers):
        _box(axis, 6, 1.2 + layer, f"decoder layer {layer}", DECODER)
    _box(axis, 6, 0.2, "embeddings of tokens", TEXT)
    _box(axis, 6, 1.2 + layers, "norm, logits", TEXT)
    for low in range(depth):
        _arrow(axis, (1, 0.8 + low), (1, 1.2 + low), "0.4")
    for low in range(layers + 1):
        _arrow(axis, (7, 0.8 + low), (7, 1.2 + low), "0.4")
    _box(axis, 3, 0.2, "merger: 4 patches,\n1 embedding", MERGER)
    axis.plot([1, 1, 2.5, 2.5], [0.8 + depth, 1.1 + depth, 1.1 + depth, 0.5], color="0.4", lw=1)  # past all others
    _arrow(axis, (2.5, 0.5), (3, 0.5), "0.4")
    _arrow(axis, (5, 0.5), (6, 0.5), "C3", label="replaces\nplaceholder")
    for number, tap in enumerate(taps):
        y = 1.7 + number + 0.35
        _box(axis, 3, y - 0.3, f"DeepStack merger {number}", MERGER)
        _arrow(axis, (2, 1.5 + tap), (3, y), "0.4")
        _arrow(axis, (5, y), (7, 2.0 + number), "C3", label="is added")
    axis.set(xlim=(-0.9, 8.3), ylim=(0, layers + 2))
    axis.axis("off")
    return figure


def _scene(axis: Axes, rows: int, columns: int, title: str) -> None:
    height, width = SCENE.pixels.shape[:2]
    axis.imshow(SCENE.pixels)
    for row in range(1, rows):
        axis.axhline(row * height / rows - 0.5, color="black", lw=0.8)
    for column in range(1, columns):
        axis.axvline(column * width / columns - 0.5, color="black", lw=0.8)
    axis.set_title(title, fontsize=10)
    axis.set(xticks=[], yticks=[])


def _numbers(axis: Axes, values: np.ndarray, side: int, *, box: bool) -> None:
    """Each number in the middle of its square."""
    look: dict[str, Any] = (
        {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.5}} if box else {"color": "white"}
    )
    for (row, column), value in np.ndenumerate(values):
        middle = (side - 1) / 2
        axis.text(column * side + middle, row * side + middle, str(value), ha="center", va="center", fontsize=9, **look)


def _word(tokenizer: Any, token_id: int) -> str:
    said = tokenizer.decode([token_id]).replace("\n", "⏎").strip()
    return said.replace("<|", "").replace("|>", "") or "␣"


def _box(axis: Axes, x: float, y: float, words: str, color: str) -> None:
    axis.add_patch(Rectangle((x, y), 2, 0.6, facecolor=color, edgecolor="0.5"))
    axis.text(x + 1, y + 0.3, words, ha="center", va="center", **SMALL)


def _arrow(axis: Axes, begin: tuple[float, float], end: tuple[float, float], color: str, label: str = "") -> None:
    axis.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=10, color=color, shrinkA=0, shrinkB=0))
    if label:
        axis.text(begin[0] + 0.5, begin[1] + 0.08, label, ha="center", va="bottom", color=color, **SMALL)


def draw_pictures(folder: Path = ASSETS) -> None:
    """Draw the pictures into the docs' assets."""
    with LLMEngine(model_config=MODEL, multimodal_config=PICTURES) as engine:
        positions(engine).savefig(folder / "m6_positions.png", dpi=110)
        deepstack(engine).savefig(folder / "m6_deepstack.png", dpi=110)
