"""Admission: the way in which a waiting request can start, and the limits that prevent it.

m2 checked for a free slot. Here a request starts in one of three ways: its tokens are computed; or it was swapped out
and its KV is copied back to the device; or a sibling has the KV of their prompt, and the request starts on the same
blocks. Each way costs tokens and blocks, which are compared with the limits. SGLang: `PrefillAdder`; vLLM does this in
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
    """The way in which a request would start, and its cost."""

    how: str
    """`prefill`, `swap_in` or `fork`."""
    num_tokens: int
    """Tokens that go through the model in this step."""
    num_blocks: int
    """Free blocks that it takes in this step."""
    source: Request | None = None
    """In a fork, the sibling whose blocks it would share."""
    is_ready: bool = True
    """False if the sibling's prompt is computed in this step, so that the fork starts in the next."""


class Admission:
    """Checks one waiting request at a time, without changing it."""

    def __init__(self, *, scheduler_config: SchedulerConfig, kv_manager: KVCacheManager, tracer: Tracer) -> None:
        assert scheduler_config.max_num_seqs is not None, "the configuration must be resolved"
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.kv_manager = kv_manager
        self.tracer = tracer

    def way_in(self, request: Request, running: Sequence[Request], plan: StepPlan) -> WayIn:
        """Return the first way that is possible: swap in, fork, prefill."""
        sequence = request.sequence
        num_blocks = self.kv_manager.blocks_for(sequence.get_len())
        if self.kv_manager.is_swapped(request.request_id):
            return WayIn("swap_in", 1, num_blocks)
        can_fork = request.parent_id is not None and not sequence.get_output_len()
        if can_fork and request.sampling_params.prompt_logprobs is None:  # they need the prompt's logits
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
        """Return whether a limit excludes the request from this step; if so, emit the limit.

        One block per running request stays free, for its next token. A preempted request can have more tokens than the
        whole budget of a step. So the budget does not exclude it if it is alone in the step.
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
