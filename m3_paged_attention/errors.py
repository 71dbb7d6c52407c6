"""Errors of a KV memory in blocks; the others are in m1's `errors.py`."""

from m1_single_request.errors import EngineError, InvalidRequestError


class OutOfBlocksError(EngineError, RuntimeError):
    """More blocks were asked for than are free. Nothing was allocated; the scheduler never lets a caller see this."""


class KVCapacityError(InvalidRequestError):
    """A request that cannot fit into the KV memory even alone: refused at intake, or ended when it outgrew it."""
