"""Whatever a user calls a picture becomes its RGB pixels, or one error that says what is wrong with it."""

import base64
import io
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from m6_multimodal_pd.multimodal.decode_image import Picture
from tests.m6_multimodal_pd.media_files import encoded, read, refused

PIXELS = np.random.default_rng(7).integers(0, 256, (12, 20, 3), dtype=np.uint8)


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def load(part: Any, **config: Any) -> np.ndarray:
    media = read(part, **config)
    assert isinstance(media, Picture)
    assert media.pixels.dtype == np.uint8 and media.pixels.ndim == 3 and media.pixels.shape[2] == 3
    return media.pixels


def image(source: Any, **config: Any) -> np.ndarray:
    return load({"type": "image", "image": source}, **config)


def refused_image(source: Any, **config: Any) -> str:
    return refused({"type": "image", "image": source}, **config)


# --- the forms of one picture -----------------------------------------------------------------------------------------


def test_every_form_of_a_picture_gives_the_same_pixels(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(encoded(PIXELS))
    content = encoded(PIXELS)
    forms = [Image.fromarray(PIXELS), path, str(path), content, bytearray(content), memoryview(content), PIXELS]
    for form in [*forms, data_url(content)]:
        np.testing.assert_array_equal(image(form), PIXELS)
    np.testing.assert_array_equal(load({"type": "image_url", "image_url": {"url": data_url(content)}}), PIXELS)
    np.testing.assert_array_equal(load({"type": "image_url", "image_url": data_url(content)}), PIXELS)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "GIF", "BMP", "JPEG"])
def test_formats_of_cameras_screens_and_browsers_are_read(form: str) -> None:
    flat = np.full((9, 5, 3), 80, np.uint8)
    assert np.abs(image(encoded(flat, form)).astype(int) - 80).max() <= 2


@pytest.mark.parametrize("form", ["TIFF", "PPM", "EPS", "PDF", "ICO"])
def test_other_formats_are_refused_whatever_else_pil_can_read(form: str) -> None:
    assert "PNG, JPEG" in refused_image(encoded(PIXELS, form=form))


def test_what_the_caller_changes_afterwards_does_not_matter() -> None:
    array, picture = PIXELS.copy(), Image.fromarray(PIXELS)
    loaded = [image(array), image(picture)]
    array[:] = 0
    picture.paste((0, 0, 0), (0, 0, 20, 12))
    for pixels in loaded:
        np.testing.assert_array_equal(pixels, PIXELS)


def test_a_phones_picture_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn to the right
    turned = np.rot90(PIXELS, k=-1)
    np.testing.assert_array_equal(image(encoded(PIXELS, exif=exif)), turned)
    np.testing.assert_array_equal(image(Image.open(io.BytesIO(encoded(PIXELS, exif=exif)))), turned)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "JPEG"])
@pytest.mark.parametrize("exif", [b"Exif\0\0no TIFF", b"Exif\0\0II*\0", b"junk"], ids=str)
def test_a_picture_with_damaged_exif_is_shown_as_it_is(form: str, exif: bytes) -> None:
    plain, damaged = (image(encoded(PIXELS, form=form, **options)) for options in ({}, {"exif": exif}))
    np.testing.assert_array_equal(damaged, plain)


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "1", "RGBA", "LA"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    pixels = np.where(PIXELS[:, :, :1] > 127, 255, 0).astype(np.uint8).repeat(3, axis=2)  # black and white: no loss
    np.testing.assert_array_equal(image(Image.fromarray(pixels).convert(mode)), pixels)


def test_sixteen_bits_of_grey_are_scaled_and_not_cut_off() -> None:
    grey = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    for source in (Image.fromarray(grey), encoded(grey)):
        assert image(source)[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_pixels_of_an_unknown_range_are_refused() -> None:
    assert "8 bits" in refused_image(Image.new("F", (2, 2)))
    assert "16 bits" in refused_image(Image.new("I", (2, 2), 70_000))


def test_transparency_is_laid_over_white() -> None:
    see_through = np.zeros((2, 2, 4), np.uint8)  # black, and not to be seen
    see_through[0, 0] = (200, 0, 0, 255)
    see_through[0, 1] = (0, 0, 0, 128)
    for source in (see_through, Image.fromarray(see_through), encoded(see_through)):
        pixels = image(source)
        assert pixels[0, 0].tolist() == [200, 0, 0] and pixels[1, 1].tolist() == [255, 255, 255]
        assert abs(int(pixels[0, 1, 0]) - 127) <= 1
    for mode, premultiplied in (("RGBA", "RGBa"), ("LA", "La")):
        own = Image.fromarray(see_through).convert(mode)
        np.testing.assert_allclose(image(own.convert(premultiplied)), image(own), atol=1)
    palette = Image.fromarray(np.array([[0, 1]], np.uint8)).convert("P")
    assert image(encoded(np.asarray(palette), transparency=0))[0].tolist() == [[255] * 3, [1] * 3]


# --- arrays -----------------------------------------------------------------------------------------------------------


def test_grey_arrays_become_three_equal_channels() -> None:
    for grey in (PIXELS[:, :, 0], PIXELS[:, :, :1]):
        np.testing.assert_array_equal(image(grey), PIXELS[:, :, :1].repeat(3, axis=2))


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (PIXELS / 255, "(array * 255)"),
        (PIXELS.astype(np.int64), "uint8"),
        (PIXELS > 3, "uint8"),
        (np.zeros((3, 12, 20), np.uint8), "channels come last"),
        (np.zeros((2, 4, 4, 3), np.uint8), "[2, 4, 4, 3]"),
        (np.zeros(5, np.uint8), "[5]"),
        (np.zeros((0, 20, 3), np.uint8), "20x0"),
        (np.zeros((12, 0), np.uint8), "0x12"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), "torch tensor [3, 4, 4]"),
        (None, "lacks its 'image'"),
        ([PIXELS], "no image"),
    ],
)
def test_what_is_no_picture_is_refused_with_what_to_give(array: Any, says: str) -> None:
    assert says in refused_image(array)


# --- broken files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_a_truncated_file_is_refused_and_not_half_shown(form: str) -> None:
    content = encoded(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), form)
    assert "image: " in refused_image(content[: len(content) // 2])


def test_a_picture_object_that_cannot_be_decoded_is_refused() -> None:
    lazy = Image.open(io.BytesIO(encoded(PIXELS, form="BMP")[:80]))
    assert "decoded" in refused_image(lazy)
    assert "0x5" in refused_image(Image.new("RGB", (0, 5)))


def test_paths_that_lead_to_no_file_are_refused(tmp_path: Path) -> None:
    assert "No such file" in refused_image(tmp_path / "absent.png")
    assert "No such file" in refused_image("absent.png")
    assert "folder" in refused_image(tmp_path)
    assert "regular file" in refused_image("/dev/zero")
    assert "cannot be read" in refused_image("nul\0.png")
    assert "cannot be read" in refused_image("x" * 5000)
    assert "its path is empty" in refused_image("")


# --- limits -----------------------------------------------------------------------------------------------------------


def test_bytes_are_limited_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(PIXELS)
    path = tmp_path / "large.png"
    path.write_bytes(content)
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("it was opened"))
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("it was decoded"))
    for source in (content, path, str(path), data_url(content)):
        assert "max_file_bytes=10 " in refused_image(source, max_file_bytes=10)


def test_a_file_as_large_as_the_limit_is_taken() -> None:
    content = encoded(PIXELS)
    for source in (content, data_url(content)):
        assert image(source, max_file_bytes=len(content)).shape == PIXELS.shape
        assert "max_file_bytes" in refused_image(source, max_file_bytes=len(content) - 1)


def test_a_limit_that_no_memory_could_hold_takes_none(tmp_path: Path) -> None:
    path = tmp_path / "small.png"
    path.write_bytes(encoded(PIXELS))
    for source in (path, encoded(PIXELS), data_url(encoded(PIXELS))):
        assert image(source, max_file_bytes=2**63 - 1, max_image_pixels=2**63 - 1).shape == PIXELS.shape


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_pixels_are_limited_before_they_are_decoded(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(PIXELS, form=form)
    lazy = Image.open(io.BytesIO(content))
    monkeypatch.setattr(type(lazy), "load", lambda _: pytest.fail("it was decoded"))
    for source in (content, lazy, PIXELS):
        assert "20x12 are 240 pixels, more than max_image_pixels=239 " in refused_image(source, max_image_pixels=239)


def bomb(width: int, height: int) -> bytes:
    """A PNG of some bytes whose header promises a picture of this size."""
    content = bytearray(encoded(PIXELS))
    content[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


def test_a_decompression_bomb_is_an_error_and_no_warning() -> None:
    """PIL warns from 89 million pixels on, and raises an error of its own from twice as many on."""
    for side in (7_000, 10_000, 50_000, 2**31 - 1):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert "image: " in refused_image(bomb(side, side))
    assert "max_image_pixels" in refused_image(bomb(10_000, 10_000))
    says = refused_image(bomb(20_000, 20_000), max_image_pixels=10**9)
    assert "400000000 pixels" in says and "PIL's own, twice PIL.Image.MAX_IMAGE_PIXELS" in says


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image", "image": PIXELS, "detail": "low"}, "'detail' in a part of type image is not known"),
        ({"type": "image", "image": PIXELS, "fps": 2}, "known are type, image"),
        ({"type": "image_url", "image_url": {"url": "data:", "detail": "low"}}, "known is only 'url'"),
        ({"type": "image_url", "image_url": {"url": 3}}, "must be a URL"),
        ({"type": "image_url", "image": PIXELS}, "'image' in a part of type image_url"),
        ({"type": "image"}, "lacks its 'image'"),
        ({"type": "audio", "audio": b""}, "known are image, image_url, video, video_url"),
        ({"type": ["image"]}, "known are image"),
        ({}, "type=None"),
        ("cat.png", "no part of a message"),
    ],
)
def test_nothing_is_accepted_and_ignored(part: Any, says: str) -> None:
    assert says in refused(part)
