"""Pictures and clips as files, and as the engine reads them."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from m1_single_request.errors import InvalidRequestError
from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.multimodal.decode_video import FrameSampling
from m6_multimodal_pd.multimodal.media_reader import MediaLoader


def encoded(pixels: np.ndarray | Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """A file with this picture."""
    buffer = io.BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(buffer, form, **options)
    return buffer.getvalue()


def read(part: Any, sampling: FrameSampling | None = None, **config: Any) -> Any:
    """What the engine reads of a part of a message."""
    return MediaLoader(MultimodalConfig(**config), sampling or FrameSampling()).load(part)


def refused(part: Any, **config: Any) -> str:
    """The message with which a part is refused: an error of the family that the engine reports."""
    with pytest.raises(InvalidMediaError) as caught:
        read(part, **config)
    assert isinstance(caught.value, InvalidRequestError) and len(str(caught.value)) < 450
    return str(caught.value)
