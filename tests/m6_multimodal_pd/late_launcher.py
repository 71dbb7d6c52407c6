"""A device that is late, without a GPU: overlapped steps of any backend."""

from random import Random
from typing import Any

import torch

from m6_multimodal_pd.overlap.launcher import ForwardOutput, Launcher


class LateLauncher(Launcher):
    """A device that computes what is queued when somebody asks for its results, or at once, as its seed says.

    It chooses the tokens of any step, as a GPU does. A part of all steps runs on the thread of the native backend.
    """

    rng = Random(0)
    on_thread, at_once = 0.3, 0.5

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pending: list[ForwardOutput] = []
        if self.runner.host_pool is not None:
            self.runner.host_pool.before_load = lambda: self.compute_until(None)  # as a stream waits for another

    def obstacle(self) -> str | None:
        return None

    def newest_tokens(self, rows: Any) -> Any:
        self.compute_until(None)
        return super().newest_tokens(rows)

    def _start(self, launched: ForwardOutput) -> None:
        if self.thread is not None and self.rng.random() < self.on_thread:
            self.compute_until(None)
            super()._start(launched)
        else:
            self._prepare(launched)
            self._compute(launched)

    def _compute(self, launched: ForwardOutput) -> None:
        self.pending.append(launched)
        if self.rng.random() < self.at_once:
            self.compute_until(launched)

    def _read(self, launched: ForwardOutput) -> None:
        self.compute_until(launched)
        super()._read(launched)

    @torch.inference_mode()
    def compute_until(self, launched: ForwardOutput | None) -> None:
        """Compute the queued steps in their order, up to this one; None: all."""
        while self.pending and (launched is None or launched in self.pending):
            if self.thread is not None:
                self.thread.wait()
            step = self.pending.pop(0)
            super()._compute(step)
            step.is_async = True
