"""m6's CUDA graphs on a rank: the all-reduces of a captured step are inside its graph.

With NCCL a collective is a kernel, so a graph starts it with all others, and no host takes part. All ranks replay or
none does: padded tokens are in the sums, too. Such a graph belongs to the group of ranks in which it was captured, and
NCCL does not end that group before the graph is destroyed, so ranks that leave their group destroy their graphs first
(`Ranks.graphs`). In their new group they capture again. vLLM captures the same, and has its own all-reduce for it.
"""

from typing import Any

import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.models.decoder import Decoder
from m6_multimodal_pd.graph_runner import Bucket, GraphCapture, GraphLimits, GraphRunner
from m8_parallel.collective_record import Collective
from m8_parallel.ranks import Ranks


class GraphRunnerOfRank(GraphRunner):
    """The graphs of a rank. `takes` refuses those of a group that is gone, `_run` notes the collectives inside a graph,
    and `__call__` counts them."""

    def __init__(self, ranks: Ranks, *args: Any, **kwargs: Any) -> None:
        """As m6's. Every rank calls this."""
        self.ranks, self.group = ranks, ranks.num_groups
        self.collectives: dict[Bucket, list[Collective]] = {}
        self._graphs = {}
        ranks.graphs.add(self)
        super().__init__(*args, **kwargs)

    @property
    def is_current(self) -> bool:
        """Whether the ranks still have the group of the capture."""
        return self.group == self.ranks.num_groups

    def takes(self, metadata: AttentionMetadata) -> bool:
        """Return whether there is a graph for such a step."""
        return self.is_current and super().takes(metadata)

    def __call__(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return the hidden states, as in m6."""
        hidden, bucket = super().__call__(input_ids, positions, metadata), self.bucket(metadata)
        assert bucket is not None
        self.ranks.record.replayed(self.collectives[bucket])
        return hidden

    def _run(self, model: Decoder, kv: KVStorage, bucket: Bucket) -> None:
        before = len(self.ranks.record.calls)
        super()._run(model, kv, bucket)
        self.collectives[bucket] = self.ranks.record.calls[before:]
        if model.device.type == "cuda" and not self.ranks.is_capturing:
            self.ranks.meet_in_step()  # one that has failed, or compiles kernels for long, is waited for on the host
            self.ranks.wait_for()


class GraphCaptureOfRank(GraphCapture):
    """Captures on all ranks. What one of them cannot capture runs eagerly on all (`_captured`), and is not tried again
    (`capture`). `capture` and `measure` raise the error of a lost rank."""

    def __init__(self, ranks: Ranks, capture: GraphCapture) -> None:
        """`capture`: of an engine without ranks."""
        vars(self).update(vars(capture))
        self.ranks = ranks
        self.make_runner = lambda *args, **kwargs: GraphRunnerOfRank(ranks, *args, **kwargs)
        self._refused: set[str] = set()

    def capture(self, name: str, model: Decoder, kv: KVStorage, limits: GraphLimits) -> None:
        """Let the steps of `model` over `kv` be replayed, unless they are, in place of graphs of an earlier group.

        Every rank calls this. Raises `RankLostError`.
        """
        if isinstance(kv.step, GraphRunnerOfRank):
            if kv.step.is_current:
                return
            kv.step = None
        if name not in self._refused:
            super().capture(name, model, kv, limits)
            self.ranks.check()
            if not isinstance(kv.step, GraphRunnerOfRank):
                self._refused.add(name)

    def measure(self, model: Decoder, limits: GraphLimits) -> int:
        """Return the bytes of the graphs, as in m6. Every rank calls this. Raises `RankLostError`."""
        num_bytes = super().measure(model, limits)
        self.ranks.check()
        return num_bytes

    def _captured(self, model: Decoder, kv: KVStorage, limits: GraphLimits) -> GraphRunner:
        captured = super()._captured

        def capture() -> GraphRunner:
            try:
                runner = captured(model, kv, limits)
            except torch.AcceleratorError as error:  # something in the step cannot be captured: the device is not lost
                raise RuntimeError(str(error)) from error
            self.ranks.meet_in_step()
            return runner

        with self.ranks.record.uncounted():
            return self.ranks.together(capture)
