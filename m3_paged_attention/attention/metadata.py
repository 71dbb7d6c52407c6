"""Attention metadata: the rows, positions and KV slots of the tokens in a flat batch.

m2's batch was a padded rectangle with a mask. Here the tokens of all requests are one flat row of `total_tokens`, and
this object stores where each request begins:

    tokens           | a a a a a | b b | c | d |      two prefills, two decodes
    query_start_loc    0           5     7   8   9
    seq_lens           5           2     31  9        tokens with KV after the step, the new ones included

Rows with several new tokens come first, then rows with exactly one, because attention computes the two kinds
differently. (A row with one token among the first is also correct, only slower.) vLLM: `CommonAttentionMetadata`
(`v1/attention/backends/utils.py`); SGLang has the same numbers in `ForwardBatch`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from m1_single_request.sampling_metadata import sent

T = TypeVar("T")
NUMBER = int, type(None)
ALIGNMENT = 16
"""Bytes. Triton compiles a kernel again for a pointer that is not a multiple of 16."""


@dataclass(frozen=True)
class AttentionMetadata:
    """Layout of one step's batch: tensors, on the device of its batch (`to_device`), and the lengths on the host.

    Every step makes a new object, which is never modified: a backend may plan once per object and reuse the plan in
    every layer.
    """

    query_start_loc: Tensor  # int32 [num_seqs + 1]
    seq_lens: Tensor  # int32 [num_seqs]
    block_tables: Tensor  # int32 [num_seqs, max_blocks]; unused entries point at block 0
    slot_mapping: Tensor  # int64 [total_tokens]: block id * block_size + offset; padding points into block 0
    num_prefills: int
    """Rows with more than one new token; they come first."""
    num_prefill_tokens: int
    num_decodes: int
    """Rows with exactly one new token."""
    max_query_len: int
    query_lens_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: np.ndarray,
        slot_mapping: np.ndarray,
    ) -> "AttentionMetadata":
        """Build the metadata, on the host, from each row's number of new tokens and of tokens that already have KV.

        Rows with several new tokens come first. `block_tables` is int32, `slot_mapping` int64; neither is copied.
        """
        query_lens = tuple(query_lens)
        seq_lens = tuple([before + new for before, new in zip(context_lens, query_lens, strict=True)])
        num_decodes = query_lens.count(1)
        num_prefills = len(query_lens) - num_decodes
        return cls(
            query_start_loc=_starts(query_lens),
            seq_lens=torch.from_numpy(np.array(seq_lens, dtype=np.int32)),
            block_tables=torch.from_numpy(block_tables),
            slot_mapping=torch.from_numpy(slot_mapping),
            num_prefills=num_prefills,
            num_prefill_tokens=sum(query_lens) - num_decodes,
            num_decodes=num_decodes,
            max_query_len=max(query_lens, default=0),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )


@lru_cache
def _starts(query_lens: tuple[int, ...]) -> Tensor:
    """Return `query_start_loc`, cached because most steps are decodes only; the tensor is never modified."""
    return torch.from_numpy(np.cumsum([0, *query_lens], dtype=np.int32))


def to_device(batch: T, device: torch.device) -> T:
    """Return a batch whose tensors are all on the device, by one copy; on a CPU it is the same batch.

    `batch` is a tensor, or a tuple or dataclass with such parts among others. A copy has a fixed cost, and a step has a
    dozen small arrays; so all that a step needs is built on the host first, then moved together. Tensors that are on
    the device already stay. vLLM keeps a pinned array for each input instead (`CpuGpuBuffer`).
    """
    if device.type == "cpu":
        return batch
    return _replaced(batch, iter(_sent_together(list(_on_host(batch)), device)))


def _sent_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of the host on the device, as views of one buffer there.

    The host does not wait for the copy. Pinned memory is allocated again only when the copies from it have ended
    (torch's `CachingHostAllocator`), and the memory on the device in the order of its stream. So steps that are queued
    one behind the other need no ring of buffers: each has its own.
    """
    tensors = [tensor.contiguous() for tensor in tensors]
    *starts, size = accumulate((-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors), initial=0)
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def views(buffer: Tensor) -> list[Tensor]:
        typed = {dtype: buffer.view(dtype) for dtype in {tensor.dtype for tensor in tensors}}
        pairs = zip(starts, tensors, strict=True)
        return [typed[each.dtype].as_strided(each.shape, each.stride(), at // each.itemsize) for at, each in pairs]

    for target, tensor in zip(views(packed), tensors, strict=True):
        target.copy_(tensor)
    return views(sent(packed, device))


def _on_host(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch that are on the host, in a fixed order."""
    if isinstance(value, Tensor):
        if value.is_cpu:
            yield value
    elif (parts := _parts(value)) is not None:
        for part in parts.values():
            yield from _on_host(part)


def _replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a batch with `tensors` in place of those that `_on_host` yields."""
    if isinstance(value, Tensor):
        return next(tensors) if value.is_cpu else value
    if (parts := _parts(value)) is None:
        return value
    replaced = {name: _replaced(part, tensors) for name, part in parts.items()}
    return tuple(replaced.values()) if isinstance(value, tuple) else type(value)(**replaced)


def _parts(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a dataclass or tuple; None for other values, and for tuples of numbers, which may be long."""
    if isinstance(value, NUMBER):
        return None
    if isinstance(value, tuple):
        return dict(enumerate(value)) if value and not isinstance(value[0], int) else None
    return vars(value) if is_dataclass(value) else None
