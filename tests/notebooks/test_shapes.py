"""Pictures of shapes for notebooks, tests and benchmarks: of the kind that the checkpoint has learned to see."""

import numpy as np
import pytest

from notebooks import shapes
from notebooks.shapes import CELL, CELLS, COLOURS, OUTLINES, Shape
from training import scenes


@pytest.mark.parametrize("form", OUTLINES)
@pytest.mark.parametrize("size", shapes.RADII)
def test_a_shape_lies_in_its_cell_and_nowhere_else(form: str, size: str) -> None:
    for number, cell in enumerate(CELLS):
        pixels = np.asarray(shapes.picture(Shape(size, "blue", form, cell)))
        row, column = divmod(number, 3)
        middle = pixels[row * CELL + CELL // 2, column * CELL + CELL // 2]
        assert tuple(middle) == COLOURS["blue"]
        painted = np.argwhere((pixels != shapes.BACKGROUND).any(axis=2)) // CELL
        assert {tuple(place) for place in painted.tolist()} == {(row, column)}


def test_pictures_are_of_the_kind_that_the_checkpoint_has_learned() -> None:
    assert set(OUTLINES) == set(scenes.SHAPES)
    assert shapes.BACKGROUND in scenes.BACKGROUNDS
    for name, (least, most) in scenes.SIZES.items():
        assert least <= shapes.RADII[name] / CELL <= most
    for form, corners in scenes.OUTLINES.items():
        ours = np.array(OUTLINES[form])
        assert len(ours) == len(corners) and np.abs(ours - np.array(corners)).max() < 1e-9


def test_edges_are_smooth_and_pictures_are_always_the_same() -> None:
    drawn = (Shape("big", "blue", "square", "left"), Shape("big", "yellow", "star", "right"))
    first, second = (np.asarray(shapes.picture(*drawn)) for _ in range(2))
    assert np.array_equal(first, second) and first.shape == (96, 96, 3)
    assert len(np.unique(first.reshape(-1, 3), axis=0)) > 3


def test_a_clip_moves_to_the_right() -> None:
    frames = [np.asarray(frame) for frame in shapes.clip(Shape("small", "red", "star"), frames=4)]
    middles = [np.argwhere((frame != shapes.BACKGROUND).any(axis=2)).mean(axis=0) for frame in frames]
    across = [x for _, x in middles]
    assert across == sorted(across) and across[-1] - across[0] == pytest.approx(48, abs=1)
    assert max(y for y, _ in middles) - min(y for y, _ in middles) < 0.5
