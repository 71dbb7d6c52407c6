"""Frames of a video as rows of patches: how large they become, how they are resized and packed.

transformers has this twice: for still images in numpy, which `VisionProcessor` uses as it is, and for videos in
torchvision, which has no build for a CPU-only torch of every release. So the video's half stands here, value for value:
torchvision hands uint8 frames on a CPU to torch's own bicubic filter, which rounds and clamps after each of its two
passes; the same torch function is called here, and computing in floats and rounding at the end would be another filter.
vLLM and SGLang: transformers' `Qwen3VLVideoProcessor`.
"""

import math

import numpy as np
import torch
from torch import Tensor

MAX_ASPECT_RATIO = 200


def fitting_size(
    num_frames: int, height: int, width: int, *, factor: int, temporal_patch: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width, multiples of `factor`, that bring all frames of a video together into the range of pixels.

    The shape is kept as well as multiples of `factor` can. Sides are rounded to even where they lie halfway, and so is
    the number of pairs of frames; a range of pixels is aimed at, not kept to the last pixel.
    """
    if min(height, width) < factor:  # first larger, so that the shorter side is one block
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    pixels = round(num_frames / temporal_patch) * temporal_patch * rows * columns
    if pixels > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rows, columns


def resize(frames: Tensor, height: int, width: int) -> Tensor:
    """uint8 frames [frames, 3, h, w] as uint8 [frames, 3, height, width]."""
    if frames.shape[-2:] == (height, width):
        return frames
    return torch.nn.functional.interpolate(frames, size=(height, width), mode="bicubic", antialias=True)


def normalise(frames: Tensor, mean: tuple[float, ...], std: tuple[float, ...], rescale: float) -> Tensor:
    """uint8 frames [frames, 3, h, w] as float32, with mean and std of pixels scaled by `rescale` taken out."""
    # Scaling is folded into mean and std, as transformers does for videos: for images it divides first, and the last
    # bit of a value may differ.
    scaled_mean, scaled_std = (torch.tensor(values)[:, None, None] * (1.0 / rescale) for values in (mean, std))
    return frames.to(torch.float32).sub_(scaled_mean).div_(scaled_std)


def pack(frames: Tensor, *, patch: int, temporal_patch: int, merge: int) -> np.ndarray:
    """float32 frames [frames, 3, h, w] as rows [grid_t * grid_h * grid_w, 3 * temporal_patch * patch * patch].

    Rows come frame pair by frame pair, inside it by blocks of `merge` x `merge` patches that will be one token, from
    top left to bottom right, and inside a block in the same way. A row is channel, frame, y, x. The last frame is
    repeated until the count divides by `temporal_patch`.
    """
    if missing := -len(frames) % temporal_patch:
        frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
    count, channels, height, width = frames.shape
    blocks = frames.reshape(
        count // temporal_patch,
        temporal_patch,
        channels,
        height // (merge * patch),
        merge,
        patch,
        width // (merge * patch),
        merge,
        patch,
    )
    #                       pair, block row, block column, row, column in it, channel, frame, y, x
    ordered = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return ordered.reshape(-1, channels * temporal_patch * patch * patch).numpy()
