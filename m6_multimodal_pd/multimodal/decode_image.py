"""Step 2 of an image's way: from a file, an array or a PIL image to RGB pixels, after its size was checked.

A file of some kilobytes can claim to be an image of gigabytes, so the size in its header is compared with the limit
before a pixel is decoded. PIL tries only the formats that cameras, screens and browsers write, none that starts another
program (EPS) and none that is a document (PDF). Every exception of PIL becomes an `InvalidMediaError`.

Pixels are converted here alone, so that file, array and PIL image of one image are the same image:

- the EXIF orientation is applied, so that a photo of a phone is upright. transformers' `load_image` does
  so too; its image processor, given a PIL image, does not.
- transparency is laid over white, as the image processor of newer transformers does. Dropping the alpha channel, as
  older ones do, shows colours that were not meant to be visible: under a transparent background there is often black.
- 16 bits of grey become 8 by leaving out the lower ones. PIL's own conversion makes everything above 255 white.

vLLM: `ImageMediaIO` (`multimodal/media/image.py`); SGLang: `load_image`.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from m1_single_request.errors import shown
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.multimodal.config import MultimodalConfig
from m6_multimodal_pd.multimodal.fetch import check_bytes, read_file, read_url, scheme_of

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
SUFFIXES = (".png", ".apng", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
FORMS = "a PIL image, a path, the bytes of a file, a data: URL or a uint8 array [height, width, 3]"

WHITE = (255, 255, 255, 255)
PREMULTIPLIED = {"RGBa": "RGBA", "La": "LA"}
"""Modes whose colours have been multiplied with their alpha, and what they are without."""

Pixels = np.ndarray
"""uint8 `[height, width, 3]`, RGB."""


@dataclass(frozen=True)
class Picture:
    """One still image."""

    pixels: Pixels


def load_pixels(source: object, config: MultimodalConfig, what: str) -> Pixels:
    """Return the pixels of an image in any accepted form; never a view of memory that the caller may change."""
    if isinstance(source, np.ndarray):
        check_array(source, what)
        check_size(source.shape[1], source.shape[0], config, what)
        return _array_to_rgb(source, what)
    if isinstance(source, Image.Image):
        with reading(what):
            check_size(*source.size, config, what)
            return to_rgb(source, what)
    encoded = read_encoded(source, config, what)
    with reading(what), open_encoded(encoded) as image:
        check_size(*image.size, config, what)
        return to_rgb(image, what)


def read_encoded(source: object, config: MultimodalConfig, what: str) -> bytes:
    """Return the bytes of an encoded file: the source itself, or the file at a path or a URL."""
    if isinstance(source, bytes | bytearray | memoryview):
        check_bytes(memoryview(source).nbytes, config, what)
        return bytes(source)
    if isinstance(source, str) and scheme_of(source) is not None:
        return read_url(source, config, what)
    if isinstance(source, str | Path):
        return read_file(source, config, what)
    if is_tensor(source):
        raise InvalidMediaError(
            f"{what}: a torch tensor {list(source.shape)} is not taken; give a uint8 array, whose channels come last: "
            "tensor.movedim(-3, -1).numpy() of a tensor [3, height, width] or [frames, 3, height, width]"
        )
    raise InvalidMediaError(f"{what}: {shown(source)} is no image; give {FORMS}")


def is_tensor(source: object) -> TypeGuard[Any]:
    """Return whether this is a torch tensor; torch is not imported for that."""
    return any((kind.__module__, kind.__name__) == ("torch", "Tensor") for kind in type(source).__mro__)


def open_encoded(encoded: bytes) -> Image.Image:
    """Open a file with PIL, which reads its header and decodes no pixel yet. To be called inside `reading`."""
    return Image.open(BytesIO(encoded), formats=FORMATS)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Convert all exceptions of PIL into `InvalidMediaError`, and silence its warnings.

    That of a decompression bomb, too: the limit here is `max_image_pixels`, and it is checked.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except InvalidMediaError:
            raise
        except UnidentifiedImageError as error:
            raise InvalidMediaError(f"{what}: its bytes are none of {', '.join(FORMATS)}, or are damaged") from error
        except Image.DecompressionBombError as error:
            raise InvalidMediaError(
                f"{what}: it is too large to be decoded: {error} This limit is PIL's own, twice "
                "PIL.Image.MAX_IMAGE_PIXELS; max_image_pixels of MultimodalConfig holds below it"
            ) from error
        except Exception as error:  # such as OSError, SyntaxError, struct.error, EOFError, MemoryError
            raise InvalidMediaError(f"{what}: it cannot be decoded: {error or type(error).__name__}") from error


def check_size(width: int, height: int, config: MultimodalConfig, what: str) -> None:
    """Raise `InvalidMediaError` for an image without pixels or with more than `max_image_pixels`."""
    if width < 1 or height < 1:
        raise InvalidMediaError(f"{what}: it has no pixels, its size is {width}x{height}")
    if width * height > config.max_image_pixels:
        raise InvalidMediaError(
            f"{what}: {width}x{height} are {width * height:,} pixels, more than "
            f"max_image_pixels={config.max_image_pixels:,} of MultimodalConfig; reduce it first"
        )


def to_rgb(image: Image.Image, what: str) -> Pixels:
    """Decode `image`, turn it upright, and convert its mode. To be called inside `reading`."""
    image = _upright(image)
    if image.mode in PREMULTIPLIED:
        image = image.convert(PREMULTIPLIED[image.mode])
    if image.mode.startswith("I"):  # 16 bits of grey; "I" is how some versions of PIL open them
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise InvalidMediaError(f"{what}: its grey values are not of 16 bits; convert it to 8 bits first")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise InvalidMediaError(f"{what}: its pixels are floats of an unknown range; convert it to 8 bits first")
    elif "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
    return np.array(image.convert("RGB"))


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation. A damaged one is ignored, as by viewers."""
    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # such as SyntaxError, struct.error
        return image


def check_array(array: np.ndarray, what: str) -> None:
    """Raise `InvalidMediaError` unless these are pixels: uint8, [height, width] or [height, width, 1, 3 or 4]."""
    if array.dtype.kind == "f":
        raise InvalidMediaError(
            f"{what}: the array is {array.dtype}, and its range is unknown; pixels are uint8, from 0 to 255: where "
            "they are 0 to 1, give (array * 255).round().astype('uint8')"
        )
    if array.dtype != np.uint8:
        raise InvalidMediaError(f"{what}: the array is {array.dtype}; pixels are uint8, from 0 to 255")
    if array.ndim != 2 and not (array.ndim == 3 and array.shape[2] in (1, 3, 4)):
        raise InvalidMediaError(
            f"{what}: the array is {list(array.shape)}; pixels are [height, width, 3], or 4 with alpha, or grey as "
            "[height, width]; channels come last"
        )


def _array_to_rgb(array: np.ndarray, what: str) -> Pixels:
    if array.ndim == 2:
        array = array[:, :, None]
    if array.shape[2] == 4:
        return to_rgb(Image.fromarray(np.ascontiguousarray(array)), what)
    return np.array(np.broadcast_to(array, (*array.shape[:2], 3)), order="C")
