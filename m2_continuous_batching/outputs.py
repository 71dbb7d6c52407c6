"""Statistics of a batch: useful and padded tokens of a step, used and reserved KV memory. New in m2."""

from dataclasses import dataclass

from m1_single_request.outputs import EngineStats as SingleRequestStats


@dataclass(frozen=True)
class BatchUsage:
    """Tokens of one step's forwards, and the KV memory after the step."""

    useful_tokens: int
    """New tokens that went through the model."""
    padded_tokens: int
    """Tensor positions without a token: computed and discarded."""
    kv_bytes_reserved: int
    """Reserved KV memory, used or not."""
    kv_bytes_used: int
    """Part of it that holds keys and values of requests."""


@dataclass(frozen=True)
class EngineStats(SingleRequestStats):
    """m1's totals, with padding and reserved memory."""

    useful_tokens: int
    """Tokens that went through the model since the engine was built."""
    padded_tokens: int
    """Padding positions computed with them."""
    kv_bytes_reserved: int
    """Reserved KV memory; `kv_bytes` of it are in use."""
