"""Two hundred damaged files: each is a picture after all or one clear error, and no limit is passed."""

import io
import random
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from m6_multimodal_pd.errors import InvalidMediaError
from tests.m6_multimodal_pd.media_files import read

SEEDS = 200
LIMIT = 64 * 64
LIMITS = {"max_image_pixels": LIMIT, "max_video_pixels": 8 * LIMIT, "max_video_frames": 8}
FORMS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
MODES = ("RGB", "L", "P", "RGBA", "1", "I;16")


def valid(rng: random.Random, form: str, frames: int = 1) -> bytes:
    """A small file of this format, with metadata in it and in one of the modes that the format has."""
    width, height = rng.randint(1, 40), rng.randint(1, 40)
    noise = np.random.default_rng(rng.randrange(2**32))
    pictures = [Image.fromarray(noise.integers(0, 256, (height, width, 4), dtype=np.uint8)) for _ in range(frames)]
    mode = rng.choice({"PNG": MODES, "JPEG": ("RGB", "L", "CMYK"), "BMP": ("RGB", "L", "1")}.get(form, ("RGB", "RGBA")))
    if mode == "I;16":
        pictures = [Image.fromarray(np.asarray(picture)[:, :, 0].astype(np.uint16) * 257) for picture in pictures]
    else:
        pictures = [picture.convert("RGB" if mode == "CMYK" else mode).convert(mode) for picture in pictures]
    exif = Image.Exif()
    exif[0x0112] = rng.randint(1, 8)
    more = {"exif": exif} if form in ("PNG", "JPEG", "WEBP") else {}
    if frames > 1:
        more |= {"save_all": True, "append_images": pictures[1:], "duration": rng.choice([0, 40, 1000])}
    buffer = io.BytesIO()
    pictures[0].save(buffer, form, **more)
    return buffer.getvalue()


def flipped(rng: random.Random, content: bytes) -> bytes:
    """Some bytes anywhere are others."""
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 12)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def truncated(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def header_changed(rng: random.Random, content: bytes) -> bytes:
    """Bytes of the header are others: sizes, flags, lengths, tables."""
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(damaged), 64))
        damaged[at : at + 2] = rng.choice([b"\xff\xff", b"\0\0", rng.randbytes(2), b"\x7f\xff"])
    return bytes(damaged)


def torn(rng: random.Random, content: bytes) -> bytes:
    """A piece is missing, doubled, or has something else put into it."""
    start, end = sorted(rng.randrange(len(content)) for _ in range(2))
    return content[:start] + rng.choice([b"", content[start:end] * 2, rng.randbytes(20)]) + content[end:]


def with_checksums(rng: random.Random, content: bytes) -> bytes:
    """A PNG damaged inside a chunk, whose checksum is right: the decoder itself has to notice."""
    if not content.startswith(b"\x89PNG"):
        return flipped(rng, content)
    chunks, at = [], 8
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        chunks.append((content[at + 4 : at + 8], bytearray(content[at + 8 : at + 8 + length])))
        at += 12 + length
    _, body = rng.choice([chunk for chunk in chunks if chunk[1]])
    for _ in range(rng.randint(1, 4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    written = (struct.pack(">I", len(b)) + k + b + struct.pack(">I", zlib.crc32(k + b)) for k, b in chunks)
    return content[:8] + b"".join(written)


DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    flipped,
    truncated,
    header_changed,
    torn,
    with_checksums,
)


def fuzzed(seed: int, frames: int = 1) -> bytes:
    rng = random.Random(seed)
    form = FORMS[seed % len(FORMS)] if frames == 1 else ("GIF", "PNG", "WEBP")[seed % 3]
    return DAMAGES[seed // 5 % len(DAMAGES)](rng, valid(rng, form, frames))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_damaged_file_is_a_picture_or_one_clear_error(seed: int) -> None:
    """Warnings are errors here, so none came either."""
    try:
        media = read({"type": "image", "image": fuzzed(seed)}, **LIMITS)
    except InvalidMediaError as error:
        assert str(error).startswith("image: ") and "\n" not in str(error)
    else:
        height, width, channels = media.pixels.shape
        assert media.pixels.dtype == np.uint8 and channels == 3
        assert 0 < height * width <= LIMIT


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_animation_is_a_video_or_one_clear_error(seed: int) -> None:
    try:
        media = read({"type": "video", "video": fuzzed(seed, frames=4)}, **LIMITS)
    except InvalidMediaError as error:
        assert str(error).startswith(("video: ", "frame ")) and "\n" not in str(error)
    else:
        assert media.pixels.size // 3 <= 8 * LIMIT and media.video_fps > 0
        assert len(media.pixels) == len(media.indices) <= media.total <= 8


def test_the_files_are_neither_all_broken_nor_all_whole() -> None:
    """Else the two tests above would have seen nothing."""
    taken = 0
    for seed in range(SEEDS):
        try:
            read({"type": "image", "image": fuzzed(seed)}, **LIMITS)
            taken += 1
        except InvalidMediaError:
            pass
    assert SEEDS // 10 < taken < SEEDS - SEEDS // 10
