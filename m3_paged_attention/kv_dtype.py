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

from typing import Any

import torch
from torch import Tensor

from m1_single_request.errors import ConfigError

KV_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each format with scales."""
SCALE_BYTES = 4
FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs whose kernels can convert e4m3."""
SMALLEST = torch.finfo(torch.float32).smallest_normal
"""The smallest usual scale: the inverse of a smaller number may not be finite, so its vector is stored as zeros."""


def vector_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of the key or value of one token and head, its scale included."""
    return head_dim * dtype.itemsize + SCALE_BYTES * (dtype in LARGEST)


def use_kv_dtype(loaded: Any, name: str) -> None:
    """Set the format of a loaded model's KV: `CacheConfig.kv_cache_dtype`.

    Raises `ConfigError` if the model's heads, its backend or its device does not support the format.
    """
    model = loaded.model
    dtype = KV_DTYPES.get(name, model.dtype)
    if dtype in LARGEST and model.config.head_dim % SCALE_BYTES:
        raise ConfigError(
            f"kv_cache_dtype={name!r} needs a head_dim that is a multiple of {SCALE_BYTES}, and this model's is "
            f"{model.config.head_dim}: use kv_cache_dtype='auto'"
        )
    if name == "fp8" and model.backend.name == "triton" and model.device.type == "cuda":
        capability = torch.cuda.get_device_capability(model.device)
        if capability < FP8_CAPABILITY:
            raise ConfigError(
                f"kv_cache_dtype='fp8' needs a GPU of compute capability {'.'.join(map(str, FP8_CAPABILITY))} or more, "
                f"and {model.device} has {'.'.join(map(str, capability))}: use kv_cache_dtype='int8'"
            )
    model.kv_dtype = dtype


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
