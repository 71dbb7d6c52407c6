"""torch's profiler around an engine's steps: the time of each operator, for a viewer.

The trace records the engine's decisions; the profile records the work of the device. Without a recording it has no
cost. SGLang: `SchedulerProfilerMixin`; vLLM: `VLLM_TORCH_PROFILER_DIR` and `start_profile` of its workers.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, ClassVar

import torch

from m1_single_request.errors import ConfigError, EngineUsageError, shown_path


class StepProfiler:
    """Records the operators between `start` and `stop`. torch has one profiler for the whole process."""

    _recording: ClassVar["StepProfiler | None"] = None

    def __init__(self) -> None:
        self._profile: Any = None
        self._folder = Path()
        self.settle: Callable[[], None] = lambda: None
        """Waits for the step in flight, in an engine whose steps overlap: a recording has whole steps."""

    def start(self, folder: str) -> None:
        """Start recording. Raises `ConfigError` for a folder that cannot be written, `EngineUsageError` during a
        recording in this process."""
        if StepProfiler._recording is not None:
            raise EngineUsageError("a profile is being recorded in this process already: stop_profile() ends it")
        path = Path(folder).absolute()
        try:
            str(path).encode()  # torch requires it
            path.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=path).close()
        except (OSError, ValueError) as error:  # it cannot be created or written, or the name is invalid
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"profiles cannot be written to {shown_path(folder)}: {why}") from error
        self.settle()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities)
        profile.start()
        self._profile, self._folder, StepProfiler._recording = profile, path, self

    def stop(self) -> list[str]:
        """Write the recording; return the file's name. Raises `EngineUsageError` without a recording, and `ConfigError`
        if it cannot be written; then it is lost."""
        if self._profile is None:
            raise EngineUsageError("no profile is being recorded: start_profile() begins one")
        self.settle()
        profile, self._profile, StepProfiler._recording = self._profile, None, None
        profile.stop()
        path = self._folder / f"steps-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        profile.export_chrome_trace(str(path))
        if not path.is_file():  # torch writes a line to stderr and raises nothing
            raise ConfigError(f"the profile is lost: {path.name} cannot be written to {shown_path(self._folder)}")
        return [str(path)]

    def drop(self) -> None:
        """Stop recording without writing a file."""
        profile, self._profile = self._profile, None
        if profile is not None:
            StepProfiler._recording = None
            with suppress(Exception):
                profile.stop()
