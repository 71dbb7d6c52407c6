"""Default limits of a step on a device: how many requests and how many new tokens, where the user sets neither.

m2 runs at most 16 requests on any device. A GPU reads the weights once for all rows of a step, so it computes hundreds
of rows in little more than the time of one. On CUDA the defaults follow from the memory of the device and from the KV
of the model:

    memory of the device    new tokens    requests, at most
    below 35 GiB                 2,048                  256
    below 60 GiB                 4,096                  256
    below 70 GiB                 8,192                  256
    below 160 GiB                8,192                  512
    160 GiB and more            16,384                  512

The number of requests is also limited by the KV: at most as many as would fill the memory with `TYPICAL_LEN` tokens
each (or `max_model_len`, if that is shorter), in steps of eight, in which m6 captures CUDA graphs; and at least 16.
Free memory has no influence, so the result is the same at every start. An engine that shares its device with others has
the same limits: they are upper limits, and the KV memory decides how many requests run. New in this milestone. SGLang:
`chunked_prefill_size` of `ServerArgs` has these numbers of tokens, `max_running_requests` follows from the pool; vLLM:
`EngineArgs.get_batch_defaults`, 256 requests, and 1,024 from 70 GiB on.
"""

from typing import NamedTuple

import torch

from m1_single_request.model_loader import LoadedModel

GIB = 2**30
TOKENS_BELOW = {35: 2048, 60: 4096, 160: 8192}
"""Default number of new tokens in a step, by the size in GiB that the device's memory is below."""
MOST_TOKENS = 16_384
"""The same for larger devices."""
LARGE_GIB, MOST_SEQS, MOST_SEQS_LARGE = 70, 256, 512
TYPICAL_LEN = 1024
"""Tokens of a request for which the memory must have room, if all of it were KV."""


class DeviceLimits(NamedTuple):
    """The default limits of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    total_bytes: int | None
    """The device's memory; None for a CPU."""


CPU_LIMITS = DeviceLimits(max_num_seqs=16, max_num_batched_tokens=2048, total_bytes=None)


def device_limits(loaded: LoadedModel, *, bytes_per_token: int) -> DeviceLimits:
    """Return the default limits on the device of a model. `bytes_per_token`: of the KV."""
    total_bytes = device_memory(loaded.device)
    if total_bytes is None:
        return CPU_LIMITS
    return limits_of(total_bytes, bytes_per_token=bytes_per_token, max_model_len=loaded.max_model_len)


def limits_of(total_bytes: int, *, bytes_per_token: int, max_model_len: int) -> DeviceLimits:
    """Return the default limits of a GPU with `total_bytes` of memory. `bytes_per_token`: of the KV."""
    num_tokens = next((tokens for gib, tokens in TOKENS_BELOW.items() if total_bytes < gib * GIB), MOST_TOKENS)
    fitting = total_bytes // (bytes_per_token * min(max_model_len, TYPICAL_LEN)) // 8 * 8
    most = MOST_SEQS if total_bytes < LARGE_GIB * GIB else MOST_SEQS_LARGE
    return DeviceLimits(max(min(fitting, most), CPU_LIMITS.max_num_seqs), num_tokens, total_bytes)


def device_memory(device: torch.device) -> int | None:
    """Return the memory of a CUDA device in bytes; None for a CPU."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None
