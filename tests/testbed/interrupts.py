"""Ctrl-C at every line: a signal's exception may come between any two of them."""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any


class Interrupt:
    """What became of it."""

    where: str | None = None
    """The line before which it came; None: the code ended first."""


@contextmanager
def interrupted(before_line: int, modules: Collection[ModuleType]) -> Iterator[Interrupt]:
    """Raise KeyboardInterrupt in the block, before the `before_line`th line of `modules` that it runs, and swallow it.

    for line in count(1):
        with interrupted(line, modules) as interrupt:
            ...
        if interrupt.where is None:
            break
    """
    files = {str(module.__file__) for module in modules}
    interrupt, left = Interrupt(), before_line

    def trace_lines(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                interrupt.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise KeyboardInterrupt
        return trace_lines

    def trace_calls(frame: FrameType, event: str, argument: Any) -> Any:
        return trace_lines if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(trace_calls)
    try:
        yield interrupt
    except KeyboardInterrupt:
        if interrupt.where is None:  # somebody really pressed it
            raise
    finally:
        sys.settrace(before)
