"""A video is a row of frames, however it was handed in; few are sampled, and only those are looked at."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from m1_single_request.errors import shown
from m6_multimodal_pd.multimodal.decode_video import Frames, FrameSampling
from tests.m6_multimodal_pd import media_files
from tests.m6_multimodal_pd.media_files import encoded, read
from tests.support.wrong_values import INFINITE, NAN

SHADES = [0, 60, 120, 180, 240]
CLIP = np.stack([np.full((6, 8, 3), shade, np.uint8) for shade in SHADES])  # [5, 6, 8, 3]


def load(source: Any, sampling: FrameSampling | None = None, config: Any = None, **options: Any) -> Frames:
    part = {"type": "video", "video": source, **options}
    media = read(part, sampling, **config or {})
    assert isinstance(media, Frames)
    assert media.pixels.dtype == np.uint8 and len(media.pixels) == len(media.indices)
    return media


def refused(source: Any, config: Any = None, **options: Any) -> str:
    return media_files.refused({"type": "video", "video": source, **options}, **config or {})


def picture(shade: int = 0, size: tuple[int, int] = (8, 6)) -> Image.Image:
    return Image.new("RGB", size, (shade,) * 3)


def animation(form: str = "GIF", duration: Any = 200, shades: Any = tuple(SHADES), **options: Any) -> bytes:
    buffer = io.BytesIO()
    first, *others = [picture(shade) for shade in shades]
    lossless = {"lossless": True} if form == "WEBP" else {}
    first.save(buffer, form, save_all=True, append_images=others, duration=duration, **lossless, **options)
    return buffer.getvalue()


def shades(frames: Frames) -> list[int]:
    """The one grey of each frame."""
    assert all((frame == frame[0, 0]).all() for frame in frames.pixels)
    return frames.pixels[:, 0, 0, 0].tolist()


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "video_fps", "options", "indices"),
    [  # as Qwen3-VL's video processor samples, with its fps 2 and 4 to 768 frames
        (1, 30, {}, [0]),
        (300, 30, {}, [0, 16, 31, 47, 63, 79, 94, 110, 126, 142, 157, 173, 189, 205, 220, 236, 252, 268, 283, 299]),
        (7, 25, {"fps": 4}, [0, 2, 4, 6]),
        (9, 1, {"num_frames": 3}, [0, 4, 8]),
        (9, 1, {"num_frames": 1}, [0]),
        (2, 24, {}, [0, 1]),  # fewer than the least
    ],
)
def test_frames_are_sampled_evenly(total: int, video_fps: float, options: dict[str, Any], indices: list[int]) -> None:
    media = load(np.zeros((total, 2, 2, 3), np.uint8), video_fps=video_fps, **options)
    assert list(media.indices) == indices
    assert (media.video_fps, media.total) == (video_fps, total)


def test_sampling_keeps_between_least_and_most() -> None:
    clip = np.zeros((100, 1, 1, 3), np.uint8)
    sampling = FrameSampling(fps=2, min_frames=4, max_frames=16)
    assert len(load(clip, sampling, video_fps=100).indices) == 4
    assert len(load(clip, sampling, video_fps=10).indices) == 16
    assert len(load(clip, sampling, video_fps=20).indices) == 10
    assert len(load(clip, sampling, video_fps=1e-4).indices) == 16
    assert len(load(clip, sampling, video_fps=1e300, fps=1e-4).indices) == 4  # no number is too large


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fps": 2, "num_frames": 4}, "exclude each other"),
        ({"fps": 9e-5}, "fps=9e-05 must be a number of frames a second, 0.0001 at least"),
        ({"num_frames": 0}, "num_frames=0"),
        ({"num_frames": 2.0}, "num_frames=2.0"),
        ({"num_frames": True}, "num_frames=True"),
        ({"num_frames": 6}, "num_frames=6 is more than the 5 frames"),
        ({"num_frames": 10**5000}, "num_frames="),
        ({"max_frames": 3}, "known are type, video, video_fps, fps, num_frames"),
    ],
)
def test_options_of_a_video_are_checked(options: dict[str, Any], says: str) -> None:
    assert says in refused(CLIP, **options)


@pytest.mark.parametrize("name", ["fps", "video_fps"])
@pytest.mark.parametrize("value", [0, "2", True, NAN, INFINITE, 10**400], ids=shown)
def test_a_rate_is_a_number_of_frames_a_second(name: str, value: Any) -> None:
    assert f"{name}={shown(value)} must be" in refused(CLIP, **{name: value})


# --- the forms of one video -------------------------------------------------------------------------------------------


def test_every_form_of_a_video_gives_the_same_frames(tmp_path: Path) -> None:
    for name, frame in zip(("f1", "f2", "f10", "f11", "f100"), CLIP, strict=True):
        Image.fromarray(frame).save(tmp_path / f"{name}.png")
    (tmp_path / "f3.txt").write_text("not a frame")
    (tmp_path / "f4.png").mkdir()
    gif = animation()
    file = tmp_path / "clip.gif.bin"
    file.write_bytes(gif)
    url = f"data:image/gif;base64,{base64.b64encode(gif).decode()}"
    mixed = [CLIP[0], Image.fromarray(CLIP[1]), encoded(Image.fromarray(CLIP[2])), tmp_path / "f11.png"]
    mixed.append(str(tmp_path / "f100.png"))
    forms = [CLIP, list(CLIP), mixed, tuple(mixed), tmp_path, str(tmp_path), gif, file, str(file), bytearray(gif), url]
    for form in forms:
        media = load(form, num_frames=3)
        assert (shades(media), media.indices, media.total) == ([0, 120, 240], (0, 2, 4), 5)
    for value in (url, {"url": url}):
        media = read({"type": "video_url", "video_url": value, "fps": 5})
        assert shades(media) == SHADES


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_an_animation_says_how_fast_it_is(form: str) -> None:
    media = load(animation(form, duration=[100, 100, 100, 100, 600]))
    assert media.video_fps == pytest.approx(5)  # 5 frames in a second
    assert shades(media) == [SHADES[i] for i in media.indices] and len(media.indices) == 4
    assert load(animation(form), video_fps=1, fps=1).indices == (0, 1, 2, 3, 4)


def test_without_a_word_a_video_has_24_frames_a_second_and_an_animation_10() -> None:
    assert load(CLIP).video_fps == load(list(CLIP)).video_fps == 24
    assert load(animation(duration=0)).video_fps == pytest.approx(10)  # as browsers show it


def test_the_picture_for_readers_without_animation_is_no_frame() -> None:
    assert shades(load(animation("PNG", shades=[7, *SHADES], default_image=True), num_frames=5)) == SHADES


def test_frames_that_are_drawn_over_each_other_are_whole() -> None:
    buffer = io.BytesIO()
    frames = [picture(0), picture(0), picture(0)]
    frames[1].paste((255, 0, 0), (0, 0, 2, 2))
    frames[2].paste((255, 0, 0), (0, 0, 2, 2))
    frames[2].paste((0, 255, 0), (4, 4, 6, 6))
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=100)
    media = load(buffer.getvalue(), num_frames=3)
    for got, drawn in zip(media.pixels, frames, strict=True):
        np.testing.assert_array_equal(got, np.asarray(drawn))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ([], "no frames"),
        (np.zeros((4, 0, 4, 3), np.uint8), "no pixels"),
        (np.zeros((4, 4, 3), np.uint8), "[frames, height, width, 3]"),
        (np.zeros((4, 3, 4, 4), np.uint8), "[frames, height, width, 3]"),
        (np.zeros((4, 4, 4, 3)), "(array * 255)"),
        (torch.zeros(4, 3, 6, 8, dtype=torch.uint8), "torch tensor [4, 3, 6, 8] is not taken; give a uint8 array"),
        (picture(), "is no video"),
        ([picture(), 7], "frame 1 of video: 7 is no image"),
        ([picture(), picture(size=(9, 6))], "frame 1 of video: it is 9x6, the first 8x6"),
        (encoded(picture()), "still picture"),
        (b"", "empty"),
        (b"something else", "none of"),
        (animation()[:-30], "decoded"),
        (b"\0\0\0\x20ftypisom" + bytes(50), "give a list of frames"),
        ("", "its path is empty"),
        ("absent.gif", "No such file"),
        ("absent.mp4", ".mp4 files are not read; give a list of frames"),
        ("nul\0", "cannot be read"),
        ("http://host/clip.gif", "allowed_url_schemes"),
    ],
)
def test_what_is_no_video_is_refused_with_what_to_give(source: Any, says: str) -> None:
    assert says in refused(source)


def test_a_folder_without_frames_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no frame")
    assert "no frames in" in refused(tmp_path)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_frames_are_counted_before_any_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(5):
        (tmp_path / f"{index}.png").write_bytes(encoded(picture()))
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("it was opened"))
    for source in (CLIP, [b"x"] * 5, tmp_path):
        assert "max_video_frames=4 " in refused(source, {"max_video_frames": 4})


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_decoded_no_further_than_its_limits(form: str) -> None:
    """All of its frames count, because the last is drawn over all others."""
    content = animation(form)
    assert "max_video_frames=4 " in refused(content, {"max_video_frames": 4}, num_frames=1)
    assert "max_video_pixels=239 " in refused(content, {"max_video_pixels": 239}, num_frames=1)
    assert "max_image_pixels=47 " in refused(content, {"max_image_pixels": 47}, num_frames=1)
    exactly = {"max_video_frames": 5, "max_video_pixels": 240, "max_image_pixels": 48}
    assert load(content, config=exactly).total == 5


def test_of_single_frames_only_the_sampled_count() -> None:
    config = {"max_video_pixels": 96}
    for source in (CLIP, list(CLIP)):
        assert len(load(source, config=config, num_frames=2).indices) == 2
        assert "3 frames of 8x6 are 144 pixels, more than max_video_pixels=96 " in refused(source, config, num_frames=3)


def test_frames_that_were_not_sampled_are_not_looked_at() -> None:
    frames = [encoded(picture()), b"broken", b"broken", encoded(picture())]
    assert load(frames, num_frames=2).indices == (0, 3)
    assert "frame 1 of video" in refused(frames, num_frames=4)


def test_pixels_of_a_video_are_limited_before_the_second_frame_is_read() -> None:
    assert "max_video_pixels=95 " in refused([picture(), b"broken"], {"max_video_pixels": 95})
