"""Typical mistakes in a scheduler, each with the hint that it must get."""

from collections.abc import Mapping

from m1_single_request.request import BaseFinishReason, Request, RequestStatus
from m1_single_request.sampler import SampledTokens
from m2_continuous_batching.scheduler import Scheduler
from m2_continuous_batching.scheduler_output import SchedulerOutput
from m2_continuous_batching.step_plan import StepPlan


class Starves(Scheduler):
    """New prompts come first at every step."""

    def schedule(self) -> SchedulerOutput | None:
        self._left_out = []
        return super().schedule()


class Overtakes(Scheduler):
    """A request that does not fit is passed over."""

    def _admit(self, plan: StepPlan) -> None:
        super()._admit(plan)
        for request in list(self.waiting):
            num_tokens = request.sequence.get_prompt_len()
            if request.to_finish is None and self._refusal(request, num_tokens, plan) is None:
                self.waiting.remove(request)
                self.running.append(request)
                request.status = RequestStatus.RUNNING
                plan.add_prefill(request, self.kv_manager.reserve(request.request_id, num_tokens))


class DecodesForFree(Scheduler):
    """A decode takes nothing of the budget."""

    def _continue(self, request: Request, plan: StepPlan) -> None:
        total = request.sequence.num_computed_tokens + 1
        plan.add_decode(request, self.kv_manager.reserve(request.request_id, total))


class OneTokenPerStep(Scheduler):
    """A step computes the KV of one token, also if it is a prompt."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput | None, sampled: Mapping[str, SampledTokens]
    ) -> list[Request]:
        if scheduler_output is not None:
            for request_id in scheduler_output.num_scheduled_tokens:
                scheduler_output.num_scheduled_tokens[request_id] = 1
        return super().update_from_output(scheduler_output, sampled)

    def check_invariants(self) -> None:
        """Nothing: the first decode shows it."""


class FreesWithTheNextDecision(Scheduler):
    """The memory of a request is free when the next decision announces its end."""

    def schedule(self) -> SchedulerOutput | None:
        for request_id in self.finished_req_ids:
            self.kv_manager.release(request_id)
        return super().schedule()

    def _finish(self, request: Request, reason: BaseFinishReason) -> None:
        release, self.kv_manager.release = self.kv_manager.release, lambda request_id: None  # type: ignore[method-assign]
        super()._finish(request, reason)
        self.kv_manager.release = release  # type: ignore[method-assign]

    def check_invariants(self) -> None:
        """Nothing: it would notice at once."""


class AnnouncesNothingTwice(Scheduler):
    """The set of ended requests is emptied also when there is no decision."""

    def schedule(self) -> SchedulerOutput | None:
        output = super().schedule()
        self.finished_req_ids = set()
        return output


class AnnouncesAgain(Scheduler):
    """The set of ended requests is never emptied."""

    def schedule(self) -> SchedulerOutput | None:
        ended = set(self.finished_req_ids)
        output = super().schedule()
        self.finished_req_ids |= ended
        return output


class ForgetsTheQueue(Scheduler):
    """The update ends requests that run, and no others."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput | None, sampled: Mapping[str, SampledTokens]
    ) -> list[Request]:
        marked, running = self._marked, [request.request_id for request in self.running]
        self._marked = {request_id: request for request_id, request in marked.items() if request_id in running}
        for request_id in marked.keys() - self._marked.keys():
            if marked[request_id] not in self.waiting:
                self.waiting.appendleft(marked[request_id])
        return super().update_from_output(scheduler_output, sampled)


class AsksNoMemory(Scheduler):
    """A running request needs no memory."""

    def _continue(self, request: Request, plan: StepPlan) -> None:
        if plan.budget_left:
            total = request.sequence.num_computed_tokens + 1
            plan.add_decode(request, self.kv_manager.reserve(request.request_id, total))


class LetsOthersIn(Scheduler):
    """New requests join while one that was left out has no memory."""

    def schedule(self) -> SchedulerOutput | None:
        totals = {rid: self.requests[rid].sequence.num_computed_tokens + 1 for rid in self._left_out}
        self._left_out = [rid for rid, total in totals.items() if self.kv_manager.can_hold(rid, total)]
        return super().schedule()


class CommitsLast(Scheduler):
    """A request that is aborted while the model runs keeps its last tokens."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput | None, sampled: Mapping[str, SampledTokens]
    ) -> list[Request]:
        for request in self.running:
            if request.to_finish is not None and scheduler_output is not None and request.request_id in sampled:
                num_new_kv = scheduler_output.num_scheduled_tokens[request.request_id]
                self.updater.commit(request, sampled[request.request_id], num_new_kv=num_new_kv)
        return super().update_from_output(scheduler_output, sampled)


WRONG = [
    (Starves, "r1 got nothing in the last step"),
    (Overtakes, "r2 would fit, but r1 came first"),
    (DecodesForFree, "A running request takes a token of the budget"),
    (OneTokenPerStep, "after a prefill the whole prompt"),
    (FreesWithTheNextDecision, "Memory is released in the update"),
    (AnnouncesNothingTwice, "Empty the set only if a decision is returned"),
    (AnnouncesAgain, "Empty the set only if a decision is returned"),
    (ForgetsTheQueue, "The update ends it all the same"),
    (AsksNoMemory, "Ask `can_hold` for a running request, too"),
    (LetsOthersIn, "What r2 would take is what r1 waits for"),
    (CommitsLast, "ends without its tokens of this step"),
]
