"""Recorder of experts: collects what the routers choose in a forward, for one event (`TraceConfig(experts=True)`)."""

from typing import Any

from torch import Tensor

from m1_single_request.tracer import Tracer
from m3_paged_attention.expert_events import ExpertsUsed


class ExpertRecorder:
    """Emits `ExpertsUsed` after the last sparse layer of each forward."""

    def __init__(self, model: Any, tracer: Tracer) -> None:
        """Observe the sparse layers of `model`, a `Decoder` with experts. Tensors are kept until the last layer."""
        config = model.config.experts
        self._tracer, self._num_experts, self._expert_bytes = tracer, config.num_experts, model.expert_bytes
        self._layers, self._chosen = sorted(config.layers), list[Tensor]()
        for index in self._layers:
            model.layers[index].mlp.observe = self._observe

    def _observe(self, experts: Tensor) -> None:
        self._chosen.append(experts)
        if len(self._chosen) == len(self._layers):
            chosen, self._chosen = self._chosen, []
            self._tracer.emit(ExpertsUsed.of, self._layers, chosen, self._num_experts, self._expert_bytes)
