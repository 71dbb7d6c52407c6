"""What can go wrong in the pools, and whose fault it is if a part raises; the rest is in m1's and m3's `errors.py`."""

from contextlib import AbstractContextManager

import torch

from m1_single_request.errors import LONGEST_REASON, EngineError, shown
from m3_paged_attention.errors import PartError


class PoolError(EngineError, RuntimeError):
    """A row or slots were given back that their holder does not own. Nothing was changed: some part has a bug."""


class blamed_on(AbstractContextManager[None]):  # noqa: N801 - named as it is used; `contextmanager` loses StopIteration
    """Whatever the part raises becomes a `PartError` with its name; but a lost or a full device is not its fault."""

    def __init__(self, role: str, part: object) -> None:
        self.role, self.part = role, part

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        blameless = (PartError, torch.AcceleratorError, torch.OutOfMemoryError)
        if isinstance(error, Exception) and not isinstance(error, blameless):
            name = getattr(self.part, "__name__", type(self.part).__name__)
            raise PartError(f"the part {self.role!r} ({name}) failed: {shown(error, LONGEST_REASON)}") from error
