"""What comes back from a step, and the numbers that only a memory of blocks has.

From m3 on the sampler runs next to the model, so what crosses the executor upwards are tokens, not logits. vLLM:
`v1/outputs.py`.
"""

from dataclasses import dataclass, field

from m1_single_request.errors import ForwardError
from m1_single_request.outputs import EngineStats as SingleRequestStats
from m1_single_request.sampler import LogprobRow


@dataclass(frozen=True)
class ModelRunnerOutput:
    """What one step's forward and sampler made, as parallel lists: plain numbers, no tensors."""

    req_ids: list[str]
    """Whoever got a token; a request whose row could not be used stands in `errors` instead."""
    sampled_token_ids: list[list[int]]
    """The new tokens of each; here always one."""
    logprobs: list[LogprobRow | None]
    prompt_logprobs: dict[str, tuple[LogprobRow, ...]] = field(default_factory=dict)
    """For the prompt's tokens after the first, by request id; with the prefill, where asked for."""
    errors: dict[str, ForwardError] = field(default_factory=dict)
    """By request id."""
    sample_seconds: float = 0.0
    """How much of the step was sampling."""


@dataclass(frozen=True)
class EngineStats(SingleRequestStats):
    """m1's totals, and the state of the blocks."""

    num_blocks: int
    """Blocks that can be handed out."""
    num_free_blocks: int
    num_shared_blocks: int
    """Blocks with more than one owner."""
    kv_bytes_reserved: int
    """Memory of the blocks that somebody owns; `kv_bytes` of it hold something."""
    num_preemptions: int
    """How often a running request lost its blocks."""
