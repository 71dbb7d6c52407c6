"""Copies of KV pages between device and host, beside the steps and layer by layer.

On CUDA they are queued on a stream of their own, from and to pinned memory. On a CPU, where both memories are the same,
a thread copies, so that a copy is as late as it is on a GPU; with the C++ kernels it is one of `native_copies.py`. m3's
swap copied before a step, which waited. SGLang: `HiCacheController` in `managers/cache_controller.py`.
"""

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import torch

from m1_single_request.errors import EngineDeadError
from m4_radix_cache.mem_cache.allocator import Slots

Runs = list[tuple[int, int, int]]
"""Stretches of pages that lie side by side in both memories: first source page, first target page, number of pages."""


class CopyJob:
    """Pages that are copied, layer by layer."""

    def __init__(self, kind: Literal["write", "load"], layers: Sequence[tuple[Any, Any]], runs: Runs) -> None:
        """`layers`: source and target of each layer, both `[2, pages, bytes of K or V]`."""
        self.kind, self.layers, self.runs = kind, layers, runs
        self.num_pages = sum(count for *_, count in runs)
        self.error: Exception | None = None
        self.seconds = 0.0
        """Duration of the copy, when it has ended."""
        self.nodes: list[Any] = []
        """Nodes of the tree whose pages these are."""
        self.step = 0
        """Number of the step in which the copy began."""
        self.rids: Sequence[str | None] = ()
        """Ids of the requests that caused it, for the trace."""

    def copy_layer(self, layer: int) -> None:
        """Copy the pages of one layer."""
        source, target = self.layers[layer]
        for first, into, count in self.runs:
            target[:, into : into + count] = source[:, first : first + count]

    def copy(self) -> None:
        """Copy all layers now. Raises `EngineDeadError` if that fails, too: the KV is lost."""
        try:
            for layer in range(len(self.layers)):
                self.copy_layer(layer)
        except Exception as error:
            raise EngineDeadError(f"KV cannot be copied from host memory: {error}") from error
        finally:
            self.error = None  # it is raised once

    def is_done(self) -> bool:
        """Return whether nothing is left to wait for."""
        raise NotImplementedError

    def wait(self, layer: int | None = None) -> None:
        """Wait until this layer is copied; None: all layers. A load that failed is copied now. On CUDA the stream of
        the steps waits for a layer, and the host for all of them."""
        raise NotImplementedError


def runs_of(sources: Slots, targets: Slots) -> Runs:
    """Return the stretches of pages that lie side by side in both memories."""
    ends = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
    starts = [0, *ends.tolist()]
    counts = np.diff([*starts, len(sources)]).tolist()
    return [(int(sources[i]), int(targets[i]), n) for i, n in zip(starts, counts, strict=True)]


# --- on a CPU ---------------------------------------------------------------------------------------------------------


class ThreadJob(CopyJob):
    """A copy by a thread."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._done, self._changed = 0, threading.Condition()

    def run(self) -> None:
        """Copy all layers; on the thread."""
        began = time.perf_counter()
        try:
            for layer in range(len(self.layers)):
                self.copy_layer(layer)
                self.seconds = time.perf_counter() - began
                self._set(layer + 1)
        except Exception as error:
            self.error = error
            self._set(len(self.layers))

    def _set(self, done: int) -> None:
        with self._changed:
            self._done = done
            self._changed.notify_all()

    def is_done(self) -> bool:
        return self._done == len(self.layers) and self.error is None

    def wait(self, layer: int | None = None) -> None:
        last = len(self.layers) - 1 if layer is None else layer
        if self._done <= last:
            with self._changed:
                self._changed.wait_for(lambda: self._done > last)
        if self.error is not None and self.kind == "load":
            self.copy()


class ThreadCopier:
    """Copies with numpy, which uses one thread and leaves Python to the others."""

    job = ThreadJob

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[ThreadJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stop = weakref.finalize(self, self._jobs.put, None)

    def start(self, job: ThreadJob) -> None:
        """Let the thread copy."""
        if self._thread is None:
            self._thread = threading.Thread(target=_copy_all, args=(self._jobs,), name="kv-copies", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """Wait for the copies, and end the thread."""
        self._stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _copy_all(jobs: "queue.SimpleQueue[ThreadJob | None]") -> None:
    while (job := jobs.get()) is not None:
        job.run()


# --- on CUDA ----------------------------------------------------------------------------------------------------------


class StreamJob(CopyJob):
    """A copy on a stream."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.began: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.events: list[Any] = []
        """One per layer, recorded behind its copy."""

    def copy_layer(self, layer: int) -> None:
        """Queue the copy of one layer."""
        source, target = self.layers[layer]
        for first, into, count in self.runs:
            for plane in range(2):  # each is contiguous: torch copies anything else through memory that is not pinned
                target[plane, into : into + count].copy_(source[plane, first : first + count], non_blocking=True)

    def copy(self) -> None:
        """Also replace the events, of which a copy that failed has recorded only some."""
        super().copy()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self.events = [event] * len(self.layers)

    def wait(self, layer: int | None = None) -> None:
        if self.error is not None:
            if self.kind == "load":
                self.copy()
        elif layer is None:
            with suppress(torch.AcceleratorError):  # a lost device copies nothing any more
                self.events[-1].synchronize()
                self.seconds = self.began.elapsed_time(self.events[-1]) / 1e3
        else:
            torch.cuda.current_stream().wait_event(self.events[layer])

    def is_done(self) -> bool:
        return self.error is None and bool(self.events[-1].query())


class StreamCopier:
    """Queues copies on a stream of their own."""

    job = StreamJob

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, job: StreamJob) -> None:
        """Queue the copies, behind all that is queued on the stream of the steps."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        try:
            with torch.cuda.stream(self.stream):
                job.began.record()
                for layer in range(len(job.layers)):
                    job.copy_layer(layer)
                    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                    event.record()
                    job.events.append(event)
        except Exception as error:
            job.error = error

    def close(self) -> None:
        """Wait for the copies."""
        with suppress(torch.AcceleratorError):
            self.stream.synchronize()
