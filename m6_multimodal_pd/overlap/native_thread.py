"""A thread of the native backend that runs whole steps without Python, one after the other.

A Python thread would not overlap, because each of its calls waits for the interpreter's lock. Here to launch a step is
one call, to wait for it another, and the thread itself never needs the lock. Its C++ is m3's `native/thread.h`, and
that of a step `native/whole_step.h`.
"""

import ctypes

from m3_paged_attention.attention import native_library
from m3_paged_attention.attention.native_library import N, P
from m3_paged_attention.attention.native_step import CLinear, CStep


class CWholeStep(ctypes.Structure):
    """`WholeStep` of whole_step.h, with its fields in its order."""

    _fields_ = (
        ("step", CStep),
        ("input_ids", P),
        ("newest", P),
        ("head", CLinear),
        ("vocab_size", N),
        ("rows", P),
        ("tokens", P),
        ("logits", P),
    )


class NativeThread:
    """Runs the calls of the native backend that it is given. Its owner must `close` it."""

    def __init__(self) -> None:
        """Start the thread. Raises `NativeUnavailable` without the C++ kernels."""
        self._library = library = native_library.load()
        library.thread_start.restype = ctypes.c_void_p
        library.thread_launch.argtypes, library.thread_launch.restype = [ctypes.c_void_p] * 3, ctypes.c_long
        library.thread_wait.argtypes = [ctypes.c_void_p, ctypes.c_long]
        library.thread_wait.restype = ctypes.c_double
        library.thread_stop.argtypes = [ctypes.c_void_p]
        self._thread: int | None = library.thread_start()

    def launch(self, function: str, argument: int) -> int:
        """Start a C function of one pointer, behind those that are running; return the number of the call.

        `argument`: an address. With two others that have not ended, it waits for the first.
        """
        address = ctypes.cast(getattr(self._library, function), ctypes.c_void_p)
        number: int = self._library.thread_launch(self._thread, address, argument)
        return number

    def wait(self, number: int | None = None) -> float:
        """Wait until a call has ended; None: all. Return its duration in seconds. After `close` there is none."""
        if self._thread is None:
            return 0.0
        seconds: float = self._library.thread_wait(self._thread, number or 0)
        return seconds

    def close(self) -> None:
        """Wait for all calls, and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._library.thread_stop(thread)
