"""Pictures in a terminal: each character shows two pixels, one above the other.

Part of `python -m m6_multimodal_pd.demo`; no part of the engine depends on it. The upper half of a character cell has
the colour of the letter `▀`, the lower half that of its background.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.multimodal.decode_image import Picture
from m6_multimodal_pd.multimodal.decode_video import Frames, FrameSampling
from m6_multimodal_pd.multimodal.media_reader import MediaLoader

HALF = "▀"


def loaded(part: Mapping[str, Any], config: MultimodalConfig, name: str) -> Picture | Frames:
    """Return the picture or the clip of a part of a message. `name`: in errors."""
    return MediaLoader(config, FrameSampling()).load(part, name)


def shown(media: Picture | Frames, caption: str, console: Console, columns: int) -> Text:
    """Return a picture, or some frames of a clip, in at most `columns` x `columns / 2` characters.

    On a console without colours, or without the character HALF: the caption.
    """
    if console.color_system is None or console.no_color or not console.encoding.startswith("utf"):
        return Text(f"[{caption}]", style="dim")
    return half_blocks(contact_sheet(media.pixels) if isinstance(media, Frames) else media.pixels, columns)


def half_blocks(pixels: np.ndarray, columns: int) -> Text:
    """Return pixels as characters, as large as `columns` x `columns / 2` of them allow without distorting it."""
    image = Image.fromarray(pixels)
    scale = columns / max(image.size)
    size = max(round(image.width * scale), 1), max(round(image.height * scale / 2), 1) * 2
    small = np.asarray(image.resize(size, Image.Resampling.BOX)).tolist()
    drawing = Text(no_wrap=True)
    for upper, lower in zip(small[::2], small[1::2], strict=True):
        for above, below in zip(upper, lower, strict=True):
            drawing.append(HALF, Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below)))
        drawing.append("\n")
    return drawing


def contact_sheet(frames: np.ndarray) -> np.ndarray:
    """Return four frames of a clip from the first to the last, two in a line, with black lines between them."""
    chosen = np.linspace(0, len(frames) - 1, 4).round().astype(int)
    gap = len(frames[0]) // 12 + 1
    a, b, c, d = (np.pad(frames[i], ((0, gap), (0, gap), (0, 0))) for i in chosen)
    return np.vstack([np.hstack([a, b]), np.hstack([c, d])])[:-gap, :-gap]
