"""Output of a step, and statistics of the KV blocks.

From m3 on the sampler runs next to the model, so the executor returns tokens, not logits. What the parts make for each
other in every step is a plain dataclass, which nobody changes: to make a frozen one takes three times as long. vLLM:
`v1/outputs.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from m1_single_request.outputs import EngineStats as SingleRequestStats
from m1_single_request.sampler import LogprobRow


@dataclass
class ModelRunnerOutput:
    """The sampled tokens of a step, as parallel lists of plain numbers, without tensors."""

    req_ids: list[str]
    """Requests that got a token; a request with an unusable row is in `errors` instead."""
    sampled_token_ids: list[list[int]]
    """The new tokens of each request; in m3 always one."""
    logprobs: list[Sequence[LogprobRow | None]]
    """Log-probabilities of each of these tokens; None if not requested."""
    prompt_logprobs: dict[str, tuple[LogprobRow, ...]] = field(default_factory=dict)
    """Request id -> log-probabilities of the prompt's tokens after the first, if requested; in the prefill's step."""
    errors: Mapping[str, Exception] = field(default_factory=dict)
    """Request id -> the error that ends the request, such as logits that are not finite."""
    sample_seconds: float = 0.0
    """Duration of sampling, in seconds."""


@dataclass(frozen=True)
class EngineStats(SingleRequestStats):
    """m1's totals, and the state of the blocks."""

    num_blocks: int
    """Blocks that can be allocated."""
    num_free_blocks: int
    num_shared_blocks: int
    """Blocks with more than one owner."""
    kv_bytes_reserved: int
    """Memory of the allocated blocks; `kv_bytes` of it hold tokens."""
    num_preemptions: int
    """Number of preemptions of running requests."""
