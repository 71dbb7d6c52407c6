"""Errors of a KV memory in blocks; the others are in m1's `errors.py`."""

from m1_single_request.errors import EngineError, InvalidRequestError


class OutOfBlocksError(EngineError, RuntimeError):
    """An allocation needs more blocks than are free; none was allocated. The scheduler checks before it allocates."""


class KVCapacityError(InvalidRequestError):
    """A request that does not fit into the KV memory even alone, at intake or after it has grown."""
