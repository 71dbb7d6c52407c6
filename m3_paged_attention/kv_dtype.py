"""Number formats of the KV memory: the model's own, bfloat16, or one byte per number with scales.

Decode attention reads all KV of its requests in every step, and the KV memory limits how many requests run. One byte
per number is half the memory of bfloat16; the speed depends on how fast the device converts it. With `int8` and `fp8`
(e4m3) the vector of each token and head is stored as `head_dim` bytes and one float32 scale:

    scale  = largest |x| / 127, or / 448 for e4m3
    stored = x / scale, rounded                         read = stored * scale

The scale follows from the vector alone. So no calibration is needed, and a token has the same bits in every batch. m2
stored KV in the model's precision. vLLM: `kv_cache_dtype` (`int8_per_token_head`, `fp8_per_token_head`); SGLang:
`--kv-cache-dtype`, with scales per layer.
"""

import torch
from torch import Tensor

from m1_single_request.errors import ConfigError
from m1_single_request.model_loader import ModelDescription

KV_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The formats of `KVCacheDtype` (config.py), except for `auto`."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each format with scales."""
SCALE_BYTES = 4
SMALLEST = torch.finfo(torch.float32).smallest_normal
"""The smallest usual scale: the inverse of a smaller number may not be finite, so its vector is stored as zeros."""


def vector_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of the key or value of one token and head, its scale included."""
    return head_dim * dtype.itemsize + SCALE_BYTES * (dtype in LARGEST)


def kv_dtype_of(name: str, model: ModelDescription, head_dim: int) -> torch.dtype:
    """Return the format of `CacheConfig.kv_cache_dtype` for a model. Raises `ConfigError` if its heads do not fit."""
    dtype = model.dtype if name == "auto" else KV_DTYPES[name]
    if dtype in LARGEST and head_dim % SCALE_BYTES:
        raise ConfigError(
            f"kv_cache_dtype={name!r} needs a head_dim that is a multiple of {SCALE_BYTES}, and that of {model.name} "
            f"is {head_dim}: use kv_cache_dtype='auto'"
        )
    return dtype


def quantize(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return vectors `[..., head_dim]` in a format with scales, and the float32 scales `[...]`.

    A vector with NaN or infinity has a scale that is not finite, so that no number of it is read as finite.
    """
    vectors = vectors.float()
    scales = vectors.abs().amax(-1) / LARGEST[dtype]
    inverse = torch.where(scales >= SMALLEST, 1 / scales, 0.0)
    scaled = (vectors * inverse[..., None]).nan_to_num(0.0)
    return (scaled if dtype.is_floating_point else scaled.round()).to(dtype), scales


def dequantize(stored: Tensor, scales: Tensor | None) -> Tensor:
    """Return the float32 numbers of stored vectors `[..., head_dim]`. `scales`: `[...]`; None: of a format without."""
    return stored.float() if scales is None else stored.float() * scales[..., None]
