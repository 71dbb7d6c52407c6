"""Scheduler whose steps hold decodes, drafts and pieces of prompts together.

In m4 a step ran whole prompts, or gave every running request a token. Here the two decisions are handed on: the batch
composer fills the step (`batch_composer.py`), and the result processor commits it (`result_processor.py`). The verbs,
intake and ends are m4's. A prompt that was cut continues in the next steps, before other prompts start. It gets no
token before its last piece, but the KV of its pieces is in the cache. A request with drafts may get several tokens; the
slots of wrong drafts are freed. SGLang: `Scheduler.get_next_batch_to_run` with `chunked_req`; vLLM V1:
`Scheduler.schedule`.
"""

from typing import Any

import torch

from m1_single_request.request import BaseFinishReason
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.preemption import FewestOutputsFirst
from m4_radix_cache.invariants import check_scheduler
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_batch import Pools, ScheduleBatch as PlainScheduleBatch
from m4_radix_cache.scheduler import Scheduler as RadixScheduler
from m5_chunked_prefill_spec.batch_composer import DecodeFirst, PrefillFirst, PromptState, Work
from m5_chunked_prefill_spec.config import SchedulerConfig
from m5_chunked_prefill_spec.events import Batch
from m5_chunked_prefill_spec.outputs import EngineStats
from m5_chunked_prefill_spec.result_processor import ResultProcessor
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from m5_chunked_prefill_spec.schedule_policy import SchedulePolicy
from m5_chunked_prefill_spec.speculative.speculation import Speculation


class Scheduler(RadixScheduler):
    """m4's scheduler with other decisions: `get_next_batch_to_run` and `process_batch_result`.

    `counters` adds those of speculation, `leave` and `reset` also delete the state of
    prompts, and `in_batches` and `check_invariants` take account of the request in pieces.
    """

    batch_class = ScheduleBatch
    batch_event = Batch
    stats_class = EngineStats
    nothing_runs = "the parts 'schedule_policy', 'prefill_adder' and 'composer' let no request run"

    def __init__(
        self,
        *,
        scheduler_config: SchedulerConfig,
        pools: Pools,
        policy: SchedulePolicy,
        prefill_adder: Any,
        composer: DecodeFirst | PrefillFirst,
        speculation: Speculation,
        chunk_alignment: int,
        preemption: FewestOutputsFirst,
        stop_checker: StopChecker,
        vocab_size: int,
        device: torch.device,
        tracer: Tracer,
    ) -> None:
        """`composer`: its `compose(work)` returns the batch of a step. `chunk_alignment`: a prompt may be cut at its
        multiples."""
        super().__init__(
            scheduler_config=scheduler_config,
            pools=pools,
            policy=policy,
            prefill_adder=prefill_adder,
            preemption=preemption,
            stop_checker=stop_checker,
            vocab_size=vocab_size,
            device=device,
            tracer=tracer,
        )
        self.composer, self.speculation = composer, speculation
        self.cuts = {
            "chunk_alignment": chunk_alignment,
            "is_chunked": scheduler_config.enable_chunked_prefill,
            "rem_chunk_tokens": scheduler_config.chunked_prefill_size,
        }
        self.prompts = PromptState()
        self.results = ResultProcessor(
            updater=self.updater, speculation=speculation, tree_cache=self.tree_cache, tracer=self.tracer
        )

    @property
    def chunked_req(self) -> Req | None:
        """The request whose prompt is in pieces."""
        return self.prompts.chunked_req

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Return the batch that the composer fills. Requests that got their first token in the last step join the
        running batch first."""
        self.merge_last_batch()
        self.prompts.check_chunked()
        work = Work(self, self.prompts, speculation=self.speculation, cuts=self.cuts)
        return self.composer.compose(work)

    def process_batch_result(self, batch: PlainScheduleBatch, output: ModelRunnerOutput) -> list[Req]:
        """Give the requests of a batch their tokens, and free the slots of wrong drafts. Return those with a token."""
        assert isinstance(batch, ScheduleBatch)
        return self.results.process(batch, output)

    def counters(self) -> dict[str, Any]:
        """Return the totals that `EngineStats` has besides m1's, by field."""
        return super().counters() | self.speculation.totals

    def in_batches(self) -> list[Req]:
        """Return the running requests that are in a batch, between two steps, less the one in pieces."""
        return [req for req in super().in_batches() if req is not self.chunked_req]

    def with_rows(self) -> list[Req]:
        """Return the running requests, between two steps."""
        chunked = self.chunked_req
        return self.in_batches() + ([chunked] if chunked is not None and chunked.req_pool_idx is not None else [])

    def check_invariants(self) -> None:
        """Raise AssertionError if queues, batches and memory contradict each other; tests call it after each step."""
        check_scheduler(self, self.waiting_queue, self.with_rows())

    def leave(self, req: Req) -> None:
        """Remove a marked request from the unfinished ones."""
        self.prompts.passed_over.pop(req.rid, None)
        super().leave(req)

    def reset(self, reason: BaseFinishReason) -> None:
        """End all requests with `reason`, outside a step. Afterwards queues and cache are empty, all memory is free."""
        super().reset(reason)
        self.prompts = PromptState()
