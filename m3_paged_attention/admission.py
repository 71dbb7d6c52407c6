"""How a waiting request could start, and what stands in its way.

m2 asked for a slot. Here there are three ways in: a request is computed from its tokens; or it was swapped out and
comes back to the device; or a sibling has the KV of their prompt, and it starts on the same blocks. Each way has its
price in tokens and in blocks, and the price is all that decides. SGLang: `PrefillAdder`; vLLM does this inside
`Scheduler.schedule`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from m1_single_request.request import RequestStatus
from m1_single_request.tracer import Tracer
from m3_paged_attention.config import SchedulerConfig
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.request import Request
from m3_paged_attention.scheduler_events import NotAdmitted
from m3_paged_attention.step_plan import StepPlan


class WayIn(NamedTuple):
    """How a request would start, and what that takes."""

    how: str
    """`prefill`, `swap_in` or `fork`."""
    num_tokens: int
    """That go through the model now."""
    num_blocks: int
    """Free blocks that it takes now."""
    source: Request | None = None
    """The sibling on whose blocks it would start."""
    is_ready: bool = True
    """Whether the sibling's prompt has its KV; else it is computed in this step, and the fork starts in the next."""


class Admission:
    """Judges one waiting request at a time; changes nothing."""

    def __init__(self, *, scheduler_config: SchedulerConfig, kv_manager: KVCacheManager, tracer: Tracer) -> None:
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.kv_manager = kv_manager
        self.tracer = tracer

    def way_in(self, request: Request, running: Sequence[Request], plan: StepPlan) -> WayIn:
        """The cheapest way for this request to start."""
        sequence = request.sequence
        num_blocks = self.kv_manager.blocks_for(sequence.get_len())
        if self.kv_manager.is_swapped(request.request_id):
            return WayIn("swap_in", 1, num_blocks)
        can_fork = request.parent_id is not None and not sequence.get_output_len()
        if can_fork and request.sampling_params.prompt_logprobs is None:  # those come from computing the prompt
            for sibling in running:
                if sibling.parent_id != request.parent_id or sibling.to_finish is not None:
                    continue
                if sibling.sequence.num_computed_tokens >= sequence.get_prompt_len() - 1:
                    return WayIn("fork", 1, 1, sibling)
                if sibling.request_id in plan.num_scheduled_tokens:
                    return WayIn("fork", 0, 0, sibling, is_ready=False)
        return WayIn("prefill", sequence.get_len(), num_blocks)

    def is_refused(
        self, request: Request, way: WayIn, running: Sequence[Request], plan: StepPlan, *, num_waiting: int
    ) -> bool:
        """Whether a limit keeps the request out of this step.

        One block per running request stays free, so that each can have its next token. A request that comes back may
        have grown beyond any token budget: alone in its step it runs all the same.
        """
        limit, needed, available, kept_free = "", 0, 0, 0
        is_alone = not plan.num_scheduled_tokens and request.status is RequestStatus.PREEMPTED
        if len(running) >= self.max_num_seqs:
            limit, needed, available = "max_num_seqs", len(running) + 1, self.max_num_seqs
        elif way.num_tokens > plan.budget_left and not is_alone:
            limit, needed, available = "max_num_batched_tokens", way.num_tokens, plan.budget_left
        else:
            kept_free = len(running) + 1 if running else 0
            if way.num_blocks + kept_free > self.kv_manager.num_free:
                limit, needed, available = "blocks", way.num_blocks, self.kv_manager.num_free
        if limit:
            self.tracer.emit(
                NotAdmitted,
                rid=request.request_id,
                limit=limit,
                needed=needed,
                available=available,
                kept_free=kept_free,
                num_waiting=num_waiting,
            )
        return bool(limit)
