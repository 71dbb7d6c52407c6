"""Release the resources of a Python object that was dropped without `close()`: child processes, sockets, files.

An object can be dropped at any line, in any thread (the garbage collector chooses), or live until the interpreter
exits. So a release never waits for an engine's work or for a message, and at most a second for killed processes to
end. It comes before the garbage collector reaches the sockets: to end a ZeroMQ context waits, without a limit, until
all of its sockets are closed. New in this milestone. vLLM: `weakref.finalize` of `BackgroundResources` in
`v1/engine/core_client.py`.
"""

import os
import weakref
from collections.abc import Callable
from typing import Any


def when_dropped(owner: object, release: Callable[..., object], *args: Any) -> "weakref.finalize[Any, Any]":
    """Call `release(*args)` once: when `owner` is gone, or the interpreter exits. `release` and `args` must not refer
    to `owner`: it would never be collected.

    Does nothing in a forked process, which has copies of all objects and owns none of their resources.
    """
    return weakref.finalize(owner, _release, os.getpid(), release, args)


def _release(process: int, release: Callable[..., object], args: tuple[Any, ...]) -> None:
    if os.getpid() == process:
        release(*args)
