"""Notices a step that does not end, from a thread that does nothing else.

A step that hangs, in a kernel or in a part of somebody's own, cannot be ended from outside. So the process says where
it hangs, and gives itself up: the router then gives its requests to others. SGLang: `Watchdog`; vLLM: a timeout on
`execute_model`.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

STUCK = 70
"""The exit status of an engine that gave itself up."""


class Watchdog:
    """Belongs to the process; `begin` and `end` surround each step."""

    def __init__(self, step_timeout_s: float, on_stuck: Callable[[], None] = lambda: os._exit(STUCK)) -> None:
        """`on_stuck` is called, in the thread, when all stacks were written to stderr."""
        self.step_timeout_s, self.on_stuck = step_timeout_s, on_stuck
        self._since: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """A step begins."""
        self._since = time.monotonic()

    def end(self) -> None:
        """It has ended."""
        self._since = None

    def close(self) -> None:
        """Watch no longer."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(min(self.step_timeout_s / 4, 1.0)):
            since = self._since
            if since is not None and time.monotonic() - since > self.step_timeout_s:
                with suppress(Exception):  # whoever read it may be gone: no reason to hang for ever
                    self._write_stacks()
                self.on_stuck()
                return

    def _write_stacks(self) -> None:
        sys.stderr.write(f"a step did not end within {self.step_timeout_s:g} s; all stacks:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
