"""Step 2 of an image's way, for videos: the frames to sample, and their pixels.

A clip of a minute has more frames than a model should read. `FrameSampling` selects them as transformers does: a number
per second, with a minimum and a maximum, evenly spread from the first to the last. Frames come as a list, an array, a
folder of files, or an animation that PIL reads (GIF, APNG, WebP). Only the sampled ones are decoded, except in an
animation, whose frames are drawn one over the other: to reach the last, all must be decoded, and all count against the
limits. vLLM: `VideoMediaIO` (`multimodal/media/video.py`); SGLang: `load_video`.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from m1_single_request.errors import shown
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.multimodal.config import MultimodalConfig
from m6_multimodal_pd.multimodal.decode_image import (
    SUFFIXES,
    Pixels,
    check_size,
    is_tensor,
    load_pixels,
    open_encoded,
    read_encoded,
    reading,
    to_rgb,
)
from m6_multimodal_pd.multimodal.fetch import scheme_of
from m6_multimodal_pd.multimodal.media_parts import VIDEO_OPTIONS

DEFAULT_FPS = 24.0
"""Frames per second of a video without that option, as transformers assumes."""
UNTIMED_MS = 100
"""Duration of a frame of an animation that has none, in milliseconds, as in browsers."""
SLOWEST_FPS = 1e-4
"""Minimum frames per second: one frame in three hours. Times are written into the prompt as text."""
ANIMATIONS = ("GIF", "PNG", "WEBP")
CONTAINERS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".flv", ".wmv", ".ogv")
CONTAINER_HEAD = re.compile(rb"....ftyp|\x1aE\xdf\xa3|RIFF....AVI |\x00\x00\x01[\xba\xb3]|FLV\x01|OggS", re.DOTALL)
"""First bytes of mp4 and mov, mkv and webm, avi, mpeg, flv, ogg."""
FORMS = "a list of frames, a uint8 array [frames, height, width, 3], a folder of frame files, or a GIF, APNG or WebP"


@dataclass(frozen=True)
class Frames:
    """The sampled frames of a video."""

    pixels: np.ndarray
    """uint8 `[sampled, height, width, 3]`, RGB."""
    indices: tuple[int, ...]
    """Their indices in the video, ascending, from 0."""
    video_fps: float
    """Frames per second of the video itself: frame `i` was taken at second `i / video_fps`."""
    total: int
    """Number of frames of the video."""


@dataclass(frozen=True)
class VideoOptions:
    """Options of a request for its video. At most one of `fps` and `num_frames` is set."""

    video_fps: float | None = None
    fps: float | None = None
    num_frames: int | None = None

    @classmethod
    def of(cls, part: Mapping[str, Any], what: str) -> "VideoOptions":
        """Return the options in a part of a message. Raises `InvalidMediaError` for an invalid value."""
        options = cls(**{name: part[name] for name in VIDEO_OPTIONS if part.get(name) is not None})
        for name in ("video_fps", "fps"):
            value = getattr(options, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and SLOWEST_FPS <= value <= sys.float_info.max):
                raise InvalidMediaError(
                    f"{what}: {name}={shown(value)} must be a number of frames a second, {SLOWEST_FPS} at least"
                )
        wanted = options.num_frames
        if wanted is not None and (not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1):
            raise InvalidMediaError(f"{what}: num_frames={shown(wanted)} must be a whole number of at least 1")
        if wanted is not None and options.fps is not None:
            raise InvalidMediaError(f"{what}: fps={options.fps} and num_frames={wanted} exclude each other; give one")
        return options


@dataclass(frozen=True)
class FrameSampling:
    """A processor's sampling of frames, for a request without options."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768

    def indices(self, total: int, video_fps: float, options: VideoOptions, what: str) -> tuple[int, ...]:
        """Return the indices of the frames to read, evenly spread over `total`, with the first and the last."""
        wanted = options.num_frames
        if wanted is None:
            by_time = total / video_fps * (options.fps or self.fps)
            wanted = min(max(int(min(by_time, self.max_frames)), self.min_frames), self.max_frames, total)
        elif wanted > total:
            raise InvalidMediaError(f"{what}: num_frames={shown(wanted)} is more than the {total} frames it has")
        return tuple(np.linspace(0, total - 1, wanted).round().astype(int).tolist())


ReadFrame = Callable[[int, str], Pixels]
"""Returns the pixels of the frame at an index; its name is for errors."""


class VideoLoader:
    """Makes `Frames` of a video in any accepted form."""

    def __init__(self, config: MultimodalConfig, sampling: FrameSampling) -> None:
        self.config = config
        self.sampling = sampling

    def load(self, source: object, options: VideoOptions, what: str) -> Frames:
        """Return the sampled frames. Raises `InvalidMediaError` for a source that cannot be used."""
        if isinstance(source, np.ndarray) and (source.ndim != 4 or source.shape[3] != 3):
            raise InvalidMediaError(f"{what}: the array is {list(source.shape)}; give uint8 [frames, height, width, 3]")
        if isinstance(source, np.ndarray | list | tuple):
            return self._of_pictures(source, options, what)
        if isinstance(source, Path) or (isinstance(source, str) and scheme_of(source) is None):
            path = Path(source)
            if source != "" and os.path.isdir(path):
                return self._of_pictures(self._frame_files(path, what), options, what)
            if path.suffix.lower() in CONTAINERS:
                raise InvalidMediaError(f"{what}: {path.suffix} files are not read; give {FORMS}")
        elif not isinstance(source, str | bytes | bytearray | memoryview) and not is_tensor(source):
            raise InvalidMediaError(f"{what}: {shown(source)} is no video; give {FORMS}")
        encoded = read_encoded(source, self.config, what)
        if CONTAINER_HEAD.match(encoded):
            raise InvalidMediaError(f"{what}: mp4 and other containers of compressed video are not read; give {FORMS}")
        return self._of_animation(encoded, options, what)

    def _of_pictures(self, sources: Sequence[object] | np.ndarray, options: VideoOptions, what: str) -> Frames:
        self._check_total(len(sources), what)

        def read(index: int, name: str) -> Pixels:
            return load_pixels(sources[index], self.config, name)

        return self._sampled(len(sources), options.video_fps or DEFAULT_FPS, options, what, read)

    def _frame_files(self, folder: Path, what: str) -> list[Path]:
        """Return the image files of a folder in the order of the numbers in their names: frame 2 before frame 10."""
        files: list[Path] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.lower().endswith(SUFFIXES) and entry.is_file():
                        files.append(Path(entry.path))
                        self._check_total(len(files), what)
        except OSError as error:
            raise InvalidMediaError(f"{what}: the folder {shown(str(folder))} cannot be read: {error}") from error
        if not files:
            raise InvalidMediaError(f"{what}: no frames in {shown(str(folder))}; they end in {', '.join(SUFFIXES)}")
        return sorted(files, key=lambda path: (_natural(path.name), path.name))

    def _of_animation(self, encoded: bytes, options: VideoOptions, what: str) -> Frames:
        with reading(what), open_encoded(encoded) as image:
            first = 1 if image.info.get("default_image") else 0  # an APNG's image for programs without animation
            durations = [self._walked(image, index + 1, what) for index in _seek_all(image, first)]
        if len(durations) < 2:
            raise InvalidMediaError(f"{what}: it is a still picture, not a video; give it as an image, or give {FORMS}")
        video_fps = options.video_fps or 1000 * len(durations) / sum(durations)
        with reading(what), open_encoded(encoded) as image:
            return self._sampled(len(durations), video_fps, options, what, partial(_pick, image, first))

    def _sampled(self, total: int, video_fps: float, options: VideoOptions, what: str, read: ReadFrame) -> Frames:
        indices = self.sampling.indices(total, video_fps, options, what)
        return Frames(self._stack(indices, what, read), indices, float(video_fps), total)

    def _walked(self, image: Image.Image, frames: int, what: str) -> float:
        """Check an animation up to this frame and decode the frame; return its duration in milliseconds."""
        self._check_total(frames, what)
        self._check_pixels(*image.size, frames, what)
        image.load()
        duration = image.info.get("duration", 0)
        return duration if duration > 0 else UNTIMED_MS

    def _stack(self, indices: Sequence[int], what: str, read: ReadFrame) -> np.ndarray:
        frames = np.empty((0, 0, 0, 3), dtype=np.uint8)
        for place, index in enumerate(indices):
            pixels = read(index, f"frame {index} of {what}")
            height, width = pixels.shape[:2]
            if place == 0:
                self._check_pixels(width, height, len(indices), what)
                frames = np.empty((len(indices), height, width, 3), dtype=np.uint8)
            if pixels.shape != frames.shape[1:]:
                size = f"it is {width}x{height}, the first {frames.shape[2]}x{frames.shape[1]}"
                raise InvalidMediaError(f"frame {index} of {what}: {size}; give frames of one size")
            frames[place] = pixels
        return frames

    def _check_total(self, total: int, what: str) -> None:
        if total == 0:
            raise InvalidMediaError(f"{what}: it has no frames")
        if total > self.config.max_video_frames:
            limit = self.config.max_video_frames
            raise InvalidMediaError(f"{what}: it has more than max_video_frames={limit:,} of MultimodalConfig")

    def _check_pixels(self, width: int, height: int, frames: int, what: str) -> None:
        check_size(width, height, self.config, what)
        if frames * width * height > self.config.max_video_pixels:
            raise InvalidMediaError(
                f"{what}: {frames} frames of {width}x{height} are {frames * width * height:,} pixels, more than "
                f"max_video_pixels={self.config.max_video_pixels:,} of MultimodalConfig; reduce them, or sample fewer"
            )


def _seek_all(image: Image.Image, first: int) -> Iterator[int]:
    """Seek one frame after the other and yield its number, from 0. A GIF has no number of frames in its header."""
    if image.format not in ANIMATIONS:
        yield 0
        return
    known = None if image.format == "GIF" else getattr(image, "n_frames", 1)
    for index in count() if known is None else range(known - first):
        try:
            image.seek(index + first)
        except EOFError:
            if known is None and index:
                return
            raise
        yield index


def _pick(image: Image.Image, first: int, index: int, name: str) -> Pixels:
    image.seek(index + first)
    return to_rgb(image, name)


def _natural(name: str) -> list[Any]:
    return [int(piece) if i % 2 else piece for i, piece in enumerate(re.split(r"([0-9]+)", name.lower()))]
