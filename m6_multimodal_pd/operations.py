"""Operations on an engine besides requests: profile its steps, and overwrite its weights.

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

    def start_profile(self, folder: str) -> None:
        """Start recording steps. Raises `ConfigError` for a folder that cannot be written, `EngineUsageError`
        while a profile is being recorded."""
        self.profiler.start(folder)

    def stop_profile(self) -> list[str]:
        """Stop recording; return the names of the files. Raises `EngineUsageError` if no profile is being recorded."""
        return self.profiler.stop()

    def close(self) -> None:
        """Stop recording without writing a file."""
        self.profiler.drop()
