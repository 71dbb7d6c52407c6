"""Pictures have one file for light and dark pages, are small, and their colors are legible on both."""

import re
from itertools import product
from pathlib import Path

import pytest

from docs.scheme import COLORS, DARK, LIGHT, themed

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
PICTURES = sorted(ASSETS.glob("*.svg"))
DRAWN = """<?xml version="1.0"?>
<svg xmlns="http://www.w3.org/2000/svg" width="72pt" height="36pt" viewBox="0 0 72 36" version="1.1">
 <metadata>who, when</metadata>
 <defs>
  <style type="text/css">*{stroke-linejoin: round}</style>
 </defs>
 <g id="figure_1">
  <g id="patch_1">
   <path d="M 0 36
L 72 36
L 72 0.123456
L 0 0.123456
z
" clip-path="url(#p1)" style="fill: #cccccc; stroke: #ffffff"/>
  </g>
  <g id="text_1">
   <!-- two  words -->
   <text style="font-size: 8px; font-family: 'DejaVu Sans'" x="1.98765" transform="rotate(-0 1 2)">two  words</text>
  </g>
  <path d="M 0 0 L 1 1" style="fill: none; stroke: #0072b2"/>
  <path d="M 0 0 L 2 2" style="fill: none; stroke: #0072b2"/>
 </g>
</svg>
"""


def luminance(color: str) -> float:
    """The relative luminance of WCAG 2."""
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def colors_of(scheme: str) -> list[str]:
    """Ink and paper, of six digits."""
    found = re.findall(r"#(\w+)", scheme)
    return ["#" + (digits if len(digits) == 6 else "".join(2 * digit for digit in digits)) for digits in found]


@pytest.mark.parametrize(("color", "scheme"), list(product(COLORS, (LIGHT, DARK))))
def test_every_color_of_a_plot_stands_out_from_the_page(color: str, scheme: str) -> None:
    assert contrast(color, colors_of(scheme)[1]) >= 3


@pytest.mark.parametrize("scheme", [LIGHT, DARK])
def test_text_is_legible(scheme: str) -> None:
    assert contrast(*colors_of(scheme)) >= 7


def test_greys_become_ink_and_paper_and_colors_stay() -> None:
    picture = themed(DRAWN)
    assert ".a{fill:none;stroke:#0072b2}" in picture  # the most frequent style
    assert "fill:var(--ink);fill-opacity:0.23;stroke:var(--paper)" in picture
    assert not re.search(r"#(cc){3}|#(ff){3}", picture.partition("</style>")[2])


def test_only_what_a_browser_needs_is_kept() -> None:
    picture = themed(DRAWN)
    assert '<path d="M0 36H72V0.12H0z" clip-path="url(#p1)" class="b"/>' in picture
    assert ".c{font-size:8px;}" in picture and '<text class="c" x="1.98">two  words</text>' in picture
    assert picture.count("words") == 1 and "figure_1" not in picture and "when" not in picture
    assert 'viewBox="0 0 72 36"' in picture


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_both_schemes_and_is_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert LIGHT in text and DARK in text and 'id="only-light"' in text and 'id="only-dark"' in text
    assert len(text) < 60_000
    assert "http" not in text.replace("http://www.w3.org/", "")


def test_no_plot_has_a_fixed_background() -> None:
    assert PICTURES and {path.name for path in ASSETS.glob("*.png")} == {"m1_perfetto.png", "player.png"}, "of screens"
