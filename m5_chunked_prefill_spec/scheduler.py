"""Who runs now, when a step may hold decodes, guesses and pieces of prompts at once.

m4 let prompts in, whole, or gave everybody a token. Here both verbs are the same, but a step may do the two together:
in which order, and how the budget is shared, is the composer's to say (`batch_composer.py`). A prompt that is cut goes
on in the next step, before anybody else is let in; until its last piece it gets no token, though what it has computed
is in the cache already. What a request gets may be several tokens; the slots of wrong guesses go back. SGLang:
`Scheduler.get_next_batch_to_run` with `chunked_req`; vLLM V1: `Scheduler.schedule`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from m1_single_request.request import FinishError, RequestStatus
from m3_paged_attention.errors import PartError
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.errors import blamed_on
from m4_radix_cache.recovery import Phase, audit, check_scheduler, recover
from m4_radix_cache.request import Req
from m4_radix_cache.retraction import outgrown, retract
from m4_radix_cache.scheduler_base import SchedulerBase
from m5_chunked_prefill_spec.admission import Admission, BooksLostError
from m5_chunked_prefill_spec.config import SchedulerConfig
from m5_chunked_prefill_spec.events import batch_event
from m5_chunked_prefill_spec.outputs import EngineStats
from m5_chunked_prefill_spec.result_processor import ResultProcessor
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch


class Scheduler(SchedulerBase):
    """Decides who runs, and with how many tokens; the two verbs of every scheduler, and what a composer asks for."""

    batch_class = ScheduleBatch

    def __init__(
        self,
        *,
        composer: Any,
        speculation: Any,
        chunk_alignment: int,
        scheduler_config: SchedulerConfig,
        **settings: Any,
    ) -> None:
        """`chunk_alignment`: where prompts may be cut (see `PrefillAdder`)."""
        super().__init__(scheduler_config=scheduler_config, **settings)
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

    # --- the two verbs ------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduleBatch | None:
        """Decide what goes through the model now; None: nothing."""
        if self.phase is not Phase.IDLE:
            recover(self)
        self.phase = Phase.DECIDING
        self._has_retracted = False
        batch: ScheduleBatch | None = None
        try:
            batch = self.get_next_batch_to_run()
        except BooksLostError as lost:  # the books are made anew
            recover(self)
            self.finish_requests([lost.rid], FinishError(lost.error))
        self.cur_batch = batch
        if batch is None and all(req.to_finish is None for req in self.requests.values()):
            # Nobody goes on and nobody ends: the next step would be the same, for ever.
            error = PartError("the parts 'schedule_policy', 'prefill_adder' and 'composer' let nobody run")
            self.finish_requests(list(self.requests), FinishError(error))
        self.phase = Phase.IN_FLIGHT
        if self.tracer and batch is not None:
            self.tracer.emit(batch_event(batch, self.untold, len(self.running), self.max_num_batched_tokens))
            self.untold = []
        return batch

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Whoever got its first token joins those who run; what the step is filled with is the composer's to say."""
        if self.chunked_req is not None and self.chunked_req.req_pool_idx is None:
            self.chunked_req = None  # it ended, or lost its place
        if self.last_batch is not None:
            goes_on = [req.status is RequestStatus.RUNNING and req.to_finish is None for req in self.last_batch.reqs]
            others = [req is not self.chunked_req for req in self.last_batch.reqs]
            self.last_batch.filter_batch([i for i, keep in enumerate(zip(goes_on, others, strict=True)) if all(keep)])
            self.running_batch.merge_batch(self.last_batch)
            self.last_batch = None
        self.running_batch.filter_batch()
        return self.composer.compose(self)

    def update_from_output(self, batch: ScheduleBatch | None, output: ModelRunnerOutput | None) -> list[Req]:
        """Commit a step: append tokens, share their KV, end what is to end. Returns the requests that changed.

        `output` is None if the step ran nothing or failed; whoever was in it and is not marked starts over. A request
        that was marked to finish (abort, error) ends now, without a token.
        """
        self.phase = Phase.UPDATING
        marked = [req for req in self.marked.values() if req.to_finish is not None]
        changed: list[Req] = []
        if batch is not None and output is not None:
            changed = self.results.process(batch, output)
        elif batch is not None:
            self._send_back([req for req in batch.reqs if req.to_finish is None])
            batch.filter_batch([])
        if marked:  # those who are marked from now on end with the next update
            settled = {req.rid for req in changed}
            changed += [req for req in marked if req.rid not in settled]
        ended = [req for req in changed if req.to_finish is not None]
        for req in ended:
            self._finish(req)
        self.admission.forget(req.rid for req in ended)
        self.last_batch = batch if batch is not None and batch.num_prompts else None
        self.phase = Phase.IDLE
        if not self.requests:
            self.new_token_ratio.reset()
        if self.pools.debug:
            audit(self)
        return changed

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
        elif not self._retract(batch):
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
        chunked = self.chunked_req if self.chunked_req is None or self.chunked_req.to_finish is None else None
        is_closed = self._has_retracted or self.batch_is_full or not num_places or self.chunked_req is not chunked
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
        for rids, error in admitted.failures:
            self.finish_requests(rids, FinishError(error))
        return self._start(list(admitted.reqs)) if admitted.reqs else None

    def mix(self, prompts: ScheduleBatch, decodes: ScheduleBatch) -> ScheduleBatch:
        """Both in one batch, from now on."""
        prompts.mix_with_running(decodes)
        self.running_batch = self.batch_class([], self.pools)
        return prompts

    # --- seams --------------------------------------------------------------------------------------------------------

    def stats(self, totals: Mapping[str, Any]) -> EngineStats:
        """As m4's, and how the guesses fared."""
        guesses = self.speculation
        return EngineStats(
            **vars(super().stats(totals)),
            num_draft_tokens=guesses.num_draft_tokens,
            num_accepted_tokens=guesses.num_accepted_tokens,
            num_verifications=guesses.num_verifications,
        )

    def check_invariants(self) -> None:
        """As m4's; a request in pieces has less KV than tokens."""
        chunked = self.chunked_req
        check_scheduler(self, chunked if chunked is not None and chunked.req_pool_idx is not None else None)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _start(self, reqs: list[Req]) -> ScheduleBatch | None:
        """A batch of requests that were admitted, their prefixes locked."""
        new = [req for req in reqs if req is not self.chunked_req]
        batch = self.batch_class.init_new(reqs, self.pools)
        assert isinstance(batch, ScheduleBatch)
        try:
            batch.prepare_for_extend(self._sampling_info(batch.reqs))
        except (PartError, torch.OutOfMemoryError) as error:  # nothing was taken
            for req in new:
                self.tree_cache.dec_lock_ref(req.last_node)
            self.batch_is_full = False
            self.finish_requests([req.rid for req in reqs], FinishError(error))
            return None
        self.chunked_req = batch.chunked_req
        started = {id(req) for req in new}
        self.waiting_queue = [req for req in self.waiting_queue if id(req) not in started]
        self.admission.started(new, self.waiting_queue)
        for req in new:
            req.set_status(RequestStatus.RUNNING)
            self.tree_cache.record_hit(req.last_node)
            self.num_cached_tokens += len(req.prefix_indices)
            if not req.num_retractions:
                req.cached_tokens = len(req.prefix_indices)
        return batch

    def _drafts(self, reqs: list[Req], most: int) -> list[list[int]]:
        """The guesses of this step. If the part that makes them fails, those it guesses for end, and no others."""
        try:
            with blamed_on("speculation", self.speculation):
                drafts = self.speculation.propose(reqs, most)
        except PartError as error:
            self.finish_requests([req.rid for req in reqs if req.spec_state is not None], FinishError(error))
            return []
        return drafts

    def _retract(self, batch: ScheduleBatch) -> bool:
        """Take requests out until the others' next tokens have room; whether they have."""
        prefilling = [] if self.chunked_req is None else [self.chunked_req]
        retracted, failure = retract(batch, self.preemption, self.new_token_ratio, self.tracer, prefilling=prefilling)
        self._send_back(retracted)
        self._has_retracted = True
        if self.chunked_req in retracted:
            self.chunked_req = None
        if failure is not None:  # nobody can run on, and to ask again would not help
            self.finish_requests([req.rid for req in batch.reqs], FinishError(failure))
            return False
        if not batch.reqs:
            return False
        if batch.check_decode_mem():
            return True
        if len(self.running) == 1:  # all memory is its own; otherwise others leave theirs at the update
            self.finish_requests([req.rid for req in batch.reqs], FinishError(outgrown(self.running[0], self.pools)))
        return False
