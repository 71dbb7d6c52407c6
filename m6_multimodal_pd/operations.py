"""Operations on an engine besides requests: its steps are profiled, and its weights are exchanged.

A group of engines has another class with the same methods, which calls all engines (`disaggregation/router_core.py`).
SGLang: `SchedulerProfilerMixin` and `SchedulerUpdateWeightsMixin`; vLLM: `start_profile` and `reload_weights` of its
workers.
"""

from m6_multimodal_pd.step_profiler import StepProfiler
from m6_multimodal_pd.weight_loader import WeightLoader


class Operations:
    """Operations on an engine whose model is in this process."""

    def __init__(self, weight_loader: WeightLoader) -> None:
        self.weight_loader = weight_loader
        self.profiler = StepProfiler()

    def update_weights(self, model: str) -> None:
        """Load other weights into the model. Raises `ModelLoadError`, and changes nothing, if they do not fit."""
        self.weight_loader.load(model)

    def start_profile(self, folder: str) -> None:
        """Record the steps from now on. Raises `ConfigError` for a folder that cannot be written, `EngineUsageError`
        while a profile is being recorded."""
        self.profiler.start(folder)

    def stop_profile(self) -> list[str]:
        """Stop recording; return the names of the files. Raises `EngineUsageError` if nothing is being recorded."""
        return self.profiler.stop()

    def close(self) -> None:
        """Stop recording, and write nothing."""
        self.profiler.drop()
