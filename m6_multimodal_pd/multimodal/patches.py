"""Step 3 of an image's way: pixels are resized, normalised and packed into rows of patches.

The rows are equal to those of transformers' `Qwen2VLImageProcessorPil` and `Qwen3VLVideoProcessor`, bit for bit. These
are not called: the first imports torch, which takes a process that reads images seconds, and the second requires
torchvision, which has no build for a CPU-only torch of every release. A pixel has 256 values, so a table holds the
normalised ones. vLLM and SGLang: transformers' `Qwen2VLImageProcessorFast` and `Qwen3VLVideoProcessor`.
"""

import numpy as np
from PIL import Image

from m6_multimodal_pd.multimodal.media_settings import BICUBIC, PixelSettings


def image_rows(pixels: np.ndarray, size: tuple[int, int], settings: PixelSettings) -> np.ndarray:
    """Return an image, uint8 `[height, width, 3]`, resized to a width and height, as rows of `pack`."""
    resized = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling(BICUBIC)))
    scaled = (np.arange(256) * settings.rescale_factor).astype(np.float32)
    mean, std = (np.array(each, dtype=np.float32)[:, None] for each in (settings.image_mean, settings.image_std))
    return pack(resized[None], (scaled - mean) / std, settings)


def video_rows(pixels: np.ndarray, size: tuple[int, int], settings: PixelSettings) -> np.ndarray:
    """Return frames, uint8 `[frames, height, width, 3]`, resized to a width and height, as rows of `pack`. The last
    frame is repeated until the count divides by `temporal_patch_size`."""
    frames = resize(pixels, *size)
    frames = np.concatenate([frames, frames[-1:].repeat(-len(frames) % settings.temporal_patch_size, axis=0)])
    # Scaling is folded into mean and std, as transformers does for videos: for images it divides first, and the last
    # bit of a value may differ.
    mean, std = (
        np.array(each, dtype=np.float32)[:, None] * (1.0 / settings.rescale_factor)
        for each in (settings.image_mean, settings.image_std)
    )
    return pack(frames, (np.arange(256, dtype=np.float32) - mean) / std, settings)


def resize(frames: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return uint8 frames `[frames, h, w, 3]` as uint8 `[frames, height, width, 3]`.

    torchvision resizes uint8 frames on a CPU by this function of torch, which rounds and clamps after each of its two
    passes. A filter on floats that rounds at the end has other results.
    """
    import torch  # which a process that reads images has no other use for

    if frames.shape[1:3] == (height, width):
        return frames
    colours = torch.from_numpy(frames).permute(0, 3, 1, 2).contiguous()
    resized = torch.nn.functional.interpolate(colours, size=(height, width), mode="bicubic", antialias=True)
    return resized.permute(0, 2, 3, 1).numpy()


def pack(frames: np.ndarray, values: np.ndarray, settings: PixelSettings) -> np.ndarray:
    """Return uint8 frames `[frames, height, width, 3]` as float32 rows of patches; a single frame stands for all of a
    pair. `values`: `[3, 256]`, the normalised values of a pixel in each colour.

    Shape: `[grid_t * grid_h * grid_w, 3 * temporal_patch_size * patch_size * patch_size]`. Rows come frame pair by
    frame pair, inside it by blocks of `merge_size` x `merge_size` patches that will be one token, from top left to
    bottom right, and inside a block in the same way. A row is colour, frame, y, x.
    """
    patch, merge, num_frames = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    known, rows, columns = min(len(frames), num_frames), *(side // settings.factor for side in frames.shape[1:3])
    blocks = frames.reshape(-1, known, rows, merge, patch, columns, merge, patch, 3)
    #                 colour, pair, block row, block column, row, column in it, frame, y, x
    ordered = blocks.transpose(8, 0, 2, 5, 3, 6, 1, 4, 7).reshape(3, -1, known, patch, patch)
    feature = np.empty((ordered.shape[1], 3, num_frames, patch, patch), dtype=np.float32)
    for colour, of_pixels in enumerate(values):
        feature[:, colour] = of_pixels[ordered[colour]]
    return feature.reshape(len(feature), -1)
