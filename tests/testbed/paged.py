"""The test-bed for a scheduler of blocks: tiny pools, forks, swaps, and the oracle that reads every slot.

    bed = make_paged_bed(num_blocks=3, block_size=4)
    bed.add(9, max_tokens=3)             # a prompt of 9 tokens
    bed.add(5, n=2)                      # two continuations, r1/0 and r1/1
    bed.drain()

Requests come in and go out through `RequestFamilies`, as in the engine core; below it the bed knows children only.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from m1_single_request import SamplingParams, Tracer
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m3_paged_attention.config import SchedulerConfig
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.preemption import FewestOutputsFirst
from m3_paged_attention.request import Request
from m3_paged_attention.scheduler import Scheduler
from m3_paged_attention.scheduler_output import SchedulerOutput
from tests.support.engines import Recorder
from tests.testbed.bed import Step
from tests.testbed.fakes import EOS
from tests.testbed.families import FamiliesBed
from tests.testbed.paged_checks import PagedChecks
from tests.testbed.paged_runner import PagedRunner


class PagedBed(FamiliesBed):
    """m3's scheduler below its `RequestFamilies`, on simulated memory."""

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
        prompt, rid = self.named(prompt, request_id)
        settings = SamplingParams(max_tokens=max_tokens, **params)
        return self.submit(rid, self.children(rid, prompt, settings, n=n, seed=seed))

    def execute(self, output: SchedulerOutput) -> dict[str, SampledTokens]:
        return self.runner.run(output)

    def update(self, output: Any, sampled: dict[str, SampledTokens] | None, decision: Any = None) -> Step:
        step = super().update(output, sampled, decision)
        self.runner.poison_free_blocks()
        return step

    @property
    def memory(self) -> Any:
        """The KV manager; `Squeezed` preempts if a victim is due."""
        return self.scheduler.kv_manager

    def preempted(self) -> list[str]:
        """The waiting requests that ran before."""
        return [request.request_id for request in self.scheduler.waiting if request.status.value == "preempted"]


class Squeezed(KVCacheManager):
    """Needs more blocks than are free, once for each victim that is `due`."""

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

    def relax(self) -> None:
        """No victim is due any more."""
        self.due = 0


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
        request_class=Request,
        checks=checks if checked else None,
        runner=PagedRunner(kv_manager, num_host_blocks=num_host_blocks, tensors=tensors, **limits),
        recorder=Recorder(tracer) if trace else None,
    )
