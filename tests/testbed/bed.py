"""A scheduler on a test-bed: schedule, run the fake model, update, and check everything, thousands of steps a second.

    bed = make_bed(max_num_seqs=2)
    bed.add(9, max_tokens=3)             # a prompt of 9 tokens
    bed.step()
    bed.drain()                          # every request has said exactly what it had to, and nothing is left

A step does what the engine core's does, in the same order. `SchedulerBed` takes any scheduler that has the two verbs:
`make_bed` builds the one of m2, or another class with the same constructor; a milestone whose scheduler is built
differently builds it itself and hands it over, with its own `rows_of` and `MessageChecks` where its messages differ.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from m1_single_request import SamplingParams, Tracer
from m1_single_request.request import FinishAbort, FinishError, Request
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m2_continuous_batching.config import SchedulerConfig
from m2_continuous_batching.kv_manager import SlotManager
from m2_continuous_batching.scheduler import Scheduler
from tests.support.engines import Recorder
from tests.testbed.checks import MessageChecks
from tests.testbed.fakes import EOS, FakeRunner, Row, make_request, rows_of


@dataclass(frozen=True)
class Step:
    """What happened in one step."""

    output: Any
    """The scheduler's decision; None: there was nothing to compute."""
    changed: list[str]
    """The requests that the update named, in its order."""
    ended: dict[str, str]
    """Those among them that ended, and why."""

    @property
    def counts(self) -> dict[str, int]:
        """Scheduled tokens by request id."""
        return dict(self.output.num_scheduled_tokens) if self.output is not None else {}

    @property
    def joined(self) -> list[str]:
        return [data.req_id for data in self.output.scheduled_new_reqs] if self.output is not None else []


class SchedulerBed:
    """One scheduler, the fake model, and a judge of every message between them."""

    many_steps = 20_000

    def __init__(
        self,
        scheduler: Any,
        *,
        checks: Any,
        runner: Any = None,
        rows_of: Callable[[Any], list[Row]] = rows_of,
        request_class: type[Request] = Request,
        recorder: Recorder | None = None,
    ) -> None:
        """Without `checks` nothing is judged: for requests of which the fake model knows too little."""
        self.scheduler = scheduler
        self.checks = checks
        self.runner = runner or FakeRunner()
        self.rows_of = rows_of
        self.request_class = request_class
        self.recorder = recorder
        self.requests: dict[str, Request] = {}  # all that ever arrived, in order of arrival
        self.steps: list[Step] = []
        self.ended: dict[str, str] = {}

    def add(
        self, prompt: int | Sequence[int], max_tokens: int = 4, *, request_id: str | None = None, **params: Any
    ) -> str:
        """Let a request arrive. A number makes a prompt of so many tokens, different from all others."""
        prompt, rid = self.named(prompt, request_id)
        settings = SamplingParams(max_tokens=max_tokens, **params)
        request = make_request(rid, prompt, settings, request_class=self.request_class)
        self.scheduler.add_request(request)
        self.requests[rid] = request
        if self.checks:
            self.checks.added(request)
        return rid

    def num_arrived(self) -> int:
        """The number of requests that callers have added."""
        return len(self.requests)

    def named(self, prompt: int | Sequence[int], request_id: str | None) -> tuple[list[int], str]:
        """The tokens of a prompt, and the id of its request."""
        number = self.num_arrived()
        if isinstance(prompt, int):
            prompt = [33 + (number * 7 + place) % 90 for place in range(prompt)]
        return list(prompt), f"r{number}" if request_id is None else request_id

    def abort(self, *request_ids: str) -> list[str]:
        """Give requests up. Returns the ids that were marked."""
        return self._mark(request_ids, FinishAbort())

    def fail(self, request_ids: Iterable[str], error: Exception) -> list[str]:
        """Let requests fail, as the engine core does if the model raised. Returns the ids that were marked."""
        return self._mark(list(request_ids), FinishError(error))

    def schedule(self) -> Any:
        """The first verb alone."""
        output = self.scheduler.schedule()
        if self.checks:
            self.checks.scheduled(output)
        return output

    def decision_of(self, output: Any) -> Any:
        """The record of a decision: the scheduler's output itself, if it does not change afterwards."""
        return output

    def execute(self, output: Any) -> dict[str, SampledTokens]:
        """Run a decision; returns the new tokens by request id."""
        said = self.runner.run(self.rows_of(output))
        return {rid: SampledTokens((tokens[-1],), (None,)) for rid, tokens in said.items()}

    def result_of(self, sampled: dict[str, SampledTokens] | None) -> Any:
        """What the scheduler takes as a step's result; None: the model did not run, or raised."""
        return sampled or {}

    def update(self, output: Any, sampled: dict[str, SampledTokens] | None, decision: Any = None) -> Step:
        """The second verb, and the release that follows it. `decision`: the record of the decision, if there is one."""
        decision = decision or self.decision_of(output)
        if self.checks:
            self.checks.nothing_is_freed()
        changed = self.scheduler.update_from_output(output, self.result_of(sampled))
        ended = {r.request_id: r.finish_reason.reason for r in changed if r.finish_reason is not None}
        if self.checks:
            assert self.checks.updated(sampled or {}, changed) == ended
        self.scheduler.check_invariants()
        self.release()
        if self.checks:
            self.check_kv()
        self.ended |= ended
        assert len(self.steps) < self.many_steps, "a test of so many steps goes in circles"
        self.steps.append(Step(decision, [request.request_id for request in changed], ended))
        return self.steps[-1]

    def check_kv(self) -> None:
        """Compare the runner's KV with the tokens of the requests that run."""
        for rid, life in self.checks.running.items():
            assert self.runner.num_kv_tokens(rid) >= life.num_kv

    def release(self) -> None:
        """Remove the runner's state of the requests that the scheduler has ended."""
        for rid in self.runner.held_request_ids():
            if rid not in self.scheduler.requests:
                self.runner.free_request_cache(rid)

    def step(
        self, *, between: Callable[[Any], object] | None = None, failing: Collection[str] = (), crash: bool = False
    ) -> Step:
        """One step. `between` is called with the decision when the model has run, as a trace reader may be.

        `failing` requests get no token but an error; with `crash` the model raises and all of the step fail.
        """
        if self.recorder:
            self.scheduler.tracer.step += 1
        output = self.schedule()
        decision = self.decision_of(output)
        scheduled = {} if output is None else decision.num_scheduled_tokens
        sampled = None if crash or output is None else self.execute(output)
        if crash:
            self.fail(scheduled, RuntimeError("the model crashed"))
        failed = [rid for rid in failing if sampled is not None and rid in scheduled]
        for rid in failed:
            sampled.pop(rid, None)
        self.fail(failed, ValueError("no token can be sampled"))
        if between:
            between(decision)
        return self.update(output, sampled, decision)

    def drain(self, *, limit: int | None = None) -> dict[str, str]:
        """Step until nothing is left; returns why each request ended, in the order of the ends."""
        for _ in range(limit or self.many_steps):
            if not self.scheduler.requests:
                break
            self.step()
        assert not self.scheduler.requests, f"not done after {len(self.steps)} steps"
        if self.checks:
            self.checks.nothing_is_left()
        self.scheduler.check_invariants()
        self.release()
        assert self.runner.is_empty()
        return self.ended

    def said(self, request_id: str) -> tuple[int, ...]:
        """The output of a request so far."""
        return tuple(self.requests[request_id].sequence.output_token_ids)

    def error_of(self, request_id: str) -> BaseException:
        """The error of a failed request."""
        return self.requests[request_id].finish_reason.error  # type: ignore[union-attr,no-any-return]

    @property
    def memory(self) -> Any:
        """What preempts a request if a victim is `due`: m2's memory never does."""
        return SimpleNamespace(relax=lambda: None)

    def flush(self) -> None:
        """Forget what is cached, as the engine does when it is idle: m2 and m3 cache nothing."""

    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    def waiting(self) -> list[str]:
        return [request.request_id for request in self.scheduler.waiting]

    def events(self, *kinds: str) -> list[Any]:
        """The events of the trace so far, of some kinds or of all; the bed must have been made with `trace=True`."""
        assert self.recorder is not None
        events = [record.event for record in self.recorder.records]
        return [event for event in events if not kinds or event.kind in kinds]

    def _mark(self, request_ids: Collection[str], reason: Any) -> list[str]:
        marked: list[str] = self.scheduler.finish_requests(request_ids, reason)
        if self.checks:
            self.checks.marked(request_ids, marked)
        return marked


def make_bed(
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int | None = None,
    max_model_len: int = 256,
    scheduler_class: Callable[..., Any] = Scheduler,
    kv_manager_class: Callable[..., Any] = SlotManager,
    trace: bool = False,
    checked: bool = True,
) -> SchedulerBed:
    """m2's scheduler on a bed, or another scheduler or KV manager that is built in the same way."""
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    config = config.resolved(max_model_len)
    tracer = Tracer()
    scheduler = scheduler_class(
        scheduler_config=config,
        kv_manager=kv_manager_class(max_num_seqs=max_num_seqs, max_model_len=max_model_len),
        stop_checker=StopChecker(eos_token_ids={EOS}, max_model_len=max_model_len),
        tracer=tracer,
    )
    assert config.max_num_batched_tokens is not None
    checks = MessageChecks(
        scheduler,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    return SchedulerBed(scheduler, checks=checks if checked else None, recorder=Recorder(tracer) if trace else None)
