"""What is done to an engine besides giving it requests: it is profiled, and its weights are exchanged.

An engine core has one of these. Where the work is done elsewhere (from m6 on) it has another one, which asks there.
SGLang: `SchedulerProfilerMixin` and `SchedulerUpdateWeightsMixin`; vLLM: `start_profile` and `reload_weights` of its
workers.
"""

from typing import Protocol

from m1_single_request.errors import EngineUsageError
from m1_single_request.step_profiler import StepProfiler


class OperationsProtocol(Protocol):
    """Of an engine, wherever its models are."""

    def update_weights(self, model: str) -> None:
        """Put other weights in the place of the model's; no request is unfinished. All or nothing."""
        ...

    def start_profile(self, folder: str) -> None:
        """Record the steps from now on."""
        ...

    def stop_profile(self) -> list[str]:
        """The files with what was recorded."""
        ...

    def close(self) -> None:
        """Record nothing more, and write nothing."""
        ...


class WeightLoader(Protocol):
    """Whoever can put other weights in the place of the model's (from m6 on)."""

    def load(self, model: str) -> None:
        """Raises `ModelLoadError`, and changes nothing, for weights that do not fit."""
        ...


class Operations:
    """Of an engine whose models are in this process."""

    def __init__(self, weight_loader: WeightLoader | None = None) -> None:
        """`weight_loader`: None for an engine whose weights stay."""
        self.weight_loader = weight_loader
        self.profiler = StepProfiler()

    def update_weights(self, model: str) -> None:
        """Raises `EngineUsageError` if this engine cannot."""
        if self.weight_loader is None:
            raise EngineUsageError("the weights of this engine cannot be exchanged: that comes with m6")
        self.weight_loader.load(model)

    def start_profile(self, folder: str) -> None:
        """Raises `ConfigError` for a folder that cannot be written, `EngineUsageError` while something is recorded."""
        self.profiler.start(folder)

    def stop_profile(self) -> list[str]:
        """Raises `EngineUsageError` if nothing is being recorded."""
        return self.profiler.stop()

    def close(self) -> None:
        """Record nothing more."""
        self.profiler.drop()
