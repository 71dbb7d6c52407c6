"""Who runs now, when a step may hold decodes, guesses and pieces of prompts at once.

m4 let prompts in, whole, or gave everybody a token. A step may do the two together now: in which order, and how the
budget is shared, is the composer's to say (`batch_composer.py`). `schedule` and `update_from_output`, which ask for a
decision and commit what came of it, are m4's (`SchedulerBase`). A prompt that is cut goes on in the next step, before
anybody else is let in; until its last piece it gets no token, though what it has computed is in the cache already. What
a request gets may be several tokens; the slots of wrong guesses go back. SGLang: `Scheduler.get_next_batch_to_run` with
`chunked_req`; vLLM V1: `Scheduler.schedule`.
"""

from typing import Any

import torch

from m1_single_request.request import BaseFinishReason, FinishError, RequestStatus
from m1_single_request.stop_checker import StopChecker
from m1_single_request.tracer import Tracer
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.preemption import FewestOutputsFirst
from m4_radix_cache.exchange import Exchange
from m4_radix_cache.invariants import check_scheduler
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_batch import Pools, ScheduleBatch as PlainScheduleBatch
from m4_radix_cache.schedule_policy import SchedulePolicy
from m4_radix_cache.scheduler_base import SchedulerBase
from m5_chunked_prefill_spec.admission import Admission
from m5_chunked_prefill_spec.config import SchedulerConfig
from m5_chunked_prefill_spec.events import Batch
from m5_chunked_prefill_spec.outputs import EngineStats
from m5_chunked_prefill_spec.result_processor import ResultProcessor
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from m5_chunked_prefill_spec.speculative.proposer import InvalidDraftsError


class Scheduler(SchedulerBase):
    """Decides who runs, and with how many tokens, and what a composer asks for; m4's base has the two verbs.

    `reset` forgets the request whose prompt is cut, too; `counters` are also those of speculation.
    """

    batch_class = ScheduleBatch
    stats_class = EngineStats
    nobody_runs = "the parts 'schedule_policy', 'prefill_adder' and 'composer' let nobody run"

    def __init__(
        self,
        *,
        scheduler_config: SchedulerConfig,
        pools: Pools,
        policy: SchedulePolicy,
        prefill_adder: Any,
        composer: Any,
        speculation: Any,
        chunk_alignment: int,
        preemption: FewestOutputsFirst,
        stop_checker: StopChecker,
        vocab_size: int,
        device: torch.device,
        tracer: Tracer,
        exchange: Exchange | None = None,
    ) -> None:
        """`chunk_alignment`: where prompts may be cut (see `PrefillAdder`)."""
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
            exchange=exchange,
        )
        self.composer, self.speculation = composer, speculation
        self.admission = Admission(
            pools=self.pools,
            policy=self.policy,
            prefill_adder=self.prefill_adder,
            new_token_ratio=self.new_token_ratio,
            cuts={
                "chunk_alignment": chunk_alignment,
                "is_chunked": scheduler_config.enable_chunked_prefill,
                "rem_chunk_tokens": scheduler_config.chunked_prefill_size,
            },
            tracer=self.tracer,
        )
        self.results = ResultProcessor(
            updater=self.updater, speculation=speculation, tree_cache=self.tree_cache, tracer=self.tracer
        )
        self.chunked_req: Req | None = None
        """Whoever has a row, and KV of a part of its prompt only. It is in no batch between two of its pieces."""
        self._has_retracted = False  # in the step that is being decided: then nobody is let in

    # --- what decides, and what commits -------------------------------------------------------------------------------

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Whoever got its first token joins those who run; what the step is filled with is the composer's to say."""
        self._has_retracted = False
        self._forget_chunked()
        if self.last_batch is not None:
            goes_on = [
                index
                for index, req in enumerate(self.last_batch.reqs)
                if req.status is RequestStatus.RUNNING
                and req.to_finish is None
                and req is not self.chunked_req
                and not self.exchange.holds(req)
            ]
            self.last_batch.filter_batch(goes_on)
            self.running_batch.merge_batch(self.last_batch)
            self.last_batch = None
        self.running_batch.filter_batch()
        arrived: ScheduleBatch | None = self.exchange.arrived()
        if arrived is not None:
            return arrived
        batch: ScheduleBatch | None = self.composer.compose(self)
        return batch

    def process_batch_result(self, batch: PlainScheduleBatch, output: ModelRunnerOutput) -> list[Req]:
        """Give the requests of a batch their tokens; slots of wrong guesses go back."""
        assert isinstance(batch, ScheduleBatch)
        return self.results.process(batch, output)

    def trace_batch(self, batch: PlainScheduleBatch) -> None:
        """Emit the event about a batch."""
        assert isinstance(batch, ScheduleBatch)
        self.tracer.emit(Batch.of, batch, self)

    # --- what a composer asks for -------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that would get a token from `update_running_batch`."""
        return len(self.running_batch.reqs)

    @property
    def wants_prefill(self) -> bool:
        """Whether a prompt waits, or is computed in part."""
        return self.chunked_req is not None or bool(self.waiting_queue)

    @property
    def prefill_start(self) -> int:
        """Tokens that the prompt that is computed in part has behind it."""
        return 0 if self.chunked_req is None else self.chunked_req.kv_committed_len

    def update_running_batch(self, max_draft_tokens: int) -> ScheduleBatch | None:
        """The running batch, with room for everybody's next token; whoever had to go for that waits again, in front.

        And with guesses, at most so many for all together, if there is room for them.
        """
        batch = self.running_batch
        assert isinstance(batch, ScheduleBatch)
        if batch.is_empty():
            return None
        if batch.check_decode_mem():
            self.new_token_ratio.decay()
        elif not self._has_room_after_retraction(batch):
            return None
        drafts = self._drafts(batch.reqs, max_draft_tokens)
        if drafts and not batch.has_room_for(drafts):
            drafts = []
        batch.prepare_for_decode(drafts)
        return batch

    def get_new_batch_prefill(self, num_tokens: int, bound_by: str = "max_num_batched_tokens") -> ScheduleBatch | None:
        """The next piece of the prompt that was cut, then waiting requests in the order of the policy, as long as
        places, tokens and memory allow. `bound_by`: the limit behind `num_tokens`.
        """
        num_places = self.pools.req_to_token_pool.available_size()
        waiting = [req for req in self.waiting_queue if req.to_finish is None]
        is_ending = self.chunked_req is not None and self.chunked_req.to_finish is not None  # and gives its memory back
        chunked = None if is_ending else self.chunked_req
        is_closed = self._has_retracted or self.batch_is_full or not num_places or is_ending
        if num_tokens < 1 or (chunked is None and (is_closed or not waiting)):
            return None
        admitted = self.admission.round(
            chunked,
            [] if is_closed else waiting,
            running=self.running_batch.reqs,
            is_alone=len(self.running) == (chunked is not None),
            num_tokens=num_tokens,
            num_places=num_places,
            has_whole_step=num_tokens == self.max_num_batched_tokens,
            bound_by=bound_by,
        )
        self.batch_is_full = self.batch_is_full or admitted.is_full
        for rid, error in admitted.failures.items():
            self.finish_requests([rid], FinishError(error))
        batch = self._start(list(admitted.reqs)) if admitted.reqs else None
        if batch is not None:
            assert isinstance(batch, ScheduleBatch)
            self.chunked_req = batch.chunked_req
            self.admission.started([req for req in batch.reqs if req is not chunked], self.waiting_queue)
        return batch

    def mix(self, prompts: ScheduleBatch, decodes: ScheduleBatch) -> ScheduleBatch:
        """Both in one batch, from now on."""
        prompts.mix_with_running(decodes)
        self.running_batch = self.batch_class([], self.pools)
        return prompts

    # --- m4's, extended -----------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """As m4's, and those of speculation."""
        speculation = self.speculation
        return super().counters() | {
            "num_draft_tokens": speculation.num_draft_tokens,
            "num_accepted_tokens": speculation.num_accepted_tokens,
            "num_verifications": speculation.num_verifications,
        }

    def check_invariants(self) -> None:
        """As m4's; a request in pieces has less KV than tokens."""
        chunked = self.chunked_req
        check_scheduler(self, chunked if chunked is not None and chunked.req_pool_idx is not None else None)

    def reset(self, reason: BaseFinishReason) -> None:
        """As m4's; no request is in pieces, and none was overtaken."""
        super().reset(reason)
        self.chunked_req = None
        self.admission.passed_over.clear()

    def _finish(self, req: Req) -> None:
        """As m4's; it overtakes nobody, and nobody overtakes it any more."""
        self.admission.forget([req.rid])
        super()._finish(req)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _drafts(self, reqs: list[Req], most: int) -> list[list[int]]:
        """The drafts of this step. A request with an invalid draft ends; the others go on without drafts for a step."""
        try:
            drafts: list[list[int]] = self.speculation.propose(reqs, most)
        except InvalidDraftsError as invalid:
            for rid, error in invalid.errors.items():
                self.finish_requests([rid], FinishError(error))
            return []
        return drafts

    def _has_room_after_retraction(self, batch: ScheduleBatch) -> bool:
        """Retract; whoever is in the middle of its prompt may have to go, too."""
        self._has_retracted = True
        has_room = self._retract(batch, [] if self.chunked_req is None else [self.chunked_req])
        self._forget_chunked()
        return has_room

    def _forget_chunked(self) -> None:
        """Unless it goes on: it may have ended, or have lost its place."""
        if self.chunked_req is not None and self.chunked_req.req_pool_idx is None:
            self.chunked_req = None
