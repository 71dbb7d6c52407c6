"""Name the part in which an exception was raised: its role, its class and the line.

An error in the bookkeeping of a step ends all requests, and each of them returns it to its caller. The message names
the part to repair, which may be one of the caller's own.
"""

import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from m1_single_request.errors import LONGEST_REASON, PartError, shown


def part_error(error: Exception, parts: Mapping[str, Any]) -> PartError:
    """Return a `PartError` that names the innermost part on the traceback of `error`. `parts`: classes by role."""
    if isinstance(error, PartError):
        return error
    where = "the engine"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if (role := _role_of(frame, parts)) is not None:
            where = f"the part {role}, in line {line} of {Path(frame.f_code.co_filename).name},"
    found = PartError(f"{where} failed: {shown(error, LONGEST_REASON)}")
    found.__cause__ = error
    return found


def _role_of(frame: FrameType, parts: Mapping[str, Any]) -> str | None:
    """Return the role and the class whose method, or the function whose body, this frame runs."""
    owner = type(frame.f_locals.get("self"))
    for role, part in parts.items():
        if part is owner or getattr(part, "__code__", None) is frame.f_code:
            return f"{role!r} ({part.__name__})"
    return None
