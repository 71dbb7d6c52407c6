"""Errors of the pools and of the disk tier; the others are in m1's and m3's `errors.py`."""

from m1_single_request.errors import EngineError


class PoolError(EngineError, RuntimeError):
    """A row or slots were freed that are not allocated. No state was changed; the caller has a bug."""


class DiskError(EngineError, OSError):
    """The disk tier does not answer. No state was changed."""
