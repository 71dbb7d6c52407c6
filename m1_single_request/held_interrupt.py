"""Hold Ctrl-C until a step is complete.

A signal's exception can be raised between any two lines of Python: between the two lists that a request moves through,
or between a layer's keys and values. The calls that change the engine hold SIGINT instead (`EngineCoreBase.changing`),
so that a step runs to its end or not at all (unless Ctrl-C comes twice), and no line inside has to be ordered for an
interrupt. vLLM and SGLang run the engine in a process of its own, which ignores SIGINT.
"""

import os
import signal
from _signal import SIG_IGN, getsignal, signal as set_handler  # type: ignore[import-not-found]
from contextlib import suppress
from types import FrameType
from typing import Any

SIGINT = int(signal.SIGINT)
"""For the C functions of `_signal`: the wrappers in `signal` search an enumeration for each handler, 12 us per step."""
NOTICE = b"\nstopping after this step; press Ctrl-C again to stop now\n"


class HeldInterrupt:
    """Holds SIGINT inside its `with` block, in the main thread, unless the program ignores SIGINT.

    The first SIGINT is delivered when the block ends; if the block raises, its exception takes the place of the SIGINT.
    A second one inside the block goes to the previous handler at once, which raises `KeyboardInterrupt` by default.
    """

    _previous: Any = None  # None: nothing is held
    _has_come = False

    def __enter__(self) -> None:
        previous = getsignal(SIGINT)
        if previous is None or previous == SIG_IGN or isinstance(getattr(previous, "__self__", None), HeldInterrupt):
            return  # a handler that is not Python's; or a block around this one holds it
        self._previous = previous
        try:
            set_handler(SIGINT, self._on_interrupt)
        except ValueError:  # not the main thread, which alone gets SIGINT
            self._previous = None

    def __exit__(self, kind: object, *error: object) -> None:
        if self._previous is not None:
            set_handler(SIGINT, self._previous)
            if self._has_come and kind is None:
                self._deliver()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Note the first SIGINT; pass the second one to the previous handler at once."""
        if not self._has_come:
            self._has_come = True
            with suppress(OSError):  # a terminal that takes no output
                if os.isatty(2):
                    os.write(2, NOTICE)
            return
        self._has_come = False
        set_handler(SIGINT, self._previous)
        self._deliver()

    def _deliver(self) -> None:
        """Call the previous handler. A signal would wake an asyncio loop once more: the held one has done so."""
        if callable(self._previous):
            self._previous(signal.SIGINT, None)
        else:
            signal.raise_signal(signal.SIGINT)
