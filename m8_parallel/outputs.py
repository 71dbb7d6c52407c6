"""Totals of an engine of several ranks."""

from dataclasses import dataclass

from m6_multimodal_pd.outputs import EngineStats as SingleProcessStats


@dataclass(frozen=True)
class RankStats:
    """Memory of a rank, and totals of its collectives."""

    rank: int
    weight_bytes: int
    """Size of its weights, in bytes."""
    kv_bytes: int
    """Size of its KV memory, in bytes."""
    num_collectives: int
    collective_bytes: int
    """Size of its tensors in all collectives."""
    collective_seconds: float
    """Time in collectives on the host, in seconds, with the waits for later ranks."""


@dataclass(frozen=True)
class EngineStats(SingleProcessStats):
    """m6's totals on rank 0, and those of each rank. (An engine of one process has m6's alone.)"""

    ranks: tuple[RankStats, ...] = ()
    """By rank; empty inside a step, on ranks other than 0, and if the engine is closed or dead."""
