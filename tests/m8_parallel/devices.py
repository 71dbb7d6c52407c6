"""GPUs of ranks, without one: a device that is late, and graphs that contain collectives."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _abort_process_group
from torch.utils._python_dispatch import _disable_current_modes

from m6_multimodal_pd.overlap.engine_core import OverlapEngineCore
from m8_parallel import ranks
from m8_parallel.overlap import OverlapParallelEngineCore
from m8_parallel.ranks import Interrupted, Ranks
from tests.m6_multimodal_pd.late_launcher import LateLauncher
from tests.m6_multimodal_pd.recorded_graphs import Capture, RecordedGraph, record, use_static_kernels, want


class LateRank(LateLauncher):
    """A late device of a rank, beside the launcher of ranks. What its runner is told to fail at is `queued`."""

    def _choose(self, *args: Any) -> Any:
        chosen = super()._choose(*args)
        if hasattr(self.runner, "fail"):
            self.runner.fail("queued")
        return chosen


def record_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an all-reduce one call of a graph, as NCCL's is; it has the group of its capture."""
    all_reduce = dist.all_reduce

    def reduce_and_record(tensor: Tensor, *operation: Any) -> None:
        group = dist.group.WORLD
        if operation:  # of hosts
            all_reduce(tensor, *operation)
            return

        def run() -> None:
            assert dist.group.WORLD is group, "the group of this graph is gone"
            try:
                with _disable_current_modes():
                    all_reduce(tensor)
            except RuntimeError:  # a kernel tells its host nothing, which finds out at the next collective of hosts
                raise Interrupted from None

        run()
        if Capture.active is not None:
            Capture.active.graph.calls.append(run)

    monkeypatch.setattr(dist, "all_reduce", reduce_and_record)
    monkeypatch.setattr(Ranks, "is_capturing", property(lambda _: Capture.active is not None))


def queue_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host of rank 0 only queue a gather of logits, as with NCCL: it may read them when its device is there."""
    gather, queued = Ranks.gather, list[Any]()

    def queue(self: Ranks, tensor: Tensor) -> list[Tensor]:
        if tensor.dim() < 2:  # of hosts
            return gather(self, tensor)
        parts = [torch.full_like(tensor, torch.nan) for _ in range(self.size)] if self.is_first else []
        arrived = [torch.empty_like(tensor) for _ in parts]
        queued.append((dist.gather(tensor, arrived or None, async_op=True), parts, arrived))
        return parts

    def wait_for(self: Ranks, event: Any = None) -> None:
        for work, parts, arrived in queued:
            work.wait()
            for part, found in zip(parts, arrived, strict=True):
                part.copy_(found)
        queued.clear()

    def leave_group() -> None:
        queued.clear()
        _abort_process_group()

    monkeypatch.setattr(ranks, "_abort_process_group", leave_group)
    monkeypatch.setattr(Ranks, "gather", queue)
    monkeypatch.setattr(Ranks, "wait_for", wait_for)
    monkeypatch.setattr(Ranks, "is_queued", property(lambda _: True))
    monkeypatch.setattr(Ranks, "is_capturing", False)


def leave(graphs: list[RecordedGraph]) -> None:
    """Leave the group; NCCL would wait for ever if a graph had it. Those of a capture that has failed are garbage."""
    assert all(graph.is_reset for graph in graphs if graph.num_replays)
    _abort_process_group()


@contextmanager
def devices(
    *, graphs: bool = False, late: bool = False, queued: bool = False, seed: int | None = None, at_once: float = 0.5
) -> Iterator[list[RecordedGraph]]:
    """In the block engines of ranks have such devices; yields the graphs that they make. `queued`: logits are gathered
    when the host waits for them. `at_once`: the share of steps that are computed when they are launched."""
    with pytest.MonkeyPatch.context() as patch:
        found: list[RecordedGraph] = []
        if graphs:
            found = record(patch)
            want(patch)
            use_static_kernels(patch, "m8_parallel.model_loader")
            record_collectives(patch)
            patch.setattr(ranks, "_abort_process_group", lambda: leave(found))
        if queued:
            queue_gathers(patch)
        if late:
            rng = Random(seed or 0)  # the same on all ranks: it decides the order of their collectives
            of_rank = type("LateRank", (LateRank, OverlapParallelEngineCore.launcher_class), {})
            patch.setattr(OverlapParallelEngineCore, "launcher_class", of_rank)
            patch.setattr(OverlapEngineCore, "launcher_class", LateLauncher)
            patch.setattr(LateLauncher, "rng", rng)
            patch.setattr(LateLauncher, "at_once", at_once)
        yield found
