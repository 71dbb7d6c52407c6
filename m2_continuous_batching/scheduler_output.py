"""The scheduler's output: one step's decision, as plain data.

In m1 the decision was one request and its tokens. Now it is a batch. A request is described in full when it joins
(`NewRequestData`), and later only its changes are (`CachedRequestData`). m2's engine core makes the input batch from
it; from m3 on it is sent to the worker, which stores the rest. vLLM: `v1/core/sched/output.py`. SGLang passes a mutable
`ScheduleBatch` instead (m4).
"""

from dataclasses import dataclass, field

from m1_single_request.sampling_params import SamplingParams


@dataclass(frozen=True)
class NewRequestData:
    """A request in its first step: its whole prompt goes through the model."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: list[int]
    """KV memory of the request. In m2 one id, the slot."""
    num_computed_tokens: int = 0
    """Tokens whose KV exists already; 0 in m2."""


@dataclass(frozen=True)
class CachedRequestData:
    """The requests that ran before, as parallel lists of their changes."""

    req_ids: list[str] = field(default_factory=list)
    new_token_ids: list[list[int]] = field(default_factory=list)
    """Input tokens of this step: the newest token of each request."""
    new_block_ids: list[list[int]] = field(default_factory=list)
    """KV memory newly allocated to each request; empty for a slot, which never grows."""
    num_computed_tokens: list[int] = field(default_factory=list)
    """Tokens of each request with KV. This is the position of its new token: prompt + output - 1."""
    num_output_tokens: list[int] = field(default_factory=list)
    """Output tokens of each request so far, including the input token of this step."""


@dataclass(frozen=True)
class SchedulerOutput:
    """One step's complete decision, which is never modified."""

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    """New tokens by request id, in the order of the batch."""
    total_num_scheduled_tokens: int
    finished_req_ids: frozenset[str]
    """Requests that ended since the last decision, each listed exactly once; their memory is already free. If the
    caller uses an id again at once, it is also in `scheduled_new_reqs`: there the id names the new request."""
