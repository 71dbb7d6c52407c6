"""Settings of a model's media reader: sizes and values of its images and videos, its placeholders, and limits.

They are all that another process needs to read the same images (`media_process.py`), so this file imports no torch.
`processor_settings.py` reads them from the model's files.
"""

import sys
from dataclasses import dataclass
from typing import Annotated

import msgspec

from m6_multimodal_pd.multimodal.config import MultimodalConfig
from m6_multimodal_pd.multimodal.decode_video import FrameSampling

BICUBIC = 3
"""Number of the filter that resizes images, in PIL and in the files of processors."""

Count = Annotated[int, msgspec.Meta(ge=1, description="a whole number of at least 1")]
Rate = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max, description="a number above 0")]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Channels = Annotated[tuple[Finite, Finite, Finite], msgspec.Meta(description="three numbers")]
"""Types of settings; errors of `processor_settings.py` contain their descriptions."""


@dataclass(frozen=True, kw_only=True)
class PixelSettings:
    """Sizes and values of images or of videos, by the keys of the files."""

    patch_size: Count
    """Pixels along a side of a patch."""
    temporal_patch_size: Count
    """Frames in a patch."""
    merge_size: Count
    """Patches along a side of the block that becomes one token."""
    min_pixels: Count
    """Minimum number of pixels after resizing, of an image or of all frames of a video together ..."""
    max_pixels: Count
    """... and the maximum."""
    image_mean: Channels
    image_std: Channels
    rescale_factor: Rate

    @property
    def factor(self) -> int:
        """Pixels along a side of a token; the sides of a resized image are multiples of it."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True, kw_only=True)
class VideoSettings(PixelSettings):
    """The same for videos, and their sampling."""

    sampling: FrameSampling
    max_frame_tokens: int | None
    """Maximum number of tokens of one frame (`max_video_tokens` with `cap_pixels_per_frame`). None: no maximum."""

    def most_pixels(self, num_frames: int) -> int:
        """Return the maximum number of pixels of all frames together."""
        if self.max_frame_tokens is None:
            return self.max_pixels
        share = min(self.max_frame_tokens * self.factor**2, self.max_pixels // num_frames)
        return max(share, int(self.min_pixels * 1.05)) * num_frames


@dataclass(frozen=True, kw_only=True)
class MediaTokens:
    """Token ids of images and videos in a prompt."""

    image: int
    """Placeholder of an image, one for each of its embeddings."""
    video: int
    """Placeholder of a frame of a video, one for each of its embeddings."""
    vision_start: int
    vision_end: int


@dataclass(frozen=True, kw_only=True)
class MediaSettings:
    """Settings of a media reader."""

    config: MultimodalConfig
    image: PixelSettings
    video: VideoSettings
    tokens: MediaTokens
    max_item_tokens: int
    """Size of the largest item whose embeddings fit into the embedding cache."""
