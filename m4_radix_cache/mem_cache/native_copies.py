"""Copies of KV pages on a CPU, by a thread of C++.

The thread of `host_copies.py` waits for the lock of Python before each of its steps, and gets it late while the host
schedules: a copy then ends when somebody waits for it, and not before. New in this milestone. SGLang copies with a CUDA
kernel, `transfer_kv_per_layer` of `sgl_kernel`.
"""

import ctypes
import weakref
from collections import deque
from typing import Any, ClassVar

import numpy as np

from m3_paged_attention.attention import native_library
from m3_paged_attention.attention.native_library import N, P
from m4_radix_cache.mem_cache.host_copies import CopyJob
from m4_radix_cache.mem_cache.native_thread import NativeThread

MOST_COPIES = 64
"""Copies that may be under way in one direction; with more, the host waits for the first."""


class CLayer(ctypes.Structure):
    """`LayerPair` of m3's `native/pages.h`, field by field."""

    _fields_: ClassVar[Any] = [("source", P), ("target", P), ("source_stride", N), ("target_stride", N), ("page", N)]


class CCopy(ctypes.Structure):
    """`PageCopy` of `native/pages.h`, field by field."""

    _fields_: ClassVar[Any] = [
        ("layers", P), ("runs", P), ("num_layers", N), ("num_runs", N), ("done", N), ("seconds", ctypes.c_double)
    ]  # fmt: skip


class NativeJob(CopyJob):
    """A copy by a thread of C++. It cannot fail."""

    table: CCopy
    """The job, for the thread."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.stretches = np.array(self.runs, dtype=np.int64)

    def is_done(self) -> bool:
        return bool(self.table.done == len(self.layers))

    def wait(self, layer: int | None = None) -> None:
        num_layers = len(self.layers) if layer is None else layer + 1
        if self.table.done < num_layers:
            native_library.load().wait_for_pages(P(ctypes.addressof(self.table)), N(num_layers))
        self.seconds = self.table.seconds


class NativeCopier:
    """Copies on a thread that never waits for Python. Raises `NativeUnavailable` if there is none."""

    job = NativeJob

    def __init__(self) -> None:
        native_library.load()
        self._thread: NativeThread | None = None
        self._jobs: deque[NativeJob] = deque()  # their memory must stay while the thread uses it
        self._layers: tuple[Any, Any] | None = None  # of the last job, as arrays and for the thread

    def start(self, job: NativeJob) -> None:
        """Let the thread copy."""
        if self._thread is None:
            self._thread = NativeThread(MOST_COPIES)
            self._end = weakref.finalize(self, _end, self._thread, self._jobs)
        if self._layers is None or self._layers[0] is not job.layers:
            pairs = [
                CLayer(s.ctypes.data, t.ctypes.data, s.strides[0], t.strides[0], s.shape[2]) for s, t in job.layers
            ]
            self._layers = job.layers, (CLayer * len(pairs))(*pairs)
        layers = ctypes.addressof(self._layers[1])
        job.table = CCopy(layers, job.stretches.ctypes.data, len(job.layers), len(job.stretches))
        while self._jobs and self._jobs[0].is_done():
            self._jobs.popleft()
        self._jobs.append(job)
        self._thread.launch("copy_pages", ctypes.addressof(job.table))

    def close(self) -> None:
        """Wait for the copies, and end the thread."""
        if self._thread is not None:
            self._end()


def _end(thread: NativeThread, jobs: "deque[NativeJob]") -> None:
    thread.close()
    jobs.clear()
