"""Step 3 of an image's way: from pixels to rows of patches, which the vision tower reads.

An image is resized so that its sides are multiples of 32, cut into patches of 16 x 16 pixels, and its values are scaled
to -1 .. 1; a block of 2 x 2 patches will be one token. A video is the same with time: two frames make one layer of
patches, and each layer has a timestamp, which stands in the prompt as text. All values are equal to those of
transformers' processors. These are not called, because a process that reads images would import torch for them, and
that of videos requires torchvision. vLLM: the `Qwen3VLProcessor` of transformers, called in `multimodal/processing`;
SGLang: `QwenVLImageProcessor` (`multimodal/processors/qwen_vl.py`).
"""

import json
import math
from dataclasses import asdict, dataclass

from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.multimodal.decode_image import Picture
from m6_multimodal_pd.multimodal.decode_video import Frames
from m6_multimodal_pd.multimodal.inputs import Grid, Modality, MultimodalDataItem, content_hash
from m6_multimodal_pd.multimodal.media_settings import PixelSettings, VideoSettings
from m6_multimodal_pd.multimodal.patches import image_rows, video_rows

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
    """Without a place: its `offsets` are empty. Its feature is in the order of `patches.pack`."""
    layout: Layout
    timestamps: tuple[float, ...]
    """Seconds, one for each layer of the grid's time; none for an image."""


class VisionProcessor:
    """Makes `ProcessedItem`s as the model's own processor would, and keeps nothing of their pixels."""

    def __init__(self, image: PixelSettings, video: VideoSettings) -> None:
        self.image, self.video = image, video
        self.options_key = json.dumps([asdict(image), asdict(video)], sort_keys=True).encode()
        """All settings that change features: two processors with the same key make the same features of an item."""

    def image_layout(self, width: int, height: int, what: str = "image") -> Layout:
        """Return the layout of an image of this size. Raises `InvalidMediaError` if it is too long and narrow."""
        check_aspect_ratio(width, height, what)
        return _layout(self.image, 1, *_resized(1, width, height, 1, self.image, self.image.max_pixels))

    def video_layout(self, num_frames: int, width: int, height: int, what: str = "video") -> Layout:
        """Return the layout of a video of sampled frames. Raises `InvalidMediaError` for one frame only, too."""
        settings = self.video
        if num_frames < settings.temporal_patch_size:
            raise InvalidMediaError(
                f"{what}: {num_frames} frame is no video, {settings.temporal_patch_size} are needed; "
                "give more, or give it as an image"
            )
        check_aspect_ratio(width, height, what)
        pair, most = settings.temporal_patch_size, settings.most_pixels(num_frames)
        enlarged = max(1.0, settings.factor / width, settings.factor / height)  # a side of a token at least
        size = _resized(num_frames, int(width * enlarged), int(height * enlarged), pair, settings, most)
        return _layout(settings, -(-num_frames // pair), *size)

    def layout(self, media: Picture | Frames, what: str) -> Layout:
        """Return the layout of the item that `process` will make. Raises `InvalidMediaError` as that does."""
        height, width = media.pixels.shape[-3:-1]
        if isinstance(media, Picture):
            return self.image_layout(width, height, what)
        return self.video_layout(len(media.pixels), width, height, what)

    def process(self, media: Picture | Frames, what: str = "the item") -> ProcessedItem:
        """Resize, normalise and pack. Raises `InvalidMediaError` for an item that no size fits; `what` names it."""
        layout, (height, width) = self.layout(media, what), media.pixels.shape[-3:-1]
        seconds: tuple[float, ...] = ()
        if isinstance(media, Picture):
            modality = Modality.IMAGE
            feature = image_rows(media.pixels, layout.size, self.image)
        else:
            modality = Modality.VIDEO
            seconds = timestamps(media.indices, media.video_fps, self.video.temporal_patch_size)
            feature = video_rows(media.pixels, layout.size, self.video)
        item = MultimodalDataItem(
            modality=modality,
            offsets=(),
            feature=feature,
            grid_thw=layout.grid_thw,
            hash=content_hash(modality, feature, layout.grid_thw, self.options_key),
            size=(width, height),
        )
        return ProcessedItem(item, layout, seconds)


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


def _resized(
    num_frames: int, width: int, height: int, temporal: int, settings: PixelSettings, most: int
) -> tuple[int, int]:
    """Return the width and height nearest to these that are multiples of a token's side, for `min_pixels` to `most`
    pixels of all frames together; as `smart_resize` of transformers, both of images and of videos."""
    factor, area = settings.factor, num_frames * width * height
    sides = [round(side / factor) * factor for side in (width, height)]
    together = round(num_frames / temporal) * temporal * math.prod(sides)
    if together > most:
        beta = math.sqrt(area / most)
        sides = [max(factor, math.floor(side / beta / factor) * factor) for side in (width, height)]
    elif together < settings.min_pixels:
        beta = math.sqrt(settings.min_pixels / area)
        sides = [math.ceil(side * beta / factor) * factor for side in (width, height)]
    return sides[0], sides[1]
