"""Circles of files are found, whatever makes them; shown on small sources."""

import pytest

from tests.structure.circles import files_import_in_one_direction
from tests.structure.sources import Source


def circles(**codes: str) -> list[str]:
    """The circles of the files `m1_x.a`, `m1_x.b` …"""
    texts = {f"m1_x.{name}": code for name, code in codes.items()}
    return [finding.text for finding in files_import_in_one_direction(Source.from_texts({"m1_x": ""} | texts))]


@pytest.mark.parametrize(
    "back",
    [
        "from m1_x.a import x",
        "from m1_x import a",
        "from .a import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from m1_x.a import x",
        "def f():\n    from m1_x.a import x",
    ],
)
def test_a_circle_of_two_is_found(back: str) -> None:
    assert circles(a="from m1_x.b import y", b=back) == ["a circle of files: m1_x.a -> m1_x.b -> m1_x.a"]


def test_a_longer_circle_is_found() -> None:
    texts = circles(a="import m1_x.b", b="import m1_x.c", c="import m1_x.a", d="import m1_x.a")
    assert texts == ["a circle of files: m1_x.a -> m1_x.b -> m1_x.c -> m1_x.a"]
