"""Step 3 of an image's way: from pixels to rows of patches, which the vision tower reads.

An image is resized so that its sides are multiples of 32, cut into patches of 16 x 16 pixels, and its values are scaled
to -1 .. 1; a block of 2 x 2 patches will be one token. A video is the same with time: two frames make one layer of
patches, and each layer has a timestamp, which stands in the prompt as text. Images go through transformers' numpy
processor; videos through `video_patches.py`, because transformers' processor for them requires torchvision. vLLM: the
`Qwen3VLProcessor` of transformers, called in `multimodal/processing`; SGLang: `QwenVLImageProcessor`
(`multimodal/processors/qwen_vl.py`).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as image_size
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as video_size

from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.multimodal.decode_image import Picture, Pixels
from m6_multimodal_pd.multimodal.decode_video import Frames
from m6_multimodal_pd.multimodal.inputs import Grid, Modality, MultimodalDataItem, content_hash
from m6_multimodal_pd.multimodal.processor_settings import BICUBIC, PixelSettings, VideoSettings, read_settings
from m6_multimodal_pd.multimodal.video_patches import normalise, pack, resize

MAX_ASPECT_RATIO = 200  # transformers' own limit


@dataclass(frozen=True)
class Layout:
    """Size of an item after processing, computed from its size before."""

    grid_thw: Grid
    """Patches along time, height and width."""
    merged_hw: tuple[int, int]
    """Rows and columns of blocks of patches, each of which becomes one token."""
    size: tuple[int, int]
    """Width and height after resizing, in pixels."""

    @property
    def frame_tokens(self) -> list[int]:
        """Number of placeholders of each layer of patches; an image has one layer."""
        return [self.merged_hw[0] * self.merged_hw[1]] * self.grid_thw[0]

    @property
    def num_tokens(self) -> int:
        """Number of placeholders in the prompt."""
        return sum(self.frame_tokens)


@dataclass(frozen=True)
class ProcessedItem:
    """One image or video as the vision tower reads it, and what the prompt needs to place it."""

    item: MultimodalDataItem
    """Without a place: its `offsets` are empty. Its feature is in the order of `video_patches.pack`."""
    layout: Layout
    timestamps: tuple[float, ...]
    """Seconds, one for each layer of the grid's time; none for an image."""


class VisionProcessor:
    """Makes `ProcessedItem`s as the model's own processor would, and keeps nothing of their pixels."""

    def __init__(self, image: PixelSettings, video: VideoSettings) -> None:
        self.image, self.video = image, video
        self.options_key = json.dumps([asdict(image), asdict(video)], sort_keys=True).encode()
        """All settings that change features: two processors with the same key make the same features of an item."""
        self._images = Qwen2VLImageProcessorPil(**asdict(image), resample=BICUBIC)

    @classmethod
    def from_directory(cls, name: str | Path, config: MultimodalConfig, vision: Any) -> "VisionProcessor":
        """Return the processor of a model directory or hub id, with the limits of `config` in place of its own.

        `vision` is the model's `vision_config`. Raises `ModelLoadError` or `ConfigError`, see `read_settings`.
        """
        return cls(*read_settings(str(name), config, vision))

    def image_layout(self, width: int, height: int, what: str = "image") -> Layout:
        """Return the layout of an image of this size. Raises `InvalidMediaError` if it is too long and narrow."""
        check_aspect_ratio(width, height, what)
        settings = self.image
        rows, columns = image_size(
            height, width, factor=settings.factor, min_pixels=settings.min_pixels, max_pixels=settings.max_pixels
        )
        return _layout(settings, 1, columns, rows)

    def video_layout(self, num_frames: int, width: int, height: int, what: str = "video") -> Layout:
        """Return the layout of a video of sampled frames. Raises `InvalidMediaError` for one frame only, too."""
        settings = self.video
        if num_frames < settings.temporal_patch_size:
            raise InvalidMediaError(
                f"{what}: {num_frames} frame is no video, {settings.temporal_patch_size} are needed; "
                "give more, or give it as an image"
            )
        check_aspect_ratio(width, height, what)
        rows, columns = video_size(
            num_frames,  # as sampled, before the last is repeated: so does transformers
            height,
            width,
            temporal_factor=settings.temporal_patch_size,
            factor=settings.factor,
            min_pixels=settings.min_pixels,
            max_pixels=settings.most_pixels(num_frames),
        )
        return _layout(settings, -(-num_frames // settings.temporal_patch_size), columns, rows)

    def layout(self, media: Picture | Frames, what: str) -> Layout:
        """Return the layout of the item that `process` will make. Raises `InvalidMediaError` as that does."""
        height, width = media.pixels.shape[-3:-1]
        if isinstance(media, Picture):
            return self.image_layout(width, height, what)
        return self.video_layout(len(media.pixels), width, height, what)

    def process(self, media: Picture | Frames, what: str = "the item") -> ProcessedItem:
        """Resize, normalise and pack. Raises `InvalidMediaError` for an item that no size fits; `what` names it."""
        layout = self.layout(media, what)
        if isinstance(media, Picture):
            return ProcessedItem(self._item(media, Modality.IMAGE, self._image_rows(media.pixels), layout), layout, ())
        seconds = timestamps(media.indices, media.video_fps, self.video.temporal_patch_size)
        feature = self._video_rows(media.pixels, layout)
        return ProcessedItem(self._item(media, Modality.VIDEO, feature, layout), layout, seconds)

    def _item(
        self, media: Picture | Frames, modality: Modality, feature: np.ndarray, layout: Layout
    ) -> MultimodalDataItem:
        height, width = media.pixels.shape[-3:-1]
        return MultimodalDataItem(
            modality=modality,
            offsets=(),
            feature=feature,
            grid_thw=layout.grid_thw,
            hash=content_hash(modality, feature, layout.grid_thw, self.options_key),
            size=(width, height),
        )

    def _image_rows(self, pixels: Pixels) -> np.ndarray:
        # the format is passed, because the processor infers a wrong one for an image of three rows
        made = self._images.preprocess([pixels], input_data_format="channels_last", return_tensors="np")
        return np.ascontiguousarray(made["pixel_values"], dtype=np.float32)

    def _video_rows(self, pixels: np.ndarray, layout: Layout) -> np.ndarray:
        settings = self.video
        frames = resize(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), *reversed(layout.size))
        return pack(
            normalise(frames, settings.image_mean, settings.image_std, settings.rescale_factor),
            patch=settings.patch_size,
            temporal_patch=settings.temporal_patch_size,
            merge=settings.merge_size,
        )


def timestamps(indices: tuple[int, ...], video_fps: float, temporal_patch: int) -> tuple[float, ...]:
    """Return the time of each layer of patches, in seconds: the mean of its first frame's and its last frame's."""
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
    return Layout(grid, (height // settings.factor, width // settings.factor), (width, height))
