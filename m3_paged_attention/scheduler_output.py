"""Scheduler output: m2's message from the scheduler to the model runner, and the KV blocks to move.

A request is sent in full in its first step (`NewRequestData`). A preempted request with output tokens is sent again
without its prompt (`ResumedReqData`). All others are sent as changes (`CachedRequestData`, m2's). `StepPlan.output`
builds all three. Before the forward the runner moves blocks: swaps in, swaps out, copies, in this order. vLLM:
`v1/core/sched/output.py`; the three lists of moves are those of vLLM's first engine, which swapped and forked as this
one does.
"""

from dataclasses import dataclass

from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching.scheduler_output import CachedRequestData
from m3_paged_attention.block_pool import Pairs


@dataclass(frozen=True)
class NewRequestData:
    """A request in its first step."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    """Seed of its draws, which the runner makes."""
    stop_token_ids: frozenset[int]
    """Ids that end it; they cannot be sampled before `min_tokens` output tokens."""
    block_ids: list[int]
    num_computed_tokens: int = 0
    """Tokens with KV: the prompt without its last token if the request starts on a sibling's blocks, else 0."""


@dataclass(frozen=True)
class ResumedReqData:
    """A preempted request that resumes, with other blocks than before."""

    req_id: str
    output_token_ids: list[int]
    """All output tokens so far."""
    block_ids: list[int]
    """Its whole block table."""
    num_computed_tokens: int
    """Tokens with KV: 0 if its KV is computed again, all but the newest if it was swapped in."""


@dataclass(frozen=True)
class SchedulerOutput:
    """The decision for one step. Never modified.

    The last of the new blocks of a cached request holds its newest token. It is appended to the block table, or it
    replaces the last block there: then it is the request's copy of a shared block.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_resumed_reqs: list[ResumedReqData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    """New tokens by request id."""
    total_num_scheduled_tokens: int
    finished_req_ids: frozenset[str]
    """Requests that ended since the last `SchedulerOutput`."""
    blocks_to_swap_in: Pairs
    """(host block, device block)."""
    blocks_to_swap_out: Pairs
    """(device block, host block)."""
    blocks_to_copy: Pairs
    """(source, target), both on the device."""
