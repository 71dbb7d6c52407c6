"""Errors of the pools; the others are in m1's and m3's `errors.py`."""

from m1_single_request.errors import EngineError


class PoolError(EngineError, RuntimeError):
    """A row or slots were given back that their holder does not own. Nothing was changed: some part has a bug."""
