"""A thread of the native backend that runs C++ without Python, one call after the other: copies, or whole steps of m6.

A Python thread would not overlap, because each of its calls waits for the interpreter's lock. Here to launch a call is
one call, to wait for it another, and the thread itself never needs the lock. Its C++ is m3's `native/thread.h`. New in
this milestone.
"""

import ctypes

from m1_single_request.errors import EngineDeadError
from m3_paged_attention.attention import native_library


class NativeThread:
    """Runs the calls of the native backend that it is given. Its owner must `close` it."""

    def __init__(self, depth: int) -> None:
        """Start the thread. `depth`: calls that may be launched and not have ended. Raises `NativeUnavailable` without
        the C++ kernels."""
        self._library = library = native_library.load()
        library.thread_start.argtypes, library.thread_start.restype = [ctypes.c_long], ctypes.c_void_p
        library.thread_launch.argtypes, library.thread_launch.restype = [ctypes.c_void_p] * 3, ctypes.c_long
        library.thread_wait.argtypes = [ctypes.c_void_p, ctypes.c_long]
        library.thread_wait.restype = ctypes.c_double
        library.thread_stop.argtypes = [ctypes.c_void_p]
        self._thread: int = library.thread_start(depth)
        self.is_closed = False

    def launch(self, function: str, argument: int) -> int:
        """Start a C function of one pointer, behind those that are running; return the number of the call.

        `argument`: an address. With `depth` others that have not ended, it waits for the first. Raises
        `EngineDeadError` after `close`: a daemon thread may use the engine when Python ends, and closes it.
        """
        if self.is_closed:
            raise EngineDeadError("the engine was closed while it was in use")
        address = ctypes.cast(getattr(self._library, function), ctypes.c_void_p)
        number: int = self._library.thread_launch(self._thread, address, argument)
        return number

    def wait(self, number: int | None = None) -> float:
        """Wait until a call has ended; None: all. Return its duration in seconds."""
        seconds: float = self._library.thread_wait(self._thread, number or 0)
        return seconds

    def close(self) -> None:
        """Wait for all calls, and end the thread."""
        is_closed, self.is_closed = self.is_closed, True
        if not is_closed:
            self._library.thread_stop(self._thread)
