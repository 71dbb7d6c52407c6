"""Scheduler: choose the requests of every step, within two limits.

m1 ran one request to its end. Here a step runs a batch. A request joins it as soon as there is room and leaves it in
the step in which it ends, so no request waits for the longest one (iteration-level scheduling; Yu et al., "Orca", OSDI
2022). `max_num_seqs` limits the running requests, `max_num_batched_tokens` the new tokens of one step. vLLM:
`v1/core/sched/scheduler.py`; SGLang: `Scheduler.get_next_batch_to_run`.
"""

from collections.abc import Iterable, Mapping

from m1_single_request.events import RequestAdded
from m1_single_request.request import BaseFinishReason, Request, RequestStatus
from m1_single_request.request_updater import RequestUpdater
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m2_continuous_batching.config import SchedulerConfig
from m2_continuous_batching.events import Admit, Batch, LeftOut, NotAdmitted
from m2_continuous_batching.kv_manager import SlotManager
from m2_continuous_batching.request_queue import FCFSRequestQueue
from m2_continuous_batching.scheduler_output import SchedulerOutput
from m2_continuous_batching.step_plan import StepPlan


class Scheduler:
    """Decides about requests and moves them. No memory is released between `schedule` and `update_from_output`.

    A request is in `requests` from its arrival to its end. Between two steps it is also in `waiting` or in `running`.
    `running` is in order of admission, and each request in it owns KV memory.
    """

    requests: dict[str, Request]
    waiting: FCFSRequestQueue[Request]
    running: list[Request]
    updater: RequestUpdater

    def __init__(
        self, *, scheduler_config: SchedulerConfig, kv_manager: SlotManager, stop_checker: StopChecker, tracer: Tracer
    ) -> None:
        assert scheduler_config.max_num_batched_tokens is not None, "the configuration must be resolved"
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.max_num_batched_tokens = scheduler_config.max_num_batched_tokens
        self.kv_manager = kv_manager
        self.updater = RequestUpdater(stop_checker=stop_checker, tracer=tracer)
        self.tracer = tracer
        self.requests, self.running = {}, []
        self.waiting = FCFSRequestQueue()
        self.finished_req_ids: set[str] = set()  # in no `SchedulerOutput` yet
        self._left_out: list[str] = []  # running requests without a token in the last step
        self._marked: dict[str, Request] = {}  # to end at the next update

    def add_request(self, request: Request) -> None:
        """Queue a request that has passed the checks of intake, with an id that is not in use."""
        self.tracer.emit(RequestAdded.of, request, len(self.waiting))
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def schedule(self) -> SchedulerOutput | None:
        """Choose the requests and the tokens of the next step; return None if there is nothing to compute.

        1. Admit waiting requests with their whole prompts, in the order of the queue, while limits and KV memory allow.
           The first request that does not fit ends the phase, so no request overtakes another.
        2. Schedule one token for every other running request, while the budget lasts.

        New prompts could use up the budget at every step and starve phase 2. So the requests that the budget left out
        are scheduled first in the next step. If one of them does not fit, no request is admitted.
        """
        plan = StepPlan(budget=self.max_num_batched_tokens)
        running = [request for request in self.running if request.to_finish is None]
        first = [request for request in running if request.request_id in self._left_out]
        for request in first:
            self._continue(request, plan)
        if all(request.request_id in plan.num_scheduled_tokens for request in first):
            self._admit(plan)
        for request in running:
            if request.request_id not in plan.num_scheduled_tokens:
                self._continue(request, plan)
        self._left_out = [r.request_id for r in running if r.request_id not in plan.num_scheduled_tokens]
        if self._left_out:
            self.tracer.emit(LeftOut, rids=tuple(self._left_out), available=self.max_num_batched_tokens)
        if not plan.num_scheduled_tokens:
            return None
        finished_req_ids, self.finished_req_ids = frozenset(self.finished_req_ids), set()
        output = plan.output(finished_req_ids=finished_req_ids)
        self.tracer.emit(Batch.of, output, output.scheduled_new_reqs, self.max_num_batched_tokens)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput | None, sampled: Mapping[str, SampledTokens]
    ) -> list[Request]:
        """Commit a step: append tokens, end finished requests, free their KV memory. Return the changed requests.

        `sampled` holds the new tokens by request id; a failed request has none. A request that is marked to finish
        (abort, error) ends now, and its tokens of this step are dropped.
        """
        changed = [request for request in self.running if request.request_id in sampled]
        changed += [request for request in self._marked.values() if request.request_id not in sampled]
        if self._marked:
            self.waiting.remove_requests(self._marked.values())
        for request in changed:
            if request.to_finish is None and scheduler_output is not None:
                num_new_kv = scheduler_output.num_scheduled_tokens[request.request_id]
                self.updater.commit(request, sampled[request.request_id], num_new_kv=num_new_kv)
            if request.to_finish is not None:
                self._finish(request, request.to_finish)
        return changed

    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]:
        """Mark unfinished requests to end with `reason` at the next update. Return the marked ids."""
        known = [self.requests[request_id] for request_id in request_ids if request_id in self.requests]
        marked = {request.request_id: request for request in known if self.updater.mark(request, reason)}
        self._marked |= marked
        return list(marked)

    def reset(self, reason: BaseFinishReason) -> None:
        """End all requests with `reason`, outside a step. Afterwards the queues are empty and all KV memory is free."""
        requests, self.requests = self.requests, {}
        self.waiting.clear()
        self.running.clear()
        self.finished_req_ids, self._left_out, self._marked = set(), [], {}
        for request in requests.values():
            self.kv_manager.release(request.request_id)
            self.updater.end(request, reason)

    def check_invariants(self) -> None:
        """Raise AssertionError if queues and memory contradict each other; tests call this after every step."""
        waiting, running = [r.request_id for r in self.waiting], [r.request_id for r in self.running]
        assert len(running) <= self.max_num_seqs
        assert sorted(waiting + running) == sorted(self.requests), (waiting, running, list(self.requests))
        assert all(r.status is RequestStatus.WAITING for r in self.waiting)
        assert all(r.status is RequestStatus.RUNNING for r in self.running)
        assert sorted(self.kv_manager.owned()) == sorted(running), "exactly the running requests own KV memory"
        assert set(self._left_out) <= set(running)
        for request in self.running:
            sequence = request.sequence
            assert sequence.num_computed_tokens == (sequence.get_len() - 1 if sequence.output_token_ids else 0)
        self.kv_manager.check_invariants()

    def _continue(self, request: Request, plan: StepPlan) -> None:
        """Schedule the newest token of a running request, if budget and memory allow."""
        total = request.sequence.num_computed_tokens + 1
        if plan.budget_left and self.kv_manager.can_hold(request.request_id, total):
            plan.add_decode(request, self.kv_manager.reserve(request.request_id, total))

    def _admit(self, plan: StepPlan) -> None:
        """Admit waiting requests (phase 1). One that is marked to finish only leaves the queue; the update ends it."""
        while self.waiting:
            request = self.waiting.peek_request()
            if request.to_finish is not None:
                self.waiting.pop_request()
                continue
            num_tokens = request.sequence.get_prompt_len()
            if refused := self._refusal(request, num_tokens, plan):
                limit, needed, available = refused
                self.tracer.emit(
                    NotAdmitted,
                    rid=request.request_id,
                    limit=limit,
                    needed=needed,
                    available=available,
                    num_waiting=len(self.waiting),
                )
                return
            self.waiting.pop_request()
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            block_ids = self.kv_manager.reserve(request.request_id, num_tokens)
            plan.add_prefill(request, block_ids)
            self.tracer.emit(
                Admit,
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

    def _refusal(self, request: Request, num_tokens: int, plan: StepPlan) -> tuple[str, int, int] | None:
        """Return the reached limit, the amount needed and the amount available; None if the request may join."""
        if len(self.running) >= self.max_num_seqs:
            return "max_num_seqs", len(self.running) + 1, self.max_num_seqs
        if num_tokens > plan.budget_left:
            return "max_num_batched_tokens", num_tokens, plan.budget_left
        if not self.kv_manager.can_hold(request.request_id, num_tokens):
            return "kv_memory", num_tokens, 0
        return None

    def _finish(self, request: Request, reason: BaseFinishReason) -> None:
        """Remove a request and release its KV memory. The runner's tensors are freed by the last stage of the step."""
        request_id = request.request_id
        if request in self.running:
            self.running.remove(request)
            self.kv_manager.release(request_id)
        if request_id in self._left_out:
            self._left_out.remove(request_id)
        self.finished_req_ids.add(request_id)
        self._marked.pop(request_id, None)
        del self.requests[request_id]
        self.updater.end(request, reason)
