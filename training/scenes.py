"""Draws what tiny-qwen3-vl learns to see: shapes of a size and a colour in nine cells of a picture, and clips.

Everything is a function of the random generator handed in. Pictures are `uint8` arrays `[height, width, 3]`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
from PIL import Image, ImageDraw

from notebooks import shapes

COLORS, CELLS = shapes.COLOURS, shapes.CELLS
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "star")
SIZES = {"small": (0.29, 0.33), "big": (0.45, 0.50)}  # radius, as a share of the shorter side of a cell
MOTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}
BACKGROUNDS = ((200, 200, 200), (172, 190, 210), (216, 205, 184), (190, 208, 190))
PICTURE_SIZES = ((96, 96),) * 6 + ((128, 96), (96, 128), (128, 128))  # width, height
THINGS_WEIGHTS = (0.35, 0.30, 0.20, 0.15)  # of pictures with 1, 2, 3 and 4 things
SHARPER = 3  # drawn so many times larger, then reduced, for smooth edges

Pixels = np.ndarray
Point = tuple[float, float]


@dataclass(frozen=True)
class Thing:
    """One shape in a picture."""

    size: str
    color: str
    shape: str
    cell: str

    @property
    def name(self) -> str:
        return f"{self.size} {self.color} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """A picture, what is in it in reading order, and where the middle of each thing is, in pixels."""

    things: tuple[Thing, ...]
    pixels: Pixels
    middles: tuple[Point, ...] = ()


@dataclass(frozen=True)
class Clip:
    """Frames `[count, height, width, 3]`, the second at which each was taken, and what moves in them."""

    thing: Thing
    motion: str
    frames: Pixels
    seconds: tuple[float, ...]


def random_thing(rng: Random, cell: str) -> Thing:
    return Thing(rng.choice(list(SIZES)), rng.choice(list(COLORS)), rng.choice(SHAPES), cell)


def random_scene(rng: Random) -> Scene:
    """One to four things in different cells, on a plain background."""
    count = rng.choices((1, 2, 3, 4), weights=THINGS_WEIGHTS)[0]
    cells = sorted(rng.sample(range(len(CELLS)), count))
    return draw_scene(rng, [random_thing(rng, CELLS[cell]) for cell in cells], rng.choice(PICTURE_SIZES))


def random_change(rng: Random) -> tuple[Scene, Scene, str]:
    """Two pictures of one thing, and what changed: "color", "shape", "size", "position" or "nothing"."""
    before = random_thing(rng, rng.choice(CELLS))
    what = rng.choice(("color", "shape", "size", "position", "nothing"))
    choices = {"color": list(COLORS), "shape": SHAPES, "size": list(SIZES), "position": CELLS}
    after = before
    if what != "nothing":
        field = "cell" if what == "position" else what
        after = replace(before, **{field: rng.choice([c for c in choices[what] if c != getattr(before, field)])})
    picture_size = rng.choice(PICTURE_SIZES)
    return draw_scene(rng, [before], picture_size), draw_scene(rng, [after], picture_size), what


def random_clip(rng: Random) -> Clip:
    """Four to eight frames, two a second, in which a thing moves across most of the picture, or stays where it is."""
    motion = rng.choice(list(MOTIONS))
    thing = random_thing(rng, "center")
    count, faster = rng.choice((4, 4, 6, 8)), rng.randint(1, 4)
    taken = np.linspace(0, count * faster - 1, count).round()  # of a clip with 2 * faster frames a second
    width = height = 96
    radius = _radius(rng, thing, width, height)
    background = rng.choice(BACKGROUNDS)
    dx, dy = MOTIONS[motion]
    way = rng.uniform(30, 56)
    margin = 18
    x, y = (
        rng.uniform(margin, side - margin) if d == 0 else side / 2 - d * way / 2 + rng.uniform(-4, 4)
        for d, side in ((dx, width), (dy, height))
    )
    frames = []
    for at in taken / taken[-1]:
        canvas = _canvas(width, height, background)
        _draw_shape(canvas, thing, (x + dx * way * at, y + dy * way * at), radius)
        frames.append(_finish(canvas, width, height))
    return Clip(thing, motion, np.stack(frames), tuple(float(t) / (2 * faster) for t in taken))


def draw_scene(rng: Random, things: Sequence[Thing], size: tuple[int, int] = (96, 96)) -> Scene:
    """Each thing near the middle of its cell."""
    width, height = size
    canvas = _canvas(width, height, rng.choice(BACKGROUNDS))
    middles = []
    for thing in things:
        row, column = divmod(CELLS.index(thing.cell), 3)
        middle = ((column + 0.5) * width / 3, (row + 0.5) * height / 3)
        radius = _radius(rng, thing, width, height)
        wander = max(0.0, min(width, height) / 6 - radius)  # a shape stays inside its cell
        x, y = (m + rng.uniform(-wander, wander) for m in middle)
        _draw_shape(canvas, thing, (x, y), radius)
        middles.append((x, y))
    return Scene(tuple(things), _finish(canvas, width, height), tuple(middles))


def _radius(rng: Random, thing: Thing, width: int, height: int) -> float:
    return rng.uniform(*SIZES[thing.size]) * min(width, height) / 3


def _canvas(width: int, height: int, background: tuple[int, int, int]) -> ImageDraw.ImageDraw:
    return ImageDraw.Draw(Image.new("RGB", (width * SHARPER, height * SHARPER), background))


def _finish(canvas: ImageDraw.ImageDraw, width: int, height: int) -> Pixels:
    return np.asarray(canvas._image.reduce(SHARPER))


def _draw_shape(canvas: ImageDraw.ImageDraw, thing: Thing, middle: Point, radius: float) -> None:
    color = COLORS[thing.color]
    x, y, r = middle[0] * SHARPER, middle[1] * SHARPER, radius * SHARPER
    if thing.shape == "circle":
        canvas.ellipse([x - r, y - r, x + r, y + r], fill=color)
    elif thing.shape == "cross":
        canvas.rectangle([x - r, y - r / 3, x + r, y + r / 3], fill=color)
        canvas.rectangle([x - r / 3, y - r, x + r / 3, y + r], fill=color)
    else:
        canvas.polygon([(x + r * a, y + r * b) for a, b in OUTLINES[thing.shape]], fill=color)


def _star() -> list[Point]:
    corners = [(1.0 if i % 2 == 0 else 0.42, math.pi * i / 5) for i in range(10)]
    return [(r * math.sin(angle), -r * math.cos(angle)) for r, angle in corners]


OUTLINES: dict[str, list[Point]] = {
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "triangle": [(0, -1), (1, 0.9), (-1, 0.9)],
    "diamond": [(0, -1), (0.75, 0), (0, 1), (-0.75, 0)],
    "star": _star(),
}
