"""m8's engine: m6's, computed by all ranks of the job. One program runs on every rank; the user's part runs on rank 0.

torchrun --nproc-per-node 2 program.py
"""

import atexit
import os
import signal
import threading
import weakref
from typing import Any

from m1_single_request.config import TraceConfig
from m6_multimodal_pd.llm_engine import LLMEngine as SingleProcessEngine
from m8_parallel.config import EngineConfig
from m8_parallel.job import place
from m8_parallel.trace import trace_of_rank
from m8_parallel.wiring import PARTS


class LLMEngine(SingleProcessEngine):
    """The engine of a job. On rank 0 it is built, and used as any other; on other ranks building it does not return: it
    follows rank 0 until that closes its engine, and then raises `SystemExit(0)`. So a program builds it once."""

    parts = PARTS
    config_type = EngineConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        (rank, size), trace = place(), kwargs.get("trace_config")
        if isinstance(trace, TraceConfig):
            kwargs["trace_config"] = trace_of_rank(trace, rank, size)
        super().__init__(*args, **kwargs)
        if rank:
            self._follow()
        elif size > 1:
            _open[self.engine_core] = os.getpid()
            weakref.finalize(self, _dropped, self.engine_core, threading.get_ident())
            atexit.unregister(_close_all)
            atexit.register(_close_all)  # once more: before the threads of this engine end

    def _follow(self) -> None:
        """Execute the messages of rank 0; raise `SystemExit(0)` when it closes its engine. Ctrl-C is ignored."""
        core = self.engine_core
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            core.follow()
        except BaseException as error:
            core.ranks.leave(str(error))
            raise
        finally:
            try:
                core.end()
            finally:
                self._end()
        raise SystemExit(0)


_open: dict[Any, int] = {}
"""Engine cores of rank 0, and the process that has built each. The others wait until it closes them."""


def _close_all() -> None:
    """Close all cores that the program has left open, when it ends."""
    for core in list(_open):
        _close(core)


def _dropped(core: Any, thread: int) -> None:
    """Close the core of an engine that is gone. In another thread than its own it stays open until the program ends."""
    if core.has_ended or threading.get_ident() == thread:
        _close(core)


def _close(core: Any) -> None:
    if _open.pop(core, None) == os.getpid():  # a forked process has copies
        try:
            core.close()
        finally:
            core.tracer.close()
