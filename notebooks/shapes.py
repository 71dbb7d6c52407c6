"""Pictures of shapes in nine cells, and clips in which one of them moves: for notebooks, tests and benchmarks.

The model that ships has learned to see such pictures and no others, so colours and proportions are those of its
training. `m6_multimodal_pd/demo_pictures/` has some of them as files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, pi, sin

from PIL import Image, ImageDraw

SIDE = 96
"""Width and height of a picture, in pixels."""
CELL = SIDE // 3
FINER = 3
"""Shapes are drawn so many times larger and reduced then: that makes their edges smooth."""
BACKGROUND = (200, 200, 200)
FPS = 2.0
"""Frames a second of a clip."""
DISTANCE = 48.0

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 165, 70),
    "blue": (45, 80, 220),
    "yellow": (245, 215, 50),
    "purple": (145, 60, 180),
    "orange": (245, 140, 35),
    "black": (25, 25, 25),
    "white": (248, 248, 248),
}
RADII = {"small": 10.0, "big": 15.0}
CELLS = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")


def _circle_of(points: int, radii: Sequence[float]) -> list[tuple[float, float]]:
    """Return the corners of a polygon, clockwise from the top, with these distances from the middle in turn."""
    turns = [(2 * pi * i / points, radii[i % len(radii)]) for i in range(points)]
    return [(r * sin(angle), -r * cos(angle)) for angle, r in turns]


BAR = 1 / 3  # half the breadth of a cross's bars
OUTLINES: dict[str, list[tuple[float, float]]] = {
    "circle": _circle_of(120, (1.0,)),
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "triangle": [(0, -1), (1, 0.9), (-1, 0.9)],
    "diamond": _circle_of(4, (1.0, 0.75)),
    "cross": [
        (-BAR, -1), (BAR, -1), (BAR, -BAR), (1, -BAR), (1, BAR), (BAR, BAR),
        (BAR, 1), (-BAR, 1), (-BAR, BAR), (-1, BAR), (-1, -BAR), (-BAR, -BAR),
    ],
    "star": _circle_of(10, (1.0, 0.42)),
}  # fmt: skip
"""Corners of each shape, in radii, around its middle; y goes down."""


@dataclass(frozen=True)
class Shape:
    """A shape in a picture."""

    size: str
    colour: str
    form: str
    cell: str = "center"

    @property
    def name(self) -> str:
        return f"{self.size} {self.colour} {self.form}"

    @property
    def middle(self) -> tuple[float, float]:
        """Its place: the middle of its cell, in pixels."""
        row, column = divmod(CELLS.index(self.cell), 3)
        return (column + 0.5) * CELL, (row + 0.5) * CELL


def picture(*shapes: Shape) -> Image.Image:
    """Return a picture with each shape in its cell."""
    return _drawn([(shape, shape.middle) for shape in shapes])


def clip(shape: Shape, frames: int) -> list[Image.Image]:
    """Return a clip in which a shape moves DISTANCE pixels from left to right through the center."""
    places = [SIDE / 2 - DISTANCE / 2 + DISTANCE * i / (frames - 1) for i in range(frames)]
    return [_drawn([(shape, (x, SIDE / 2))]) for x in places]


def _drawn(placed: Sequence[tuple[Shape, tuple[float, float]]]) -> Image.Image:
    image = Image.new("RGB", (SIDE * FINER, SIDE * FINER), BACKGROUND)
    draw = ImageDraw.Draw(image)
    for shape, (x, y) in placed:
        radius = RADII[shape.size]
        corners = [((x + radius * a) * FINER, (y + radius * b) * FINER) for a, b in OUTLINES[shape.form]]
        draw.polygon(corners, fill=COLOURS[shape.colour])
    return image.reduce(FINER)
