"""What a model's processor files say: how large pictures become, how their values are scaled, how videos are sampled.

Read from the files themselves and not through `AutoProcessor`, which wants torchvision for any directory that has a
video processor. Real checkpoints have `preprocessor_config.json` and `video_preprocessor_config.json`, or, as saved by
transformers 5, both inside one `processor_config.json`. What the files ask for and this engine does not do is an error:
a model that is shown other pictures than in its training answers worse without saying so. vLLM and SGLang:
`AutoProcessor` of transformers.
"""

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from transformers import Qwen2VLImageProcessorPil
from transformers.utils.hub import cached_file

from m1_single_request.errors import ConfigError, ModelLoadError, shown
from m1_single_request.model_loader import load_part
from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.multimodal.video import FrameSampling

BOTH_FILE, IMAGE_FILE, VIDEO_FILE = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
BICUBIC = 3
STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
IMAGE_KEYS = ("size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "rescale_factor")

VIDEO_DEFAULTS: dict[str, Any] = {
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
    "max_video_tokens": 768,
}
"""Of `Qwen3VLVideoProcessor`, for what a file does not say."""


class VisionShape(Protocol):
    """What of a model's `vision_config` the processor must agree with."""

    @property
    def patch_size(self) -> int: ...
    @property
    def temporal_patch_size(self) -> int: ...
    @property
    def spatial_merge_size(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class PixelSettings:
    """How pictures become values, for images or for videos."""

    patch_size: int
    """Pixels along a side of a patch."""
    temporal_patch_size: int
    """Frames in a patch."""
    merge_size: int
    """Patches along a side of the block that becomes one token."""
    min_pixels: int
    """An image, or all frames of a video together, is brought to at least so many pixels ..."""
    max_pixels: int
    """... and to at most so many."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float

    @property
    def factor(self) -> int:
        """Sides of what the model sees are multiples of this."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, kw_only=True)
class VideoSettings(PixelSettings):
    """The same for videos, with how they are sampled."""

    sampling: FrameSampling = field(default_factory=FrameSampling)
    max_frame_tokens: int | None = None
    """Tokens that one frame may become, as `cap_pixels_per_frame` and `max_video_tokens` say. None: not capped."""

    def most_pixels(self, num_frames: int) -> int:
        """Of so many frames together."""
        if self.max_frame_tokens is None:
            return self.max_pixels
        share = min(self.max_frame_tokens * self.factor**2, self.max_pixels // num_frames)
        return max(share, int(self.min_pixels * 1.05)) * num_frames


def read_settings(name: str, config: MultimodalConfig, vision: VisionShape) -> tuple[PixelSettings, VideoSettings]:
    """The settings for images and for videos of a model directory or hub id.

    Raises `ModelLoadError` for files that are missing, broken, at odds with `vision` or not honoured here, and
    `ConfigError` if the limits of `config` and of the files contradict each other.
    """
    both = _read(name, BOTH_FILE) or {}
    images, videos = (
        (BOTH_FILE, both[key]) if both.get(key) else (filename, _read(name, filename))
        for key, filename in (("image_processor", IMAGE_FILE), ("video_processor", VIDEO_FILE))
    )
    if images[1] is None:
        raise ModelLoadError(f"{name} has no {IMAGE_FILE}: the model's files for images are missing, get them again")
    # What an image's file leaves out is what transformers' class has in its place.
    size = {key: value for key, value in _with_size(name, *images).items() if key == "size"}
    known = load_part(name, "its image processor", lambda: Qwen2VLImageProcessorPil(**size))
    defaults = {key: _plain(getattr(known, key)) for key in IMAGE_KEYS}
    image = PixelSettings(**_pixel_settings(name, images[0], defaults, images[1], vision))
    return _overridden(name, image, config), _video_settings(name, videos[0], videos[1] or {}, vision)


def _read(name: str, filename: str) -> dict[str, Any] | None:
    def read() -> dict[str, Any] | None:
        try:
            path = str(cached_file(name, filename))
        except OSError:  # not there; were it the connection, config.json would have failed before
            return None
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ModelLoadError(f"{name}: {filename} holds {shown(content)}, not an object; get the file again")
        return content

    return load_part(name, filename, read)


def _with_size(name: str, filename: str, content: dict[str, Any]) -> dict[str, Any]:
    """`content` with the range of pixels under `size`, however the file has it: older ones have `min_pixels`."""
    if not isinstance(content, dict):
        raise ModelLoadError(f"{name}: a processor in {BOTH_FILE} is {shown(content)}, not an object; correct the file")
    size = content.get("size") or {}
    if not isinstance(size, dict):
        raise ModelLoadError(f"{name}: size={shown(size)} in {filename} must name shortest_edge and longest_edge")
    size = dict(size)
    for edge, pixels in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        inside = size.pop(pixels, None)
        named = next((value for value in (content.get(pixels), size.get(edge), inside) if value is not None), None)
        if named is not None:
            size[edge] = named
    edges = ("shortest_edge", "longest_edge")
    found = {edge: size[edge] for edge in edges if edge in size}
    return {key: value for key, value in content.items() if key != "size"} | ({"size": found} if found else {})


def _plain(value: Any) -> Any:
    """transformers keeps `size` as an object of its own."""
    edges = ("shortest_edge", "longest_edge")
    return value if isinstance(value, int | float | list | tuple) else {edge: value[edge] for edge in edges}


def _pixel_settings(
    name: str, filename: str, defaults: dict[str, Any], content: dict[str, Any], vision: VisionShape
) -> dict[str, Any]:
    """The fields of `PixelSettings`."""
    stated = {key: value for key, value in _with_size(name, filename, content).items() if value is not None}
    settings = defaults | stated
    settings["size"] = defaults["size"] | stated.get("size", {})
    for step in STEPS:
        if stated.get(step, True) is not True:
            raise ModelLoadError(f"{name}: {step}={shown(stated[step])} in {filename} is not supported, only true is")
    if stated.get("resample", BICUBIC) != BICUBIC:
        raise ModelLoadError(f"{name}: resample={shown(stated['resample'])} in {filename}: only {BICUBIC}, bicubic, is")
    for key, mine in (("patch_size",) * 2, ("temporal_patch_size",) * 2, ("merge_size", "spatial_merge_size")):
        if _whole(name, filename, settings, key) != getattr(vision, mine):
            raise ModelLoadError(
                f"{name}: {key}={shown(settings[key])} in {filename}, but the vision tower has "
                f"{getattr(vision, mine)}; the files do not belong together"
            )
    low, high = (_whole(name, filename, settings["size"], edge) for edge in ("shortest_edge", "longest_edge"))
    if low > high:
        raise ModelLoadError(f"{name}: {filename} asks for at least {low} and at most {high} pixels; correct the file")
    mean, std = (_three(name, filename, settings, key) for key in ("image_mean", "image_std"))
    rescale = _number(name, filename, settings, "rescale_factor")
    if 0.0 in std:
        raise ModelLoadError(f"{name}: image_std in {filename} has a 0, by which nothing can be divided")
    return {
        "patch_size": settings["patch_size"],
        "temporal_patch_size": settings["temporal_patch_size"],
        "merge_size": settings["merge_size"],
        "min_pixels": low,
        "max_pixels": high,
        "mean": mean,
        "std": std,
        "rescale_factor": rescale,
    }


def _video_settings(name: str, filename: str, content: dict[str, Any], vision: VisionShape) -> VideoSettings:
    pixels = _pixel_settings(name, filename, VIDEO_DEFAULTS, content, vision)
    settings = VIDEO_DEFAULTS | {key: value for key, value in content.items() if value is not None}
    if settings.get("num_frames") is not None or settings.get("do_sample_frames", True) is not True:
        raise ModelLoadError(f"{name}: {filename} asks for a number of frames; only sampling by fps is supported")
    frames = {key: _whole(name, filename, settings, key) for key in ("min_frames", "max_frames")}
    if frames["min_frames"] > frames["max_frames"]:
        raise ModelLoadError(f"{name}: min_frames in {filename} is more than max_frames; correct the file")
    capped = bool(settings.get("cap_pixels_per_frame"))
    return VideoSettings(
        **pixels,
        sampling=FrameSampling(fps=_number(name, filename, settings, "fps"), **frames),
        max_frame_tokens=_whole(name, filename, settings, "max_video_tokens") if capped else None,
    )


def _overridden(name: str, image: PixelSettings, config: MultimodalConfig) -> PixelSettings:
    """`image` with the limits of `config`, where it has any."""
    low, high = config.min_pixels or image.min_pixels, config.max_pixels or image.max_pixels
    if low > high:
        given = "max_pixels" if config.min_pixels is None else "min_pixels"
        raise ConfigError(
            f"{given}={getattr(config, given)} contradicts {name}, whose images have {image.min_pixels} to "
            f"{image.max_pixels} pixels; give min_pixels and max_pixels"
        )
    if high < image.factor**2:
        raise ConfigError(f"max_pixels={high} is less than one token of {name}, {image.factor}x{image.factor} pixels")
    return replace(image, min_pixels=low, max_pixels=high)


def _whole(name: str, filename: str, settings: dict[str, Any], key: str) -> int:
    value = settings.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"{name}: {key}={shown(value)} in {filename} must be a whole number of at least 1")
    return value


def _number(name: str, filename: str, settings: dict[str, Any], key: str) -> float:
    value = settings.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise ModelLoadError(f"{name}: {key}={shown(value)} in {filename} must be a number above 0")
    return float(value)


def _three(name: str, filename: str, settings: dict[str, Any], key: str) -> tuple[float, ...]:
    values = settings.get(key)
    if not isinstance(values, list | tuple) or len(values) != 3 or not all(map(_is_finite, values)):
        raise ModelLoadError(f"{name}: {key}={shown(values)} in {filename} must be three numbers")
    return tuple(float(value) for value in values)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
