"""A thread of the native backend that runs all layers of a step without Python.

A Python thread would not overlap, because each of its calls waits for the interpreter's lock. Here to launch a step is
one call, to wait for it another, and the thread itself never needs the lock. Its C++ is m3's `native/thread.h`.
"""

import ctypes

from m3_paged_attention.attention import native_library


class NativeThread:
    """Runs one call of the native backend at a time. Its owner must `close` it."""

    def __init__(self) -> None:
        """Start the thread. Raises `NativeUnavailable` without the C++ kernels."""
        self._library = library = native_library.load()
        library.thread_start.restype = ctypes.c_void_p
        library.thread_launch.argtypes = [ctypes.c_void_p] * 3
        library.thread_wait.argtypes, library.thread_wait.restype = [ctypes.c_void_p], ctypes.c_double
        library.thread_stop.argtypes = [ctypes.c_void_p]
        self._thread: int | None = library.thread_start()

    def launch(self, function: int, argument: int) -> None:
        """Start a C function of one pointer. Both are addresses."""
        self._library.thread_launch(self._thread, function, argument)

    def wait(self) -> float:
        """Wait until the call has ended; return its duration in seconds. After `close` there is none."""
        seconds: float = 0.0 if self._thread is None else self._library.thread_wait(self._thread)
        return seconds

    def close(self) -> None:
        """Wait for the call, and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._library.thread_stop(thread)
