"""Step 3 of an image's way, once per model: the settings of its processor files, for sizes, values and sampling.

They are read from the files themselves: `AutoProcessor` requires torchvision for any directory that has a video
processor. Checkpoints have `preprocessor_config.json` and `video_preprocessor_config.json`, or, as saved by
transformers 5, both inside one `processor_config.json`. A setting that this engine does not support is an error: a
model whose images are processed in another way than in its training answers worse without any message. vLLM and
SGLang: `AutoProcessor` of transformers.
"""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from transformers.utils.hub import cached_file

from m1_single_request.errors import ConfigError, ModelLoadError, shown
from m1_single_request.model_loader import load_part
from m6_multimodal_pd.multimodal.config import MultimodalConfig
from m6_multimodal_pd.multimodal.decode_video import FrameSampling
from m6_multimodal_pd.multimodal.media_settings import BICUBIC, Count, PixelSettings, Rate, VideoSettings

BOTH_FILE, IMAGE_FILE, VIDEO_FILE = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
SIZES = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size", "merge_size": "spatial_merge_size"}
"""Keys that the vision tower has, too, and their names there."""
EDGES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
"""Keys of `size`, and their names in older files."""
IMAGES: dict[str, Any] = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28},
}
VIDEOS: dict[str, Any] = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
    "max_video_tokens": 768,
}
"""`IMAGES` and `VIDEOS` are the values of keys that a file does not have: those of transformers'
`Qwen2VLImageProcessorPil` and `Qwen3VLVideoProcessor`, which take longer to import than all else."""
Object = Annotated[dict[str, Any], msgspec.Meta(description="an object")]
SAMPLING = {"fps": Rate, "min_frames": Count, "max_frames": Count}


def read_settings(name: str, config: MultimodalConfig, vision: Any) -> tuple[PixelSettings, VideoSettings]:
    """Return the settings for images and for videos of a model directory or hub id. `vision`: its `vision_config`.

    Raises `ModelLoadError` for files that are missing, broken, contradict `vision` or need an unsupported setting, and
    `ConfigError` if the limits of `config` and of the files contradict each other.
    """
    both = _read(name, BOTH_FILE) or {}
    (image_file, images), (video_file, videos) = (
        (BOTH_FILE, _checked(name, BOTH_FILE, both, key, Object))
        if both.get(key)
        else (filename, _read(name, filename))
        for key, filename in (("image_processor", IMAGE_FILE), ("video_processor", VIDEO_FILE))
    )
    if images is None:
        raise ModelLoadError(f"{name} has no {IMAGE_FILE}: the model's files for images are missing, get them again")
    image = PixelSettings(**_pixel_settings(name, image_file, IMAGES, images, vision))
    return _overridden(name, image, config), _video_settings(name, video_file, videos or {}, vision)


def _read(name: str, filename: str) -> dict[str, Any] | None:
    def read() -> dict[str, Any] | None:
        try:
            path = str(cached_file(name, filename))
        except OSError:  # there is no such file: without a connection config.json would have failed before
            return None
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_hook=_stated)
        return msgspec.convert(content, dict[str, Any])

    return load_part(name, filename, read)


def _stated(content: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an object that are not null: those have their defaults."""
    return {key: value for key, value in content.items() if value is not None}


def _pixel_settings(
    name: str, filename: str, default: dict[str, Any], stated: dict[str, Any], vision: Any
) -> dict[str, Any]:
    """Return the fields of `PixelSettings`."""
    for step in STEPS:
        if stated.get(step, True) is not True:
            raise ModelLoadError(f"{name}: {step}={shown(stated[step])} in {filename} is not supported, only true is")
    if stated.get("resample", BICUBIC) != BICUBIC:
        raise ModelLoadError(
            f"{name}: resample={shown(stated['resample'])} in {filename} is not supported, only {BICUBIC} (bicubic) is"
        )
    kinds = {each.name: each.type for each in fields(PixelSettings) if each.name not in EDGES.values()}
    settings = default | stated
    checked = {key: _checked(name, filename, settings, key, kind) for key, kind in kinds.items()}
    for key, mine in SIZES.items():
        if checked[key] != getattr(vision, mine):
            raise ModelLoadError(
                f"{name}: {key}={checked[key]} in {filename}, but the vision tower has {getattr(vision, mine)}; the "
                f"files do not belong together"
            )
    if 0.0 in checked["image_std"]:
        raise ModelLoadError(f"{name}: image_std in {filename} contains 0, and pixels are divided by it")
    return checked | _pixel_range(name, filename, default["size"], stated)


def _pixel_range(name: str, filename: str, default: dict[str, int], stated: dict[str, Any]) -> dict[str, int]:
    """Return the minimum and maximum number of pixels, by their names in `PixelSettings`, whatever the file's are."""
    size = stated.get("size", {})
    if not isinstance(size, dict):
        raise ModelLoadError(f"{name}: size={shown(size)} in {filename} must name shortest_edge and longest_edge")
    found = {}
    for edge, pixels in EDGES.items():
        value = stated.get(pixels, size.get(edge, size.get(pixels, default[edge])))
        found[pixels] = _checked(name, filename, {edge: value}, edge, Count)
    low, high = found.values()
    if low > high:
        raise ModelLoadError(f"{name}: {filename} requires at least {low} and at most {high} pixels; correct the file")
    return found


def _video_settings(name: str, filename: str, stated: dict[str, Any], vision: Any) -> VideoSettings:
    pixels = _pixel_settings(name, filename, VIDEOS, stated, vision)
    if "num_frames" in stated or stated.get("do_sample_frames", True) is not True:
        raise ModelLoadError(f"{name}: {filename} sets a number of frames; only sampling by fps is supported")
    settings = VIDEOS | stated
    frames = {key: _checked(name, filename, settings, key, kind) for key, kind in SAMPLING.items()}
    if frames["min_frames"] > frames["max_frames"]:
        raise ModelLoadError(f"{name}: min_frames in {filename} is more than max_frames; correct the file")
    is_capped = bool(stated.get("cap_pixels_per_frame"))
    return VideoSettings(
        **pixels,
        sampling=FrameSampling(**frames),
        max_frame_tokens=_checked(name, filename, settings, "max_video_tokens", Count) if is_capped else None,
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


def _checked(name: str, filename: str, settings: dict[str, Any], key: str, kind: Any) -> Any:
    """Return a value of a file as its type, one of those above. Raise `ModelLoadError` for another value."""
    try:
        return msgspec.convert(settings[key], kind)
    except (msgspec.ValidationError, UnicodeError) as error:
        wanted = kind.__metadata__[0].description
        raise ModelLoadError(f"{name}: {key}={shown(settings[key])} in {filename} must be {wanted}") from error
