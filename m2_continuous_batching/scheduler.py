"""Who runs now: as many requests as two limits allow, decided anew at every step.

m1 ran one request to its end. Here a step is a batch: requests join it when there is room and leave it the moment they
end, and nobody waits for the slowest (iteration-level scheduling; Yu et al., "Orca", OSDI 2022). `max_num_seqs` bounds
how many run, `max_num_batched_tokens` how many new tokens go through the model in one step. vLLM:
`v1/core/sched/scheduler.py`; SGLang: `Scheduler.get_next_batch_to_run`.
"""

from collections.abc import Iterable, Mapping

from m1_single_request.errors import DuplicateRequestError, shown
from m1_single_request.request import BaseFinishReason, Request, RequestStatus
from m1_single_request.request_updater import RequestUpdater
from m1_single_request.sampling_step import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m2_continuous_batching.config import SchedulerConfig
from m2_continuous_batching.events import Admit, LeftOut, NotAdmitted
from m2_continuous_batching.kv_manager import KVManager
from m2_continuous_batching.request_queue import RequestQueue, SchedulingPolicy, create_request_queue
from m2_continuous_batching.scheduler_output import SchedulerOutput
from m2_continuous_batching.step_plan import StepPlan


class Scheduler:
    """The only one that changes requests. Nothing is released between `schedule` and `update_from_output`.

    A request is in `requests` from its arrival to its end, and either in `waiting` or in `running`. `running` is in
    order of admission, and whoever is there owns KV memory.
    """

    def __init__(
        self, *, scheduler_config: SchedulerConfig, kv_manager: KVManager, stop_checker: StopChecker, tracer: Tracer
    ) -> None:
        assert scheduler_config.max_num_batched_tokens is not None, "the configuration must be resolved"
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.max_num_batched_tokens = scheduler_config.max_num_batched_tokens
        self.kv_manager = kv_manager
        self.updater = RequestUpdater(stop_checker=stop_checker, tracer=tracer)
        self.tracer = tracer
        self.requests: dict[str, Request] = {}
        self.waiting: RequestQueue = create_request_queue(SchedulingPolicy.FCFS)
        self.running: list[Request] = []
        self.finished_req_ids: set[str] = set()  # not announced yet
        self._left_out: list[str] = []  # running requests for which the last step had no token
        self._unsettled = False  # whether somebody in `requests` may be about to end, wherever it stands
        self._num_marks = 0
        self._untold: set[str] = set()  # who ended since the last batch that the trace has heard of

    def add_request(self, request: Request) -> None:
        """Queue a request that has passed the checks of intake."""
        if request.request_id in self.requests:
            raise DuplicateRequestError(f"request id {shown(request.request_id)} is in use: it has not finished yet")
        self.updater.trace_arrival(request, num_waiting=len(self.waiting))
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs, aborted ones included until their end was reported."""
        return bool(self.requests)

    def schedule(self) -> SchedulerOutput:
        """Decide what goes through the model now.

        1. Whole prompts of waiting requests, oldest first, as long as both limits and the KV memory allow. The first
           that does not fit ends the phase: nobody overtakes.
        2. One token for every other running request, as far as the budget reaches.

        Phase 1 alone would starve phase 2 while prompts keep coming. So whom the budget left out goes first in the next
        step, before anybody is admitted; and so does a prompt whose step was interrupted. If one of these does not fit,
        nobody is admitted.
        """
        self._release()  # an interrupted update may not have come so far
        plan = StepPlan(budget=self.max_num_batched_tokens)
        running = [request for request in self.running if request.to_finish is None]
        first = [r for r in running if r.request_id in self._left_out or r.sequence.num_computed_tokens == 0]
        for request in first:
            self._continue(request, plan)
        if all(request.request_id in plan.num_scheduled_tokens for request in first):
            self._admit(plan)
        for request in running:
            if request.request_id not in plan.num_scheduled_tokens:
                self._continue(request, plan)
        self._left_out = [r.request_id for r in running if r.request_id not in plan.num_scheduled_tokens]
        if self.tracer and self._left_out:
            self.tracer.emit(LeftOut(rids=tuple(self._left_out), max_num_batched_tokens=self.max_num_batched_tokens))
        announced, self.finished_req_ids = frozenset(self.finished_req_ids), set()
        if self.tracer:
            self._untold |= announced
            if plan.num_scheduled_tokens:
                self.tracer.emit(plan.event(left=self._untold))
                self._untold = set()
        return plan.output(finished_req_ids=announced)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, sampled: Mapping[str, SampledTokens]
    ) -> list[Request]:
        """Commit a step: append tokens, end what is to end, release its KV memory. Returns the requests that changed.

        `sampled` holds the new tokens by request id; a request that failed has none. A request that was marked to
        finish (abort, error) ends now and its tokens of this step are dropped.
        """
        candidates = list(self.requests.values()) if self._unsettled else self.running
        self._unsettled = True  # until all is done: an interrupted update is made again, and looks at everybody
        num_marks = self._num_marks
        changed = [request for request in candidates if request.to_finish or request.request_id in sampled]
        self.waiting.remove_requests([r for r in changed if r.to_finish])
        for request in changed:
            request_id = request.request_id
            if request.to_finish is None:
                self.updater.commit(
                    request, sampled[request_id], num_new_kv=scheduler_output.num_scheduled_tokens[request_id]
                )
            if request.to_finish is not None:
                self._finish(request, request.to_finish)
        self._unsettled = self._num_marks > num_marks  # somebody was given up meanwhile
        return changed

    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]:
        """Mark unfinished requests to end with `reason` at the next update. Returns the ids that were marked."""
        known = [request_id for request_id in request_ids if request_id in self.requests]
        if known:
            self._unsettled = True
            self._num_marks += 1
        return [request_id for request_id in known if self.updater.mark(self.requests[request_id], reason)]

    def check_invariants(self) -> None:
        """Raise AssertionError if queues and memory contradict each other; tests call this after every step."""
        waiting, running = [r.request_id for r in self.waiting], [r.request_id for r in self.running]
        assert len(running) <= self.max_num_seqs
        assert sorted(waiting + running) == sorted(self.requests), (waiting, running, list(self.requests))
        assert all(r.status is RequestStatus.WAITING for r in self.waiting)
        assert all(r.status is RequestStatus.RUNNING for r in self.running)
        assert sorted(self.kv_manager.owned()) == sorted(running), "whoever runs owns memory, and nobody else"
        assert set(self._left_out) <= set(running)
        for request in self.running:
            sequence = request.sequence
            assert sequence.num_computed_tokens == (sequence.get_len() - 1 if sequence.output_token_ids else 0)
        self.kv_manager.check_invariants()

    def _continue(self, request: Request, plan: StepPlan) -> None:
        """Let a running request go on, if the budget allows.

        With its newest token; or with its prompt again, if the step that should have read it was interrupted.
        """
        sequence = request.sequence
        needed = 1 if sequence.num_computed_tokens else sequence.get_prompt_len()
        total = sequence.num_computed_tokens + needed
        if needed > plan.budget_left or not self.kv_manager.can_hold(request.request_id, total):
            return
        new_ids = self.kv_manager.reserve(request.request_id, total)
        if sequence.num_computed_tokens:
            plan.add_decode(request, new_ids)
        else:
            plan.add_prefill(request, self.kv_manager.block_ids(request.request_id))

    def _admit(self, plan: StepPlan) -> None:
        """Phase 1. A request in the queue that is marked to finish, or was admitted already, is only taken out."""
        while self.waiting:
            request = self.waiting.peek_request()
            if request.to_finish is not None or request in self.running:
                self.waiting.pop_request()
                continue
            num_tokens = request.sequence.get_prompt_len()
            if refused := self._refusal(request, num_tokens, plan):
                if self.tracer:
                    limit, needed, available = refused
                    self.tracer.emit(
                        NotAdmitted(
                            rid=request.request_id,
                            limit=limit,
                            needed=needed,
                            available=available,
                            num_waiting=len(self.waiting),
                        )
                    )
                return
            self.kv_manager.reserve(request.request_id, num_tokens)
            block_ids = self.kv_manager.block_ids(request.request_id)
            request.status = RequestStatus.RUNNING
            self.running.append(request)  # and only then out of the queue: an interrupt leaves it in one of them
            self.waiting.pop_request()
            plan.add_prefill(request, block_ids)
            if self.tracer:
                self.tracer.emit(
                    Admit(
                        rid=request.request_id,
                        prefix=0,
                        extend=num_tokens,
                        block_ids=tuple(block_ids),
                        num_running=len(self.running),
                        max_num_seqs=self.max_num_seqs,
                        budget_left=plan.budget_left,
                        max_num_batched_tokens=self.max_num_batched_tokens,
                        num_waiting=len(self.waiting),
                    )
                )

    def _refusal(self, request: Request, num_tokens: int, plan: StepPlan) -> tuple[str, int, int] | None:
        """The limit that keeps a request out, what it needs and what there is; None if it may join."""
        if len(self.running) >= self.max_num_seqs:
            return "max_num_seqs", len(self.running) + 1, self.max_num_seqs
        if num_tokens > plan.budget_left:
            return "max_num_batched_tokens", num_tokens, plan.budget_left
        if not self.kv_manager.can_hold(request.request_id, num_tokens):
            return "kv_memory", num_tokens, 0
        return None

    def _finish(self, request: Request, reason: BaseFinishReason) -> None:
        """Take a request out of all queues and release its memory. The step releases what the runner holds for it."""
        self.updater.end(request, reason)
        if request in self.running:
            self.running.remove(request)
        if request.request_id in self._left_out:
            self._left_out.remove(request.request_id)
        self.finished_req_ids.add(request.request_id)
        del self.requests[request.request_id]  # last: as long as it is here, an interrupted update is made again
        self._release()
        self.updater.trace_end(request)

    def _release(self) -> None:
        """Take back the memory of everybody who is not here any more."""
        for request_id in list(self.kv_manager.owned()):
            if request_id not in self.requests:
                self.kv_manager.release(request_id)
