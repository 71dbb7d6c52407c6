"""A scheduler below `RequestFamilies`, as in the engine core: requests of several children, and their outputs."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from m1_single_request import SamplingParams
from m1_single_request.sampler import SampledTokens
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.parallel_sampling import RequestFamilies
from m3_paged_attention.request import ParentRequest
from tests.testbed.bed import SchedulerBed, Step
from tests.testbed.fakes import make_request


class FamiliesBed(SchedulerBed):
    """Below `families` the bed knows children only: those of `rid` are called `rid/0` and so on."""

    many_steps = 3000

    def __init__(self, scheduler: Any, **settings: Any) -> None:
        super().__init__(scheduler, **settings)
        self.families = RequestFamilies(scheduler=scheduler, tracer=scheduler.tracer)
        self.parents: dict[str, ParentRequest] = {}
        self.reported: list[list[str]] = []  # in each step, the requests that callers receive an output of
        self.reported_ends: list[str] = []

    def num_arrived(self) -> int:
        return len({(request.parent_id or rid) for rid, request in self.requests.items()})  # type: ignore[attr-defined]

    def children(self, rid: str, prompt: list[int], settings: SamplingParams, *, n: int, seed: int) -> list[Any]:
        """`n` requests as intake makes them; one has the id `rid` itself."""
        others = replace(settings, prompt_logprobs=None)
        ids = [rid] if n == 1 else [f"{rid}/{i}" for i in range(n)]
        return [
            make_request(one, prompt, others if i else settings, request_class=self.request_class, seed=seed + i)
            for i, one in enumerate(ids)
        ]

    def submit(self, rid: str, children: list[Any]) -> str:
        """Let a request arrive; returns its id."""
        request = children[0]
        if len(children) > 1:
            request = self.parents[rid] = ParentRequest(children, request_id=rid)
        self.requests |= {child.request_id: child for child in children}
        self.families.add_request(request)
        for child in children:
            if self.checks:
                self.checks.added(child)
        return rid

    def result_of(self, sampled: dict[str, SampledTokens] | None) -> ModelRunnerOutput | None:
        if sampled is None:
            return None
        prompt_logprobs = {rid: one.prompt_logprobs for rid, one in sampled.items() if one.prompt_logprobs is not None}
        return ModelRunnerOutput(
            req_ids=list(sampled),
            sampled_token_ids=[list(one.token_ids) for one in sampled.values()],
            logprobs=[one.logprobs for one in sampled.values()],
            prompt_logprobs=prompt_logprobs,
        )

    def update(self, output: Any, sampled: dict[str, SampledTokens] | None, decision: Any = None) -> Step:
        step = super().update(output, sampled, decision)
        reported = self.families.reported([self.requests[rid] for rid in step.changed])  # type: ignore[misc]
        self.reported.append([request.request_id for request in reported])
        self.reported_ends += [request.request_id for request in reported if request.is_finished]
        return step

    def _mark(self, request_ids: Collection[str], reason: Any) -> list[str]:
        children = {rid: [child.request_id for child in parent.children] for rid, parent in self.parents.items()}
        ids = list(dict.fromkeys(one for rid in request_ids for one in children.get(rid, [rid])))
        before = {rid for rid in ids if rid in self.scheduler.requests and self.requests[rid].to_finish is None}
        marked = self.families.finish_requests(request_ids, reason)
        if self.checks:
            self.checks.marked(ids, [rid for rid in ids if rid in before and self.requests[rid].to_finish is not None])
        return marked
