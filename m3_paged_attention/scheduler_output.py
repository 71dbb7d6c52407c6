"""What the scheduler tells the rest of the engine: m2's messages, and now also which KV blocks are to be moved.

A request is described in full when it runs for the first time (`NewRequestData`), and again, but for its prompt, when
it comes back after a preemption (`ResumedReqData`); in between only by what changed (`CachedRequestData`, m2's). Before
the forward the worker moves blocks: swaps in, swaps out, copies, in this order. vLLM: `v1/core/sched/output.py`; the
three lists of moves are those of vLLM's first engine, which swapped and forked as this one does.
"""

from dataclasses import dataclass

from m1_single_request.sampling_params import SamplingParams
from m2_continuous_batching.scheduler_output import CachedRequestData
from m3_paged_attention.block_pool import Pairs


@dataclass(frozen=True)
class NewRequestData:
    """A request that runs for the first time."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    """For its draws: the sampler sits on the other side of this message."""
    stop_token_ids: frozenset[int]
    """Every id that ends it; `min_tokens` forbids them for a while."""
    block_ids: list[int]
    num_computed_tokens: int = 0
    """Tokens whose KV exists already: a sibling's prompt but for its last token, or none."""


@dataclass(frozen=True)
class ResumedReqData:
    """A request that ran before, was preempted and comes back: what the runner knew of its place is void."""

    req_id: str
    output_token_ids: list[int]
    """All that it has said."""
    block_ids: list[int]
    """Its whole block table."""
    num_computed_tokens: int
    """Tokens whose KV exists: 0 if it is computed again, all but the newest if it was swapped in."""


@dataclass(frozen=True)
class SchedulerOutput:
    """One step's decision, complete. Nobody changes it.

    Of the new blocks of a cached request the last belongs where its newest token goes. So it is appended to the block
    table, or takes the place of the last one there, if that was copied because others hold it, too.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_resumed_reqs: list[ResumedReqData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    """New tokens by request id."""
    total_num_scheduled_tokens: int
    finished_req_ids: frozenset[str]
    """Requests that ended since the last decision."""
    blocks_to_swap_in: Pairs
    """(host block, device block)."""
    blocks_to_swap_out: Pairs
    """(device block, host block)."""
    blocks_to_copy: Pairs
    """(source, target), both on the device."""
