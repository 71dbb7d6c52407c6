"""Scheduler: choose the requests of every step, with KV blocks that are allocated as they are needed.

m2 reserved a slot for the longest possible request. Here a request is admitted if there are blocks for its prompt, and
gets more blocks as it grows. So more requests run at once, and the blocks can run out; then a running request is
preempted and waits again, before all new ones. Siblings (`n > 1`) start on the blocks of the first one. vLLM:
`v1/core/sched/scheduler.py`; SGLang: `Scheduler.get_next_batch_to_run` and `retract_decode`.
"""

from collections.abc import Iterable, Mapping

from m1_single_request.errors import shown
from m1_single_request.events import RequestAdded
from m1_single_request.request import BaseFinishReason, FinishError, RequestStatus
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m2_continuous_batching.events import Batch
from m3_paged_attention.admission import Admission, WayIn
from m3_paged_attention.config import SchedulerConfig
from m3_paged_attention.errors import KVCapacityError
from m3_paged_attention.invariants import check_memory, check_queues
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.preemption import FewestOutputsFirst, preempt, victim_of
from m3_paged_attention.request import Request
from m3_paged_attention.request_queue import PreemptedFirstQueue
from m3_paged_attention.request_updater import RequestUpdater
from m3_paged_attention.scheduler_events import Admit, LeftOut
from m3_paged_attention.scheduler_output import SchedulerOutput
from m3_paged_attention.step_plan import StepPlan


class Scheduler:
    """Decides about requests and moves them. A step's requests keep their blocks from `schedule` to the update.

    `requests` holds all unfinished requests, in the order of arrival. Each is in `running`, where it owns blocks, or in
    `waiting`. Preempted requests are first in `waiting`, in the order of arrival.
    """

    requests: dict[str, Request]
    waiting: PreemptedFirstQueue
    running: list[Request]
    kv_manager: KVCacheManager
    num_preemptions: int
    updater: RequestUpdater

    def __init__(
        self,
        *,
        scheduler_config: SchedulerConfig,
        kv_manager: KVCacheManager,
        preemption: FewestOutputsFirst,
        stop_checker: StopChecker,
        tracer: Tracer,
    ) -> None:
        assert scheduler_config.max_num_seqs and scheduler_config.max_num_batched_tokens, "it must be resolved"
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.max_num_batched_tokens = scheduler_config.max_num_batched_tokens
        self.swaps = scheduler_config.preemption_mode == "swap"
        self.kv_manager = kv_manager
        self.preemption = preemption
        self.admission = Admission(scheduler_config=scheduler_config, kv_manager=kv_manager, tracer=tracer)
        self.updater = RequestUpdater(stop_checker=stop_checker, tracer=tracer)
        self.tracer = tracer
        self.requests, self.waiting, self.running = {}, PreemptedFirstQueue(), []
        self.finished_req_ids: set[str] = set()  # in no `SchedulerOutput` yet
        self.num_preemptions = 0
        self._num_arrivals = 0
        self._left_out: set[str] = set()  # running requests without a token in the last step
        self._siblings: dict[str, list[Request]] = {}  # forked in this step; they start after it, by source id
        self._marked: dict[str, Request] = {}  # to end at the next update

    def add_request(self, request: Request) -> None:
        """Queue a request that has passed the checks of intake, with an id that is not in use."""
        self.tracer.emit(RequestAdded.of, request, len(self.waiting))
        self._num_arrivals += 1
        request.number = self._num_arrivals
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def schedule(self) -> SchedulerOutput | None:
        """Choose the requests and the tokens of the next step; return None if there is nothing to compute or to move.

        1. Preempt running requests until the free blocks suffice for the next tokens of the others.
        2. If no request was preempted, admit waiting requests, preempted ones first, while both limits and the blocks
           allow; one block per running request stays free. The first request that does not fit ends the phase.
        3. Schedule one token for every other running request, while the budget lasts.

        The requests that the last step left out are scheduled before phase 2. If one of them does not fit, no request
        is admitted.
        """
        plan = StepPlan(budget=self.max_num_batched_tokens)
        running = [request for request in self.running if request.to_finish is None]
        num_running = len(running)
        in_need = self._make_room(running)
        if self.waiting and len(running) == num_running:
            first = [request for request in running if request.request_id in self._left_out]
            self._continue(first, plan, in_need)
            if all(request.request_id in plan.num_scheduled_tokens for request in first):
                self._admit(plan)
            running = [request for request in running if request.request_id not in plan.num_scheduled_tokens]
            in_need = self._in_need(running)  # a fork shares the last block of its source, which may need a copy now
        self._continue(running, plan, in_need)
        self._note_left_out(plan)
        moves = self.kv_manager.take_moves()
        if not plan.num_scheduled_tokens and not moves.swap_in and not moves.swap_out:
            return None
        finished_req_ids, self.finished_req_ids = frozenset(self.finished_req_ids), set()
        checker = self.updater.stop_checker
        output = plan.output(finished_req_ids=finished_req_ids, moves=moves, stop_checker=checker)
        if plan.num_scheduled_tokens:
            joined = [*output.scheduled_new_reqs, *output.scheduled_resumed_reqs]
            self.tracer.emit(Batch.of, output, joined, self.max_num_batched_tokens)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput | None, output: ModelRunnerOutput | None
    ) -> list[Request]:
        """Commit a step: append tokens, end finished requests, free their blocks. Return the changed requests.

        `output` is None if the step ran no model or failed. After a failure it is unknown whether blocks were moved, so
        the requests with data in such blocks are computed again. A request that is marked to finish (abort, error) ends
        now, and its token of this step is dropped.
        """
        marked = list(self._marked.values())  # of those that are marked from now on, only the changed ones end now
        changed: list[Request] = []
        if scheduler_output is not None and output is not None:
            changed = self._commit(scheduler_output, output)
        else:
            moved = self.kv_manager.touched()
            self._compute_again([request for request in self.requests.values() if request.request_id in moved])
        if self._siblings:
            self._start_siblings()
        if marked:
            settled = {request.request_id for request in changed}
            changed += [request for request in marked if request.request_id not in settled]
        for request in [request for request in changed if request.to_finish is not None]:
            self._finish(request)
        return changed

    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]:
        """Mark unfinished requests to end with `reason` at the next update. Return the marked ids."""
        known = [self.requests[request_id] for request_id in request_ids if request_id in self.requests]
        marked = {request.request_id: request for request in known if self.updater.mark(request, reason)}
        self._marked |= marked
        return list(marked)

    def reset(self, reason: BaseFinishReason) -> None:
        """End all requests with `reason`, outside a step. Afterwards the queues are empty and all blocks are free."""
        requests, self.requests = self.requests, {}
        self.waiting.clear()
        self.running = []
        self.finished_req_ids, self._left_out, self._siblings, self._marked = set(), set(), {}, {}
        self.kv_manager.reset()
        for request in requests.values():
            self.updater.end(request, reason)

    def check_invariants(self) -> None:
        """Raise AssertionError if queues and memory contradict each other; tests call this after every step."""
        assert len(self.running) <= self.max_num_seqs
        check_queues(self.requests, self.running, list(self.waiting))
        check_memory(self.running, self.waiting, self.kv_manager)

    # --- phases of schedule -------------------------------------------------------------------------------------------

    def _in_need(self, running: list[Request]) -> dict[str, int]:
        """Return the running requests whose next token may need a block, and their length with it, in tokens."""
        return dict(self.kv_manager.in_need([(r.request_id, r.sequence.num_computed_tokens + 1) for r in running]))

    def _make_room(self, running: list[Request]) -> dict[str, int]:
        """Preempt requests, and remove them from `running`, until the free blocks suffice for the others' next tokens.

        Return the remaining requests that need a block, as `_in_need`.
        """
        kv_manager = self.kv_manager
        while in_need := self._in_need(running):
            needed = kv_manager.num_needed_together(in_need.items())
            if needed <= kv_manager.num_free:
                break
            if len(running) == 1:
                if len(self.running) == 1:  # if others run, they end now, and the update frees their blocks
                    self._give_up(running.pop())
                break
            victim = victim_of(self.preemption, running)
            running.remove(victim)
            preempt(victim, kv_manager, swap=self.swaps, needed=needed, tracer=self.tracer)
            self._send_back(victim)
            self.num_preemptions += 1
        return in_need

    def _continue(self, requests: list[Request], plan: StepPlan, in_need: Mapping[str, int]) -> None:
        """Schedule the next token of running requests, while budget and blocks last. Most need no block for it."""
        kv_manager, decodes, new_block_ids = self.kv_manager, [], {}
        for request in requests[: max(0, plan.budget_left)]:
            request_id = request.request_id
            if request_id in in_need:
                if not kv_manager.can_hold(request_id, in_need[request_id]):
                    continue  # until the update frees the blocks of ending requests
                new_block_ids[request_id] = kv_manager.reserve(request_id, in_need[request_id])
            if request.is_sent:
                decodes.append(request)
            else:
                plan.add_full(request, kv_manager.block_ids(request_id))
        plan.add_decodes(decodes, new_block_ids)

    def _admit(self, plan: StepPlan) -> None:
        """Admit waiting requests. One that is marked to finish only leaves the queue; the update ends it."""
        while self.waiting:
            request = self.waiting.peek_request()
            num_blocks = self.kv_manager.blocks_for(request.sequence.get_len())
            if request.to_finish is None and num_blocks > self.kv_manager.num_blocks:
                self._give_up(request)
            if request.to_finish is not None:
                self.waiting.pop_request()
                continue
            way = self.admission.way_in(request, self.running, plan)
            if self.admission.is_refused(request, way, self.running, plan, num_waiting=len(self.waiting)):
                return
            self._start(request, way, plan)

    def _start(self, request: Request, way: WayIn, plan: StepPlan) -> None:
        """Move a request from waiting to running, and allocate its blocks."""
        request_id, sequence, kv_manager = request.request_id, request.sequence, self.kv_manager
        self.waiting.pop_request()
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        if way.how == "swap_in":
            kv_manager.swap_in(request_id)
        elif way.source is not None:
            kv_manager.fork(way.source.request_id, request_id, sequence.get_prompt_len() - 1)
            if way.is_ready:
                sequence.num_computed_tokens = sequence.get_prompt_len() - 1
            else:
                self._siblings.setdefault(way.source.request_id, []).append(request)
        if way.num_tokens:
            kv_manager.reserve(request_id, sequence.get_len())
            plan.add_full(request, kv_manager.block_ids(request_id))
        self.tracer.emit(Admit.of, self, request, way)

    def _note_left_out(self, plan: StepPlan) -> None:
        """Store the running requests without a token in this step, because budget or blocks were used up."""
        self._left_out = set()
        if len(plan.num_scheduled_tokens) == len(self.running):
            return
        served = {*plan.num_scheduled_tokens, *(r.request_id for siblings in self._siblings.values() for r in siblings)}
        left = [r.request_id for r in self.running if r.to_finish is None and r.request_id not in served]
        self._left_out = set(left)
        if left:
            limit, available = "max_num_batched_tokens", self.max_num_batched_tokens
            if plan.budget_left > 0:
                limit, available = "blocks", self.kv_manager.num_free
            self.tracer.emit(LeftOut, rids=tuple(left), limit=limit, available=available)

    # --- parts of update ----------------------------------------------------------------------------------------------

    def _commit(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> list[Request]:
        """Append the new tokens; return the requests that have one."""
        requests = [self.requests[request_id] for request_id in output.req_ids]
        others: Iterable[int] = range(len(requests))
        num_cached, counts = len(scheduler_output.scheduled_cached_reqs.req_ids), scheduler_output.num_scheduled_tokens
        if num_cached == len(counts):  # decodes only: one new KV for each
            others = self.updater.commit_simply(requests, [token_ids[0] for token_ids in output.sampled_token_ids])
        for index in others:
            request = requests[index]
            if request.to_finish is None:
                sampled = SampledTokens(
                    tuple(output.sampled_token_ids[index]),
                    tuple(output.logprobs[index]),
                    output.prompt_logprobs.get(request.request_id),
                )
                self.updater.commit(request, sampled, num_new_kv=counts[request.request_id])
        return requests

    def _start_siblings(self) -> None:
        """Start the siblings that wait for a prompt of this step. If that prompt has no KV (the step or the source
        failed, or the source was aborted), queue them again."""
        for source_id, requests in self._siblings.items():
            source = self.requests[source_id]
            if source.sequence.num_computed_tokens:
                for request in requests:
                    request.sequence.num_computed_tokens = request.sequence.get_prompt_len() - 1
            else:
                self._compute_again(requests)
        self._siblings = {}

    def _finish(self, request: Request) -> None:
        """Remove a request and free its blocks. The last stage of the step removes the runner's state of it."""
        assert request.to_finish is not None
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove_requests([request])
        self.kv_manager.release(request.request_id)
        self.finished_req_ids.add(request.request_id)
        self._marked.pop(request.request_id, None)
        del self.requests[request.request_id]
        self.updater.end(request, request.to_finish)

    # --- back to the queue --------------------------------------------------------------------------------------------

    def _give_up(self, request: Request) -> None:
        """Mark a request that needs more than all blocks to end with `KVCapacityError`."""
        num_tokens, kv_manager = request.sequence.get_len(), self.kv_manager
        error = KVCapacityError(
            f"request {shown(request.request_id)} has grown to {num_tokens} tokens, which need "
            f"{kv_manager.blocks_for(num_tokens)} blocks of {kv_manager.block_size} tokens; the KV memory has "
            f"{kv_manager.num_blocks}: give it more, or ask for fewer tokens"
        )
        self.finish_requests([request.request_id], FinishError(error))

    def _send_back(self, request: Request) -> None:
        """Move a request back to the waiting queue as preempted."""
        request.status = RequestStatus.PREEMPTED
        request.is_sent = False
        if request in self.running:
            self.running.remove(request)
        self.waiting.remove_requests([request])
        self.waiting.add_request(request)

    def _compute_again(self, requests: Iterable[Request]) -> None:
        """Free the blocks of requests whose KV is unknown, and queue them again; this does not count as preemption."""
        for request in requests:
            if request.to_finish is None:
                self.kv_manager.release(request.request_id)
                request.sequence.num_computed_tokens = 0
                self._send_back(request)
