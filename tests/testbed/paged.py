"""The test-bed for a scheduler of blocks: tiny pools, forks, swaps, and the oracle that reads every slot.

    bed = make_paged_bed(num_blocks=3, block_size=4)
    bed.add(9, max_tokens=3)             # a prompt of 9 tokens
    bed.add(5, n=2)                      # two continuations, r1/0 and r1/1
    bed.drain()

Requests come in and go out through `RequestFamilies`, as in the engine core; below it the bed knows children only.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from m1_single_request import SamplingParams, Tracer
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m3_paged_attention.config import SchedulerConfig
from m3_paged_attention.kv_cache_config import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.parallel_sampling import RequestFamilies
from m3_paged_attention.preemption import FewestOutputsFirst
from m3_paged_attention.request import ParentRequest, Request
from m3_paged_attention.scheduler import Scheduler
from m3_paged_attention.scheduler_output import SchedulerOutput
from tests.support.engines import Recorder
from tests.testbed.bed import SchedulerBed, Step
from tests.testbed.fakes import EOS, make_request
from tests.testbed.paged_checks import PagedChecks
from tests.testbed.paged_runner import PagedRunner

MANY_STEPS = 3000


class PagedBed(SchedulerBed):
    """m3's scheduler below its `RequestFamilies`, on simulated memory."""

    def __init__(self, scheduler: Scheduler, **settings: Any) -> None:
        super().__init__(scheduler, request_class=Request, **settings)
        self.families = RequestFamilies(scheduler=scheduler, tracer=scheduler.tracer)
        self.parents: dict[str, ParentRequest] = {}
        self.reported: list[list[str]] = []  # in each step, whom callers hear of
        self.reported_ends: list[str] = []

    def add(
        self,
        prompt: int | Sequence[int],
        max_tokens: int = 4,
        *,
        n: int = 1,
        request_id: str | None = None,
        seed: int = 0,
        **params: Any,
    ) -> str:
        """Let a request arrive; with `n` > 1 its children are called `request_id/0` and so on."""
        number = len({(request.parent_id or rid) for rid, request in self.requests.items()})
        if isinstance(prompt, int):
            prompt = [33 + (number * 7 + place) % 90 for place in range(prompt)]
        rid = f"r{number}" if request_id is None else request_id
        settings = SamplingParams(max_tokens=max_tokens, **params)
        if n == 1:
            request: Any = make_request(rid, prompt, settings, request_class=Request, seed=seed)
            own = [request]
        else:  # as intake makes them
            others = replace(settings, prompt_logprobs=None)
            own = [
                make_request(f"{rid}/{i}", prompt, others if i else settings, request_class=Request, seed=seed + i)
                for i in range(n)
            ]
            request = self.parents[rid] = ParentRequest(own, request_id=rid)
        for one in own:
            self.requests[one.request_id] = one
        self.families.add_request(request)
        for one in own:
            if self.checks:
                self.checks.added(one)
        return rid

    def execute(self, output: SchedulerOutput) -> dict[str, SampledTokens]:
        return self.runner.run(output)

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

    def update(self, output: Any, sampled: dict[str, SampledTokens] | None) -> Step:
        step = super().update(output, sampled)
        assert len(self.steps) < MANY_STEPS, "a test of so many steps goes in circles"
        reported = self.families.reported([self.requests[rid] for rid in step.changed])
        self.reported.append([request.request_id for request in reported])
        self.reported_ends += [request.request_id for request in reported if request.is_finished]
        self.runner.poison_free_blocks()
        return step

    def preempted(self) -> list[str]:
        """Who waits after having run."""
        return [request.request_id for request in self.scheduler.waiting if request.status.value == "preempted"]

    def _mark(self, request_ids: Collection[str], reason: Any) -> list[str]:
        children = {rid: [child.request_id for child in parent.children] for rid, parent in self.parents.items()}
        ids = list(dict.fromkeys(one for rid in request_ids for one in children.get(rid, [rid])))
        before = {rid for rid in ids if rid in self.scheduler.requests and self.requests[rid].to_finish is None}
        marked = self.families.finish_requests(request_ids, reason)
        if self.checks:
            self.checks.marked(ids, [rid for rid in ids if rid in before and self.requests[rid].to_finish is not None])
        return marked


class Squeezed(KVCacheManager):
    """Says, when told to, that more blocks are needed than are free: once for each victim that is `due`."""

    due = 0
    num_forced = 0
    _is_short = False

    def in_need(self, lengths: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        lengths = list(lengths)
        if not self.due or len(lengths) < 2:
            self.due = 0
            return super().in_need(lengths)
        self.due, self.num_forced, self._is_short = self.due - 1, self.num_forced + 1, True
        return lengths

    def num_needed_together(self, lengths: Iterable[tuple[str, int]]) -> int:
        if self._is_short:
            self._is_short = False
            return self.num_blocks + 1
        return super().num_needed_together(lengths)


def make_paged_bed(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int | None = None,
    max_model_len: int = 256,
    swap: bool = False,
    num_host_blocks: int | None = None,
    preemption: Any = None,
    scheduler_class: Callable[..., Scheduler] = Scheduler,
    kv_manager_class: Callable[..., Any] = KVCacheManager,
    trace: bool = False,
    checked: bool = True,
    tensors: bool = False,
) -> PagedBed:
    """m3's scheduler on a bed. With `swap` the host has as many blocks as the device, unless told otherwise."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        preemption_mode="swap" if swap else "recompute",
    ).resolved(max_model_len)
    assert config.max_num_batched_tokens is not None
    spec = KVCacheSpec(block_size=block_size, num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    num_host_blocks = (num_blocks if num_host_blocks is None else num_host_blocks) if swap else 0
    kv_cache_config = KVCacheConfig(spec=spec, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    tracer = Tracer()
    kv_manager = kv_manager_class(kv_cache_config=kv_cache_config, tracer=tracer)
    scheduler = scheduler_class(
        scheduler_config=config,
        kv_manager=kv_manager,
        preemption=preemption or FewestOutputsFirst(),
        stop_checker=StopChecker(eos_token_ids={EOS}, max_model_len=max_model_len),
        tracer=tracer,
    )
    limits: dict[str, int] = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    checks: Any = PagedChecks(scheduler, max_num_batched_tokens=config.max_num_batched_tokens, **limits)
    return PagedBed(
        scheduler,
        checks=checks if checked else None,
        runner=PagedRunner(kv_manager, num_host_blocks=num_host_blocks, tensors=tensors, **limits),
        recorder=Recorder(tracer) if trace else None,
    )
