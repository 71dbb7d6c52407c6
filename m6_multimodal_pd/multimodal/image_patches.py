"""Step 3 of an image's way, for images: resized, normalised and packed into rows of patches, in numpy.

The rows are equal to those of transformers' `Qwen2VLImageProcessorPil`, bit for bit. That class imports torch, which
takes a process that reads images seconds. A pixel has 256 values, so a table holds the normalised ones. vLLM and
SGLang: transformers' `Qwen2VLImageProcessorFast`.
"""

import numpy as np
from PIL import Image

from m6_multimodal_pd.multimodal.media_settings import BICUBIC, PixelSettings


def image_rows(pixels: np.ndarray, size: tuple[int, int], settings: PixelSettings) -> np.ndarray:
    """Return an image, uint8 `[height, width, 3]`, resized to a width and height, as float32 rows of patches.

    Order and shape of the rows are those of a video of `temporal_patch_size` equal frames: see `video_patches.pack`.
    """
    resized = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling(BICUBIC)))
    patch, merge, frames = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    rows, columns = size[1] // settings.factor, size[0] // settings.factor
    blocks = resized.reshape(rows, merge, patch, columns, merge, patch, 3)
    #                  block row, row in it, y, block column, column, x, channel
    ordered = blocks.transpose(6, 0, 3, 1, 4, 2, 5).reshape(3, -1, 1, patch, patch)
    feature = np.empty((ordered.shape[1], 3, frames, patch, patch), dtype=np.float32)
    for channel, table in enumerate(_normalised(settings)):
        feature[:, channel] = table[ordered[channel]]
    return feature.reshape(len(feature), -1)


def _normalised(settings: PixelSettings) -> np.ndarray:
    """Return `(value * rescale_factor - mean) / std` of the values of a pixel, float32 `[3, 256]`."""
    scaled = (np.arange(256) * settings.rescale_factor).astype(np.float32)
    mean, std = (np.array(each, dtype=np.float32)[:, None] for each in (settings.image_mean, settings.image_std))
    return (scaled - mean) / std
