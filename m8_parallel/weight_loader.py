"""m6's weight loader on a rank: each keeps its part of the tensors, and all have the new weights or none has."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from m3_paged_attention.models.architecture import DecoderConfig
from m3_paged_attention.models.decoder import Decoder
from m3_paged_attention.models.qwen3_moe import Layout
from m3_paged_attention.models.weights import Place, layout_in
from m6_multimodal_pd.tensor_files import TensorFiles
from m6_multimodal_pd.weight_loader import Checkpoint, WeightLoader, write_decoder
from m8_parallel.models.shards import Shard
from m8_parallel.ranks import Ranks


class ParallelWeightLoader(WeightLoader):
    """The weight loader of a rank. `check`, `load` and `_write` end when all ranks have ended them, with the same error
    if any. The files have the whole decoder (`stored`), of which `_write_decoder` keeps a part."""

    def __init__(self, *, ranks: Ranks, **parts: Any) -> None:
        """`parts`: as m6's."""
        super().__init__(**parts)
        self.ranks = ranks

    @property
    def stored(self) -> DecoderConfig:
        """The whole decoder, as files have it."""
        config: DecoderConfig = self.runner.model.part.shard.config
        return config

    def check(self, model: str) -> Checkpoint:
        """As in m6."""
        check = super().check
        return self.ranks.agreed(lambda: check(model))

    def load(self, checkpoint: Checkpoint, before_write: Callable[[str], object]) -> None:
        """As in m6."""
        super().load(checkpoint, lambda model: self.ranks.agreed(lambda: before_write(model)))

    def _write(self, checkpoint: Checkpoint) -> None:
        write = super()._write
        self.ranks.agreed(lambda: write(checkpoint))

    def _write_decoder(self, decoder: Decoder, checkpoint: Checkpoint) -> None:
        _, prefix, files = checkpoint
        shard: Shard = decoder.part.shard  # type: ignore[attr-defined]
        layout = layout_in(files.headers, self.stored, prefix)
        shapes = shard.allocate(decoder.dtype, torch.device("meta"), self.config.quantization)
        write_decoder(decoder, ShardFiles(files, shard, prefix, layout), prefix, layout, shapes)


class ShardFiles(NamedTuple):
    """Tensor files of which each copy is a rank's part."""

    files: TensorFiles
    shard: Shard
    prefix: str
    layout: Layout

    def copy(self, name: str, target: Place) -> None:
        """Copy this rank's part of a tensor to `target`."""
        name = self.shard.name_in_files(name)
        self.files.copy(name, PartOf(self, name, target))  # type: ignore[arg-type]


class PartOf(NamedTuple):
    """The place of a rank's part of a tensor, which is copied to it whole."""

    files: ShardFiles
    name: str
    target: Place

    def copy_(self, stored: Tensor) -> None:
        """Cut the tensor, and keep the part."""
        _, shard, prefix, layout = self.files
        shard.keep(self.name, self.target, shard.cut(stored, self.name, prefix, layout))
