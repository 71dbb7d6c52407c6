"""End the process of an engine whose step takes too long, with the stacks of all threads on stderr.

A step that hangs, in a kernel or in a user's part, cannot be interrupted from Python: it may hold the interpreter's
lock. So the limit is a timer of the kernel: SIGALRM writes the stacks (`faulthandler`) and ends the process, and the
router routes its requests to other engines. SGLang: `Watchdog`; vLLM: a timeout on `execute_model`.
"""

import faulthandler
import signal

STDERR = 2
WRITE_TIMEOUT_S = 2.0
"""Seconds that writing the stacks may take: stderr may be a pipe that no process reads."""
LONGEST_TIMER_S = 1e9


class Watchdog:
    """Limit for the steps of this process: `with watchdog:` surrounds each step. Setting the timer takes 1 us."""

    def __init__(self, step_timeout_s: float) -> None:
        self.step_timeout_s = min(step_timeout_s, LONGEST_TIMER_S)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process, once the stacks are written
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})  # a parent may have blocked it
        faulthandler.register(signal.SIGALRM, file=STDERR, chain=True)

    def __enter__(self) -> None:
        # a second alarm finds the first one writing, and ends the process at once
        signal.setitimer(signal.ITIMER_REAL, self.step_timeout_s, WRITE_TIMEOUT_S)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
