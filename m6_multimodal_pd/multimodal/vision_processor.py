"""From pixels to what the vision tower reads: rows of patches, and the grid that they came from.

A picture is brought to a size whose sides are multiples of 32, cut into patches of 16 x 16 pixels, and its values are
scaled to -1 .. 1; a block of 2 x 2 patches will be one token. A video is the same with time: two frames make one layer
of patches, and each layer has a timestamp, which stands in the prompt as text. Images go through transformers' own
numpy processor; videos through `patches.py`, because transformers' needs torchvision. vLLM: the `Qwen3VLProcessor` of
transformers, called in `multimodal/processing`; SGLang: `QwenVLImageProcessor` (`multimodal/processors/qwen_vl.py`).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.multimodal.media import Picture
from m6_multimodal_pd.multimodal.patches import MAX_ASPECT_RATIO, fitting_size, normalise, pack, resize
from m6_multimodal_pd.multimodal.processor_settings import (
    BICUBIC,
    PixelSettings,
    VideoSettings,
    VisionShape,
    read_settings,
)
from m6_multimodal_pd.multimodal.video import Frames, FrameSampling


@dataclass(frozen=True)
class Layout:
    """What a picture or a video will become, known from its size alone."""

    grid_thw: tuple[int, int, int]
    """Patches along time, height and width."""
    num_tokens: int
    """Placeholders in the prompt, all frames together."""
    size: tuple[int, int]
    """Width and height in pixels as the model will see it."""


@dataclass(frozen=True)
class ProcessedItem:
    """One picture or video as the vision tower reads it."""

    feature: np.ndarray
    """float32, [num_patches, 3 * temporal_patch * patch * patch], in the order of `patches.pack`."""
    grid_thw: tuple[int, int, int]
    """Patches along time, height and width."""
    timestamps: tuple[float, ...]
    """Seconds, one for each layer of the grid's time; none for an image."""
    size: tuple[int, int]
    """Width and height in pixels as handed in."""
    num_frames: int
    """Frames that were sampled; 1 for an image."""


class VisionProcessor:
    """Makes `ProcessedItem`s as the model's own processor would. It keeps nothing of what it is given."""

    def __init__(self, image: PixelSettings, video: VideoSettings) -> None:
        self.image = image
        self.video = video
        self._images = Qwen2VLImageProcessorPil(
            size={"shortest_edge": image.min_pixels, "longest_edge": image.max_pixels},
            patch_size=image.patch_size,
            temporal_patch_size=image.temporal_patch_size,
            merge_size=image.merge_size,
            image_mean=list(image.mean),
            image_std=list(image.std),
            rescale_factor=image.rescale_factor,
            resample=BICUBIC,
        )

    @classmethod
    def from_directory(cls, name: str | Path, config: MultimodalConfig, vision: VisionShape) -> "VisionProcessor":
        """The processor of a model directory or hub id, with the limits of `config` in place of its own.

        `vision` is the model's `vision_config`. Raises `ModelLoadError` or `ConfigError`, see `read_settings`.
        """
        return cls(*read_settings(str(name), config, vision))

    @property
    def sampling(self) -> FrameSampling:
        """How videos are sampled, for the `MediaLoader`."""
        return self.video.sampling

    @property
    def options_key(self) -> bytes:
        """Every setting that changes features: two processors with the same key make the same of the same pixels."""
        return json.dumps([asdict(self.image), asdict(self.video)], sort_keys=True).encode()

    def image_layout(self, width: int, height: int, what: str = "image") -> Layout:
        """What a picture of this size will become. Raises `InvalidMediaError` if it is too long and narrow."""
        check_aspect_ratio(width, height, what)
        rows, columns = smart_resize(
            height,
            width,
            factor=self.image.factor,
            min_pixels=self.image.min_pixels,
            max_pixels=self.image.max_pixels,
        )
        return _layout(self.image, 1, columns, rows)

    def video_layout(self, num_frames: int, width: int, height: int, what: str = "video") -> Layout:
        """What a video of so many sampled frames will become. Raises `InvalidMediaError` for one frame only, too."""
        settings = self.video
        if num_frames < settings.temporal_patch_size:
            raise InvalidMediaError(
                f"{what}: {num_frames} frame is no video, {settings.temporal_patch_size} are needed; "
                "give more, or give it as an image"
            )
        check_aspect_ratio(width, height, what)
        rows, columns = fitting_size(
            num_frames,  # as sampled, before the last is repeated: so does transformers
            height,
            width,
            factor=settings.factor,
            temporal_patch=settings.temporal_patch_size,
            min_pixels=settings.min_pixels,
            max_pixels=settings.most_pixels(num_frames),
        )
        return _layout(settings, -(-num_frames // settings.temporal_patch_size), columns, rows)

    def layout(self, media: Picture | Frames, what: str) -> Layout:
        """What `process` will make of it. Raises `InvalidMediaError` for what no size would fit."""
        height, width = media.pixels.shape[-3:-1]
        if isinstance(media, Picture):
            return self.image_layout(width, height, what)
        return self.video_layout(len(media.pixels), width, height, what)

    def process(self, media: Picture | Frames, what: str | None = None) -> ProcessedItem:
        """Resize, normalise and pack. Raises `InvalidMediaError` for what no size would fit; `what` names it there."""
        if isinstance(media, Picture):
            return self._process_image(media, what or "image")
        return self._process_video(media, what or "video")

    def _process_image(self, picture: Picture, what: str) -> ProcessedItem:
        height, width = picture.pixels.shape[:2]
        layout = self.image_layout(width, height, what)
        # told where the channels are: of three rows of pixels it would guess wrong
        made = self._images.preprocess([picture.pixels], input_data_format="channels_last", return_tensors="np")
        feature = np.ascontiguousarray(made["pixel_values"], dtype=np.float32)
        return ProcessedItem(feature, layout.grid_thw, (), (width, height), 1)

    def _process_video(self, video: Frames, what: str) -> ProcessedItem:
        num_frames, height, width = video.pixels.shape[:3]
        layout = self.video_layout(num_frames, width, height, what)
        settings = self.video
        frames = resize(torch.from_numpy(video.pixels).permute(0, 3, 1, 2).contiguous(), *reversed(layout.size))
        feature = pack(
            normalise(frames, settings.mean, settings.std, settings.rescale_factor),
            patch=settings.patch_size,
            temporal_patch=settings.temporal_patch_size,
            merge=settings.merge_size,
        )
        seconds = timestamps(video.indices, video.video_fps, settings.temporal_patch_size)
        return ProcessedItem(feature, layout.grid_thw, seconds, (width, height), num_frames)


def timestamps(indices: tuple[int, ...], video_fps: float, temporal_patch: int) -> tuple[float, ...]:
    """When each layer of patches was taken: halfway between its first frame and its last."""
    padded = indices + indices[-1:] * (-len(indices) % temporal_patch)
    seconds = [index / video_fps for index in padded]
    starts = range(0, len(seconds), temporal_patch)
    return tuple((seconds[start] + seconds[start + temporal_patch - 1]) / 2 for start in starts)


def check_aspect_ratio(width: int, height: int, what: str) -> None:
    """Raise `InvalidMediaError` if one side is more than 200 times the other: no resizing would keep both."""
    ratio = max(width, height) / min(width, height)
    if ratio > MAX_ASPECT_RATIO:
        raise InvalidMediaError(
            f"{what}: {width}x{height} is too long and narrow: one side is {ratio:.1f} times the other, "
            f"{MAX_ASPECT_RATIO} at most; cut it into pieces"
        )


def _layout(settings: PixelSettings, grid_t: int, width: int, height: int) -> Layout:
    grid = (grid_t, height // settings.patch_size, width // settings.patch_size)
    return Layout(grid, grid[0] * grid[1] * grid[2] // settings.merge_size**2, (width, height))
