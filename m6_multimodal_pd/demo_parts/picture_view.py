"""Pictures in a terminal: every character shows two pixels, one above the other.

Part of `python -m m6_multimodal_pd.demo`; nothing in the engine depends on it. The upper half of a character cell is
the colour of the letter `▀`, the lower half that of its background. Where there are no colours, words must do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console, RenderableType
from rich.style import Style
from rich.text import Text

HALF = "▀"
GAP = 1 / 8  # between the frames of a clip, of their width
NO_COLOURS = "This output has no colours, so pictures are described here and not drawn."


@dataclass(frozen=True)
class Shown:
    """A picture, or the frames of a clip, as they are shown to people."""

    frames: tuple[Image.Image, ...]
    words: str
    """What it is, where it cannot be drawn."""

    @property
    def image(self) -> Image.Image:
        """All that can be drawn of it: a clip is a sheet of up to four frames, to be read line by line."""
        return self.frames[0] if len(self.frames) == 1 else contact_sheet(self.frames)

    def view(self, console: Console, columns: int, rows: int) -> RenderableType:
        """Drawn in a box of so many characters, or told."""
        if draws(console):
            return half_blocks(self.image, columns, rows)
        return Text(f"[{self.words}]", style="dim")


def draws(console: Console) -> bool:
    """Whether pictures can be drawn on it."""
    if console.color_system is None or console.no_color:
        return False
    try:
        HALF.encode(console.encoding)
    except (UnicodeError, LookupError):
        return False
    return True


def half_blocks(image: Image.Image, columns: int, rows: int) -> Text:
    """A picture as characters: as large as a box of `columns` x `rows` of them allows without distorting it."""
    width, height = fitting(image.size, columns, rows)
    pixels = np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BOX)).tolist()
    lines = []
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        line = Text(no_wrap=True)
        for (above, below), run in groupby(zip(upper, lower, strict=True)):
            line.append(HALF * len(list(run)), Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below)))
        lines.append(line)
    return Text("\n", no_wrap=True).join(lines)


def fitting(size: tuple[int, int], columns: int, rows: int) -> tuple[int, int]:
    """Width and height in pixels of a picture of this size in a box of characters; the height is even."""
    scale = min(columns / size[0], 2 * rows / size[1])
    return max(round(size[0] * scale), 1), max(round(size[1] * scale / 2), 1) * 2


def contact_sheet(frames: Sequence[Image.Image]) -> Image.Image:
    """Up to four frames of a clip, the first and the last among them, two in a line."""
    chosen = [frames[i] for i in np.linspace(0, len(frames) - 1, min(len(frames), 4)).round().astype(int)]
    width, height = chosen[0].size
    lines, gap = (len(chosen) + 1) // 2, round(width * GAP)
    sheet = Image.new("RGB", (2 * width + gap, lines * height + (lines - 1) * gap))
    for number, frame in enumerate(chosen):
        row, column = divmod(number, 2)
        sheet.paste(frame, (column * (width + gap), row * (height + gap)))
    return sheet
