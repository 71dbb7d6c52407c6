"""What can go wrong in the pools, and whose fault it is if a part raises; the rest is in m1's and m3's `errors.py`."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from m1_single_request.errors import EngineError
from m3_paged_attention.errors import PartError


class PoolError(EngineError, RuntimeError):
    """A row or slots were given back that their holder does not own. Nothing was changed: some part has a bug."""


@contextmanager
def blamed_on(role: str, part: object) -> Iterator[None]:
    """Whatever the part raises becomes a `PartError` with its name; but a lost or a full device is not its fault."""
    try:
        yield
    except (PartError, torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        name = getattr(part, "__name__", type(part).__name__)
        raise PartError(f"the part {role!r} ({name}) failed: {error!r}") from error
