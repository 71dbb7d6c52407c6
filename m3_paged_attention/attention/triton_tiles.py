"""Tiles of the Triton kernels, and the number of splits of a row's KV: they follow from shapes and the device.

The tiles were chosen by compiling for Hopper (sm_90) and reading registers, spills and shared memory:
`python -m tests.kernels.compile_for_sm90` prints the table. There is no `@autotune`, because its measured choice could
differ between runs.

The number of splits, and so the order of additions, follows from the bucket: the number of rows and of new tokens in
one, each rounded up to a power of two. Within a bucket a request gets the same bits beside any other requests; in
another bucket the last bit may differ, as it may in the matrix products of cuBLAS. It never follows from a length.
vLLM: `v1/attention/backends/triton_attn.py`; SGLang: `layers/attention/triton_backend.py`.
"""

import functools
from typing import NamedTuple

import torch

from m1_single_request.errors import ConfigError

MAX_HEAD_DIM = 256
MOST_SPLIT = 16
"""Maximum number of new tokens of a row whose KV is split. In a longer row the programs of a prefill are enough."""
PROGRAMS_PER_MULTIPROCESSOR = 4
"""Number of programs of decode that a multiprocessor runs at once: they wait for memory."""
MOST_SPLITS = 32


class Tile(NamedTuple):
    """Launch parameters of an attention kernel: tile size (queries by keys), warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@functools.cache
def prefill_tile(head_dim: int, dtype: torch.dtype, device_type: str) -> Tile:
    """Return the tile of prefill. On a CPU (interpreter) tiles are small, so that short tests use several."""
    head_pad = padded_head(head_dim)
    if device_type == "cpu":
        return Tile(16, 32, 4, 1)
    if dtype == torch.float32:
        return Tile(32, 16, 8, 1)
    if head_pad <= 64:
        return Tile(64, 64, 4, 3)
    return Tile(128, 64, 8, 2) if head_pad == 128 else Tile(64, 32, 8, 2)


@functools.cache
def split_tile(head_dim: int, group: int, width: int, dtype: torch.dtype, device_type: str) -> Tile:
    """Return the tile of rows whose KV is split. Its rows are the `group` query heads of a KV head, of one or more of
    the `width` new tokens: 16 (one mma) or more, and as many as one program has registers for. On a CPU (interpreter)
    it does not depend on the width, for tests that compare bits."""
    head_pad = padded_head(head_dim)
    smallest = max(16, power_of_two(group))
    if device_type == "cpu":
        return Tile(max(smallest, 64), 16, 4, 1)
    if dtype == torch.float32:
        return Tile(smallest, 16, 8, 1)
    rows = max(smallest, min(64, power_of_two(group * width)))
    return Tile(rows, 64 if head_pad <= 128 else 32, 4, 3 if rows <= 32 else 2)


@functools.cache
def experts_tile(pairs_per_expert: int, dtype: torch.dtype, device_type: str) -> Tile:
    """Return the tile of the products of experts (pairs by features), for a mean number of pairs per expert."""
    if device_type == "cpu":
        return Tile(16, 32, 4, 1)
    rows = max(16, min(64 if dtype == torch.float32 else 128, power_of_two(pairs_per_expert)))
    if dtype == torch.float32:
        return Tile(rows, 32, 8, 1)
    return Tile(rows, 128, 8 if rows == 128 else 4, 3)


def num_splits(num_rows: int, num_kv_heads: int, num_multiprocessors: int) -> int:
    """Return the number of splits of every row: enough that the rows fill the GPU, whatever their lengths are.

    `num_multiprocessors` is 0 on a CPU (interpreter). There it is always the same, for tests that compare bits.
    """
    if not num_multiprocessors:
        return 4
    programs = power_of_two(num_rows) * num_kv_heads
    return min(MOST_SPLITS, power_of_two(-(-PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors // programs)))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 0 for a CPU."""
    return 0 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def padded_head(head_dim: int) -> int:
    """Return the width of a head in a kernel. Raises `ConfigError` if it is too wide for the kernels."""
    if head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"the triton backend has kernels for a head_dim of at most {MAX_HEAD_DIM}, and this model's is {head_dim}: "
            f"use attention_backend='torch'"
        )
    return max(16, power_of_two(head_dim))  # `tl.dot` needs an inner dimension of at least 16


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n: the sides of a tile are powers of two."""
    return 1 << (n - 1).bit_length()
