"""What a forked process finds out, told to its parent; it takes nothing of the parent's down when it ends."""

import json
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

LIMIT_S = 20


def in_a_fork(ask: Callable[[], Any]) -> Any:
    """What `ask` returns in a forked process, as JSON has it; `AssertionError` after LIMIT_S."""
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, from Python 3.12 on
        pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LIMIT_S)
            os.write(theirs, json.dumps(ask()).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the forked process was ended by signal {os.WTERMSIG(status)}"
    return json.loads(told)
