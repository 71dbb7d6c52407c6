"""Step 3 of an image's way, once per model: the settings of its processor files, for sizes, values and sampling.

They are read from the files themselves: `AutoProcessor` requires torchvision for any directory that has a video
processor. Checkpoints have `preprocessor_config.json` and `video_preprocessor_config.json`, or, as saved by
transformers 5, both inside one `processor_config.json`. A setting that this engine does not support is an error: a
model whose images are processed in another way than in its training answers worse without any message. vLLM and
SGLang: `AutoProcessor` of transformers.
"""

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.utils.hub import cached_file

from m1_single_request.errors import ConfigError, ModelLoadError, shown
from m1_single_request.model_loader import load_part
from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.multimodal.decode_video import FrameSampling

BOTH_FILE, IMAGE_FILE, VIDEO_FILE = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
BICUBIC = 3
STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
PIXEL_KEYS = ("size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "rescale_factor")
VIDEO_KEYS = ("fps", "min_frames", "max_frames", "max_video_tokens")
EDGES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
"""Keys of `size`, and their names in older files."""


@dataclass(frozen=True, kw_only=True)
class PixelSettings:
    """Sizes and values of images or of videos."""

    patch_size: int
    """Pixels along a side of a patch."""
    temporal_patch_size: int
    """Frames in a patch."""
    merge_size: int
    """Patches along a side of the block that becomes one token."""
    min_pixels: int
    """Minimum number of pixels after resizing, of an image or of all frames of a video together ..."""
    max_pixels: int
    """... and the maximum."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float

    @property
    def factor(self) -> int:
        """Pixels along a side of a token; the sides of a resized image are multiples of it."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, kw_only=True)
class VideoSettings(PixelSettings):
    """The same for videos, and their sampling."""

    sampling: FrameSampling = field(default_factory=FrameSampling)
    max_frame_tokens: int | None = None
    """Maximum number of tokens of one frame (`max_video_tokens` with `cap_pixels_per_frame`). None: no maximum."""

    def most_pixels(self, num_frames: int) -> int:
        """Return the maximum number of pixels of all frames together."""
        if self.max_frame_tokens is None:
            return self.max_pixels
        share = min(self.max_frame_tokens * self.factor**2, self.max_pixels // num_frames)
        return max(share, int(self.min_pixels * 1.05)) * num_frames


def read_settings(name: str, config: MultimodalConfig, vision: Any) -> tuple[PixelSettings, VideoSettings]:
    """Return the settings for images and for videos of a model directory or hub id. `vision`: its `vision_config`.

    Raises `ModelLoadError` for files that are missing, broken, contradict `vision` or need an unsupported setting, and
    `ConfigError` if the limits of `config` and of the files contradict each other.
    """
    both = _read(name, BOTH_FILE) or {}
    (image_file, images), (video_file, videos) = (
        (BOTH_FILE, both[key]) if both.get(key) else (filename, _read(name, filename))
        for key, filename in (("image_processor", IMAGE_FILE), ("video_processor", VIDEO_FILE))
    )
    if images is None:
        raise ModelLoadError(f"{name} has no {IMAGE_FILE}: the model's files for images are missing, get them again")
    image = PixelSettings(**_pixel_settings(name, image_file, Qwen2VLImageProcessorPil, images, vision))
    return _overridden(name, image, config), _video_settings(name, video_file, videos or {}, vision)


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


def _pixel_settings(name: str, filename: str, processor: Any, content: Any, vision: Any) -> dict[str, Any]:
    """Return the fields of `PixelSettings`. A key that is not in the file has the value of transformers' class."""
    if not isinstance(content, dict):
        raise ModelLoadError(f"{name}: a processor in {BOTH_FILE} is {shown(content)}, not an object; correct the file")
    stated = {key: value for key, value in content.items() if value is not None}
    settings = {key: getattr(processor, key) for key in PIXEL_KEYS} | stated
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
    low, high = _pixel_range(name, filename, processor.size, stated)
    mean, std = (_three(name, filename, settings, key) for key in ("image_mean", "image_std"))
    if 0.0 in std:
        raise ModelLoadError(f"{name}: image_std in {filename} has a 0, by which nothing can be divided")
    return {
        **{key: settings[key] for key in ("patch_size", "temporal_patch_size", "merge_size")},
        "min_pixels": low,
        "max_pixels": high,
        "mean": mean,
        "std": std,
        "rescale_factor": _number(name, filename, settings, "rescale_factor"),
    }


def _pixel_range(name: str, filename: str, default: dict[str, int], stated: dict[str, Any]) -> tuple[int, int]:
    """Return the minimum and maximum number of pixels, however the file names them."""
    size = stated.get("size", {})
    if not isinstance(size, dict):
        raise ModelLoadError(f"{name}: size={shown(size)} in {filename} must name shortest_edge and longest_edge")
    found = dict(default)
    for edge, pixels in EDGES.items():
        values = (stated.get(pixels), size.get(edge), size.get(pixels))
        found[edge] = next((value for value in values if value is not None), default[edge])
    low, high = (_whole(name, filename, found, edge) for edge in EDGES)
    if low > high:
        raise ModelLoadError(f"{name}: {filename} asks for at least {low} and at most {high} pixels; correct the file")
    return low, high


def _video_settings(name: str, filename: str, content: dict[str, Any], vision: Any) -> VideoSettings:
    pixels = _pixel_settings(name, filename, Qwen3VLVideoProcessor, content, vision)
    stated = {key: value for key, value in content.items() if value is not None}
    settings = {key: getattr(Qwen3VLVideoProcessor, key) for key in VIDEO_KEYS} | stated
    if "num_frames" in stated or stated.get("do_sample_frames", True) is not True:
        raise ModelLoadError(f"{name}: {filename} asks for a number of frames; only sampling by fps is supported")
    frames = {key: _whole(name, filename, settings, key) for key in ("min_frames", "max_frames")}
    if frames["min_frames"] > frames["max_frames"]:
        raise ModelLoadError(f"{name}: min_frames in {filename} is more than max_frames; correct the file")
    is_capped = bool(stated.get("cap_pixels_per_frame"))
    return VideoSettings(
        **pixels,
        sampling=FrameSampling(fps=_number(name, filename, settings, "fps"), **frames),
        max_frame_tokens=_whole(name, filename, settings, "max_video_tokens") if is_capped else None,
    )


def _overridden(name: str, image: PixelSettings, config: MultimodalConfig) -> PixelSettings:
    """Return `image` with the limits of `config`, where it has any."""
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
    if not _is_finite(value) or not value > 0:
        raise ModelLoadError(f"{name}: {key}={shown(value)} in {filename} must be a number above 0")
    return float(value)


def _three(name: str, filename: str, settings: dict[str, Any], key: str) -> tuple[float, ...]:
    values = settings.get(key)
    if not isinstance(values, list | tuple) or len(values) != 3 or not all(map(_is_finite, values)):
        raise ModelLoadError(f"{name}: {key}={shown(values)} in {filename} must be three numbers")
    return tuple(float(value) for value in values)


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
