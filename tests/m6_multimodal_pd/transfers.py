"""What the transfer tests share: KV memories full of noise, and two ends that have met."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_storage import KVStorage
from m6_multimodal_pd.disaggregation.page_store import PageStore
from m6_multimodal_pd.disaggregation.runtime.in_process import InProcessSegments
from m6_multimodal_pd.disaggregation.runtime.messages import Ticket
from m6_multimodal_pd.disaggregation.runtime.shared_memory import SharedMemorySegments
from m6_multimodal_pd.disaggregation.segments import Segments
from m6_multimodal_pd.disaggregation.staging import StagedSource, StagedTarget
from tests.m6_multimodal_pd.processes import eventually

FP32 = {"block_size": 4, "num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
BF16 = FP32 | {"dtype": torch.bfloat16}
INT8 = FP32 | {"dtype": torch.int8}
DRAFT = FP32 | {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4, "dtype": torch.bfloat16}
ODD = FP32 | {"block_size": 1, "num_kv_heads": 1, "head_dim": 3, "dtype": torch.bfloat16}
"""Six bytes in a tensor's page: no number of 8 bytes."""

MODELS = {
    "fp32": [FP32],
    "bf16": [BF16],
    "int8": [INT8],
    "with draft": [FP32, DRAFT],
    "odd": [ODD],
    "odd draft": [BF16, ODD],
}


def segments_of(transport: str, owner: str = "tests") -> Segments:
    return InProcessSegments() if transport == "in_process" else SharedMemorySegments(owner)


class Memory:
    """The KV memory of an engine, each byte of it random, NaN and all."""

    def __init__(
        self, models: Sequence[dict[str, Any]] = (FP32, DRAFT), *, num_pages: int, seed: int, device: str = "cpu"
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.storages = [
            KVStorage(KVCacheConfig(spec=KVCacheSpec(**model), num_blocks=num_pages), device=torch.device(device))
            for model in models
        ]
        for storage in self.storages:
            noise = torch.randint(256, (storage.blocks.nbytes,), dtype=torch.uint8, generator=generator)
            storage.blocks.copy_(noise.view(storage.blocks.dtype).view_as(storage.blocks))
        self.store = PageStore(self.storages)

    def page(self, page: int) -> bytes:
        """One page of all storages, in words of its own: tensor after tensor."""
        return b"".join(bits(tensor[page]) for storage in self.storages for tensor in storage.blocks)

    def pages(self) -> list[bytes]:
        """All of them, page 0 included."""
        return [self.page(page) for page in range(self.store.num_pages + 1)]


def bits(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def sent(source: StagedSource, target: str = "d", pages: Sequence[int] = (1,)) -> Ticket:
    """The ticket of these pages, for which there is room, when they are in their frames."""
    ticket = source.send(target, pages)
    assert ticket is not None
    while (ready := source.ready(target, ticket)) is None:  # on a GPU
        time.sleep(0.001)
    return ready


class Pair:
    """A prefill engine `p` and a decode engine `d`, which have met."""

    def __init__(
        self,
        transport: str,
        models: Sequence[dict[str, Any]] = (FP32, DRAFT),
        *,
        num_frames: int = 4,
        checksums: bool = False,
        device: str = "cpu",
    ) -> None:
        self.ours, self.theirs = (Memory(models, num_pages=n, seed=n, device=device) for n in (12, 9))
        self.segments = segments_of(transport)
        self.source = StagedSource(self.ours.store, self.segments, num_frames=num_frames, checksums=checksums)
        self.target = StagedTarget(self.theirs.store, self.segments)
        ticket = sent(self.source)
        self.target.map("p", ticket)
        self.source.release("d", ticket.number)

    def move(self, pages: Sequence[int], to: Sequence[int]) -> None:
        """The whole way of a few pages."""
        ticket = sent(self.source, "d", pages)
        arrival = self.target.receive("p", ticket, to)
        assert eventually(arrival.copy.is_done)
        arrival.write()
        self.source.release("d", ticket.number)
