"""Step 3 of an image's way, for videos: frames are resized, normalised and packed into rows of patches.

transformers does this with torchvision, which has no build for a CPU-only torch of every release. So these functions
are ours, with equal results: torchvision resizes uint8 frames on a CPU with torch's bicubic filter, which rounds and
clamps after each of its two passes; the same torch function is called here, because a filter on floats that rounds at
the end has other results. vLLM and SGLang: transformers' `Qwen3VLVideoProcessor`.
"""

import numpy as np
import torch
from torch import Tensor

from m6_multimodal_pd.multimodal.media_settings import PixelSettings


def video_rows(pixels: np.ndarray, size: tuple[int, int], settings: PixelSettings) -> np.ndarray:
    """Resize uint8 frames `[frames, height, width, 3]` to a width and height; return rows of patches, as `pack`."""
    frames = resize(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), *reversed(size))
    return pack(
        normalise(frames, settings.image_mean, settings.image_std, settings.rescale_factor),
        patch=settings.patch_size,
        temporal_patch=settings.temporal_patch_size,
        merge=settings.merge_size,
    )


def resize(frames: Tensor, height: int, width: int) -> Tensor:
    """Return uint8 frames `[frames, 3, h, w]` as uint8 `[frames, 3, height, width]`."""
    if frames.shape[-2:] == (height, width):
        return frames
    return torch.nn.functional.interpolate(frames, size=(height, width), mode="bicubic", antialias=True)


def normalise(frames: Tensor, mean: tuple[float, ...], std: tuple[float, ...], rescale: float) -> Tensor:
    """Return uint8 frames `[frames, 3, h, w]` as float32: `(pixel * rescale - mean) / std`."""
    # Scaling is folded into mean and std, as transformers does for videos: for images it divides first, and the last
    # bit of a value may differ.
    scaled_mean, scaled_std = (torch.tensor(values)[:, None, None] * (1.0 / rescale) for values in (mean, std))
    return frames.to(torch.float32).sub_(scaled_mean).div_(scaled_std)


def pack(frames: Tensor, *, patch: int, temporal_patch: int, merge: int) -> np.ndarray:
    """Return float32 frames `[frames, 3, h, w]` as rows of patches.

    Shape: `[grid_t * grid_h * grid_w, 3 * temporal_patch * patch * patch]`. Rows come frame pair by frame pair, inside
    it by blocks of `merge` x `merge` patches that will be one token, from top left to bottom right, and inside a block
    in the same way. A row is channel, frame, y, x. The last frame is repeated until the count divides by
    `temporal_patch`.
    """
    if missing := -len(frames) % temporal_patch:
        frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
    _, channels, height, width = frames.shape
    rows, columns = height // (merge * patch), width // (merge * patch)
    blocks = frames.reshape(-1, temporal_patch, channels, rows, merge, patch, columns, merge, patch)
    #                       pair, block row, block column, row, column in it, channel, frame, y, x
    ordered = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return ordered.reshape(-1, channels * temporal_patch * patch * patch).numpy()
