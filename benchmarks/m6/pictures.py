"""Two pictures of a prompt with a picture in it: from patches to tokens to positions, and where DeepStack enters."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.m6.trace import CONFIGS, PICTURES
from benchmarks.plots import ON_DEEP, ON_PALE, SMALL, arrow, box, panels, save
from benchmarks.texts import message
from m6_multimodal_pd import LLMEngine
from training.scenes import Thing, draw_scene

SCENE = draw_scene(Random(5), [Thing("big", "red", "star", "left"), Thing("big", "blue", "circle", "right")], (128, 96))
AXES = ("time", "height", "width")
TOWER, MERGER, DECODER, TEXT = "#d9c3e8", "#ffd39b", "#c7dff0", "0.9"


def positions(engine: LLMEngine) -> Figure:
    """Draw a scene as patches and as merged tokens; the positions of the block; and those of the whole prompt."""
    prompt: Any = engine.chat_prompt([message("Look: ", SCENE.pixels, "What is red?")])
    inputs = prompt.multimodal_inputs
    (item,) = inputs.mm_items
    rows, columns = (size // 2 for size in item.grid_thw[1:])
    figure = Figure(figsize=(10, 7.2), layout="constrained")
    upper, middle, lower = figure.subfigures(3, 1, height_ratios=[1.25, 1, 0.95])
    patches, merged = upper.subplots(1, 2)
    scene(patches, 2 * rows, 2 * columns, f"{2 * rows} x {2 * columns} patches of 16 x 16 pixels")
    scene(merged, rows, columns, f"merged: {rows} x {columns} tokens, by their place in the prompt")
    places = np.arange(item.start, item.end).reshape(rows, columns)
    numbers(merged, places, 32, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})
    block = inputs.mrope_positions[:, item.start : item.end].reshape(3, rows, columns)
    for axis, name, values in zip(middle.subplots(1, 3), AXES, block, strict=True):
        axis.imshow(values, cmap="viridis", vmin=item.start - 2, vmax=int(block.max()) + 1)
        numbers(axis, values, 1, color=ON_DEEP)
        axis.set_title(f"{name} of the picture's tokens", fontsize=10)
        axis.set(xticks=[], yticks=[])
    axis, all_positions = lower.subplots(), inputs.mrope_positions
    axis.imshow(all_positions, cmap="viridis", aspect="auto")
    for (row, column), value in np.ndenumerate(all_positions):
        ink = ON_DEEP if value < (all_positions.min() + all_positions.max()) * 0.55 else ON_PALE
        axis.text(column, row, str(value), ha="center", va="center", fontsize=7, color=ink)
    axis.add_patch(Rectangle((item.start - 0.5, -0.5), item.num_tokens, 3, fill=False, edgecolor="C3", lw=2))
    tokenizer: Any = engine.engine_core.input_processor.tokenizer
    names = [word(tokenizer.decode([token_id])) for token_id in prompt]
    axis.set_xticks(range(len(prompt)), names, rotation=60, ha="right", fontsize=7)
    axis.set_yticks(range(3), AXES, **SMALL)
    axis.set_title("the whole prompt; framed: the picture", fontsize=10)
    return figure


def word(text: str) -> str:
    """Return a token's text, visible and short."""
    return text.replace("\n", "⏎").strip().replace("<|", "").replace("|>", "") or "␣"


def scene(axis: Axes, rows: int, columns: int, title: str) -> None:
    """Draw the scene with a grid."""
    height, width = SCENE.pixels.shape[:2]
    axis.imshow(SCENE.pixels)
    for row in range(1, rows):
        axis.axhline(row * height / rows - 0.5, color=ON_PALE, lw=0.8)
    for column in range(1, columns):
        axis.axvline(column * width / columns - 0.5, color=ON_PALE, lw=0.8)
    axis.set_title(title, fontsize=10)
    axis.set(xticks=[], yticks=[])


def numbers(axis: Axes, values: np.ndarray, side: int, **style: Any) -> None:
    """Write each number into the middle of its square."""
    middle = (side - 1) / 2
    for (row, column), value in np.ndenumerate(values):
        place = (column * side + middle, row * side + middle)
        axis.text(*place, str(value), ha="center", va="center", fontsize=9, **style)


def deepstack(engine: LLMEngine) -> Figure:
    """Draw tower and decoder side by side, and the embeddings that go from one to the other."""
    core: Any = engine.engine_core
    tower, layers = core.encoder.tower.network, len(core.executor.worker.model_runner.model.layers)
    figure, axis = panels(10, 5.2)
    left = ["patches and their\nrows and columns", *(f"tower layer {layer}" for layer in range(len(tower.blocks)))]
    right = ["embeddings of tokens", *(f"decoder layer {layer}" for layer in range(layers)), "norm, logits"]
    for x, names, color in ((0, left, TOWER), (6, right, DECODER)):
        for place, name in enumerate(names):
            plain = place == 0 or name == "norm, logits"
            box(axis, x, 0.2 + place, (2, 0.6), name, TEXT if plain else color, edgecolor="0.5")
            if place:
                arrow(axis, (x + 1, place - 0.2), (x + 1, place + 0.2), "0.4")
    box(axis, 3, 0.2, (2, 0.6), "merger: 4 patches,\n1 embedding", MERGER, edgecolor="0.5")
    top = 1.1 + len(tower.blocks)
    axis.plot([1, 1, 2.5, 2.5], [top - 0.3, top, top, 0.5], color="0.4", lw=1)  # past all others
    arrow(axis, (2.5, 0.5), (3, 0.5), "0.4")
    arrow(axis, (5, 0.5), (6, 0.5), "C3", label="replaces\nplaceholder")
    for number, tap in enumerate(tower.deepstack):
        y = 1.7 + number + 0.35
        box(axis, 3, y - 0.3, (2, 0.6), f"DeepStack merger {number}", MERGER, edgecolor="0.5")
        arrow(axis, (2, 1.5 + tap), (3, y), "0.4")
        arrow(axis, (5, y), (7, 2.0 + number), "C3", label="is added")
    axis.set(xlim=(-0.9, 8.3), ylim=(0, layers + 2))
    axis.axis("off")
    return figure


def draw_pictures(folder: Path) -> None:
    """Draw the pictures into a folder."""
    with LLMEngine(**CONFIGS, multimodal_config=PICTURES) as engine:
        save(positions(engine), folder / "m6_positions.svg")
        save(deepstack(engine), folder / "m6_deepstack.svg")
