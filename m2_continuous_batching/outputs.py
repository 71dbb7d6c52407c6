"""Numbers that only a batch has: how much of a step was work, and how much of the KV memory holds anything."""

from dataclasses import dataclass

from m1_single_request.outputs import EngineStats as SingleRequestStats


@dataclass(frozen=True)
class BatchUsage:
    """What one step's forwards did, and what stands in the KV memory after it."""

    useful_tokens: int
    """New tokens that went through the model."""
    padded_tokens: int
    """Places in the same tensors that held no token: they were computed and thrown away."""
    kv_bytes_reserved: int
    """KV memory that is taken, whether anything stands in it or not."""
    kv_bytes_used: int
    """The part of it that holds keys and values of a request."""


@dataclass(frozen=True)
class EngineStats(SingleRequestStats):
    """m1's totals, and the waste."""

    useful_tokens: int
    """Tokens that went through the model since the engine was built."""
    padded_tokens: int
    """Padding that went with them."""
    kv_bytes_reserved: int
    """KV memory that is taken now; `kv_bytes` of it hold something."""
