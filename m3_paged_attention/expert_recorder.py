"""Recorder of experts: collects what the routers choose in a step, for one event (`TraceConfig(experts=True)`)."""

from types import TracebackType
from typing import Any

from torch import Tensor

from m1_single_request.tracer import Tracer
from m3_paged_attention.expert_events import ExpertsUsed


class ExpertRecorder:
    """Context of a step, which emits `ExpertsUsed` at its end. A step that fails has no such event."""

    def __init__(self, model: Any, tracer: Tracer) -> None:
        """`model`: a `Decoder` with experts. Several engines may share it, and take turns."""
        config = model.config.experts
        self._tracer, self._expert_bytes, self._layers = tracer, model.expert_bytes, sorted(config.layers)
        self._mlps = [model.layers[index].mlp for index in self._layers]
        self._num_experts = self._mlps[0].num_experts
        self._chosen = list[Tensor]()

    def __enter__(self) -> None:
        self._chosen = []
        for mlp in self._mlps:
            mlp.observe = self._chosen.append

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        for mlp in self._mlps:
            mlp.observe = None
        if kind is None and self._chosen:
            self._tracer.emit(ExpertsUsed.of, self._layers, self._chosen, self._num_experts, self._expert_bytes)
        self._chosen = []
