"""Build the scheduler of m2: which requests run in the next step, and what becomes of them afterwards.

At every step waiting requests may join and ended ones leave: continuous batching. Two limits decide how many join. The
rest is promises: no request overtakes another, none is starved, each end is announced once, and no memory is freed
while a forward may still write to it.

Explained in docs/m2_continuous_batching.md#scheduler-two-phases-two-limits-one-rule.

    cp starters/scheduler.py my_scheduler.py
    pytest --part scheduler=my_scheduler.py:MyScheduler

You write `schedule` and `update_from_output`; everything else is given. The behaviours begin with those that need
`schedule` alone. (A trace of an engine with this scheduler has no `not_admitted` and no `left_out` events.)
"""

from collections.abc import Iterable, Mapping

from m1_single_request.events import RequestAdded
from m1_single_request.request import BaseFinishReason, Request, RequestStatus
from m1_single_request.request_updater import RequestUpdater
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m2_continuous_batching.config import SchedulerConfig
from m2_continuous_batching.events import Admit, Batch
from m2_continuous_batching.kv_manager import SlotManager
from m2_continuous_batching.request_queue import FCFSRequestQueue
from m2_continuous_batching.scheduler_output import SchedulerOutput
from m2_continuous_batching.step_plan import StepPlan


class Plan(StepPlan):
    """Given. The plan of a step, which you fill; it writes the trace.

    - `budget_left`: the number of tokens that the step may still have.
    - `num_scheduled_tokens`: the tokens of the requests that are in the plan, by request id.
    - `add_prefill(request, block_ids)`: run the whole prompt of a request that has just joined.
    - `add_decode(request, new_block_ids)`: run the newest token of a running request.
    - `output(finished_req_ids=...)`: the complete decision.
    """

    def __init__(self, scheduler: "MyScheduler") -> None:
        super().__init__(budget=scheduler.max_num_batched_tokens)
        self.scheduler = scheduler

    def add_prefill(self, request: Request, block_ids: list[int]) -> None:
        super().add_prefill(request, block_ids)
        self.scheduler.tracer.emit(
            Admit,
            rid=request.request_id,
            prefix=0,
            extend=len(request.prompt_token_ids),
            block_ids=tuple(block_ids),
            num_running=len(self.scheduler.running),
            max_num_seqs=self.scheduler.max_num_seqs,
            budget_left=self.budget_left,
            max_num_batched_tokens=self.budget,
            num_waiting=len(self.scheduler.waiting),
        )

    def output(self, *, finished_req_ids: frozenset[str]) -> SchedulerOutput:
        output = super().output(finished_req_ids=finished_req_ids)
        self.scheduler.tracer.emit(Batch.of, output, output.scheduled_new_reqs, self.budget)
        return output


class MyScheduler:
    """Decides about requests and moves them."""

    requests: dict[str, Request]
    """All requests that have not ended, by id, in order of arrival."""
    waiting: FCFSRequestQueue[Request]
    """Those that have not joined: a deque with `peek_request()`, `pop_request()` and `remove_requests(requests)`."""
    running: list[Request]
    """Those that have joined, in this order. Each of them owns KV memory, and no other request does."""
    updater: RequestUpdater
    """Commits tokens to a request, and ends it: see `update_from_output`."""

    def __init__(
        self, *, scheduler_config: SchedulerConfig, kv_manager: SlotManager, stop_checker: StopChecker, tracer: Tracer
    ) -> None:
        """Given."""
        assert scheduler_config.max_num_batched_tokens is not None, "the configuration must be resolved"
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.max_num_batched_tokens = scheduler_config.max_num_batched_tokens
        self.kv_manager = kv_manager
        self.updater = RequestUpdater(stop_checker=stop_checker, tracer=tracer)
        self.tracer = tracer
        self.requests, self.running = {}, []
        self.waiting = FCFSRequestQueue()
        self.finished_req_ids: set[str] = set()
        """The requests that have ended and are in no `SchedulerOutput` yet."""
        self.left_out: list[str] = []
        """Yours: the running requests that got no token in the last step."""
        self.marked: dict[str, Request] = {}
        """The requests that must end at the next update, running or waiting, by id."""

    def add_request(self, request: Request) -> None:
        """Given. Queue a request."""
        self.tracer.emit(RequestAdded.of, request, len(self.waiting))
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def schedule(self) -> SchedulerOutput | None:
        """Choose the requests and the tokens of the next step. Fill a `Plan(self)`, in this order:

        1. The running requests that got no token in the last step: one token each. Without this rule new prompts could
           use up the budget at every step.
        2. Waiting requests join, each with its whole prompt, in the order of the queue, as long as the first of them
           has room: fewer than `max_num_seqs` requests are in `running`, its prompt is at most `plan.budget_left`, and
           `kv_manager.can_hold(request_id, length of the prompt)`. The first one without room ends this phase, so that
           none overtakes another. If one of the requests of phase 1 could not get its token, none joins.
        3. All other running requests: one token each, in the order of `running`, while the budget lasts.

        A request joins: it moves from `waiting` to the end of `running`, its status becomes `RequestStatus.RUNNING`,
        and `kv_manager.reserve(request_id, length of the prompt)` gives it memory and returns its block ids.

        A running request gets a token only if there is budget and `kv_manager.can_hold(request_id, total)`, where
        `total` is `request.sequence.num_computed_tokens + 1`; then `reserve(request_id, total)`. If not, it is skipped.

        A request that is marked to end (`request.to_finish` is not None) gets nothing and does not join. A running one
        keeps its place and its memory until the update. A waiting one does not end phase 2.

        Return `plan.output(finished_req_ids=...)` with the requests that have ended since the last decision, a
        frozenset; each of them is announced once. If there is no token in the plan, return None, and announce nothing.
        """
        raise NotImplementedError

    def update_from_output(
        self, scheduler_output: SchedulerOutput | None, sampled: Mapping[str, SampledTokens]
    ) -> list[Request]:
        """Commit a step, and return the requests that changed: those that got tokens and those that ended, each once.

        `scheduler_output` is the decision, or None. `sampled` has the new tokens by request id. A request that failed
        is not in it, and is marked; if the whole step failed, it is empty.

        - A request that is marked to end ends now, whether it runs or waits. Its tokens of this step are dropped.
        - Of every other request in `sampled` the tokens are committed: `updater.commit(request, sampled[request_id],
          num_new_kv=...)`, with the number of tokens that this step has run for it. If they end the request, `commit`
          marks it (`request.to_finish`), and it ends in this same update.

        A request ends: it is removed from `requests`, from `running` or `waiting`, and from `marked`; its memory is
        released (`kv_manager.release(request_id)`), if it ran; its id is added to `finished_req_ids`; then
        `updater.end(request, request.to_finish)`.
        """
        raise NotImplementedError

    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]:
        """Given. Mark unfinished requests to end with `reason` at the next update. Return the marked ids."""
        known = [self.requests[request_id] for request_id in request_ids if request_id in self.requests]
        marked = {request.request_id: request for request in known if self.updater.mark(request, reason)}
        self.marked |= marked
        return list(marked)

    def reset(self, reason: BaseFinishReason) -> None:
        """Given. End all requests with `reason`, outside a step, and free all memory."""
        requests, self.requests = self.requests, {}
        self.waiting.clear()
        self.running.clear()
        self.finished_req_ids, self.left_out, self.marked = set(), [], {}
        for request in requests.values():
            self.kv_manager.release(request.request_id)
            self.updater.end(request, reason)

    def check_invariants(self) -> None:
        """Given. Raise AssertionError if queues and memory contradict each other; tests call this after every step."""
        waiting, running = [r.request_id for r in self.waiting], [r.request_id for r in self.running]
        assert len(running) <= self.max_num_seqs, "more than max_num_seqs requests run"
        assert sorted(waiting + running) == sorted(self.requests), "each unfinished request waits or runs"
        assert all(r.status is RequestStatus.WAITING for r in self.waiting), "a waiting request has another status"
        assert all(r.status is RequestStatus.RUNNING for r in self.running), "a running request has another status"
        assert sorted(self.kv_manager.owned()) == sorted(running), "exactly the running requests own KV memory"
        for request in self.running:
            sequence = request.sequence
            num_kv = sequence.get_len() - 1 if sequence.output_token_ids else 0
            assert sequence.num_computed_tokens == num_kv, "a request has KV for all of its tokens but the newest"
        self.kv_manager.check_invariants()
