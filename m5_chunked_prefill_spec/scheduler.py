"""Who runs now, when a step may hold decodes, guesses and pieces of prompts at once.

m4 let prompts in, whole, or gave everybody a token. Here both verbs are the same, but a step may do the two together:
in which order, and how the budget is shared, is the composer's to say (`batch_composer.py`). A prompt that is cut goes
on in the next step, before anybody else is let in; until its last piece it gets no token, though what it has computed
is in the cache already. What a request gets may be several tokens; the slots of wrong guesses go back. SGLang:
`Scheduler.get_next_batch_to_run` with `chunked_req`; vLLM V1: `Scheduler.schedule`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from m1_single_request.request import FinishError, RequestStatus
from m1_single_request.sampling_step import SampledTokens
from m3_paged_attention.errors import PartError
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.errors import blamed_on
from m4_radix_cache.prefill_adder import AddReqResult
from m4_radix_cache.recovery import Phase, audit, check_scheduler, recover
from m4_radix_cache.request import Req
from m4_radix_cache.retraction import outgrown, retract
from m4_radix_cache.schedule_policy import order_of
from m4_radix_cache.scheduler_base import SchedulerBase
from m4_radix_cache.scheduler_events import matched_event
from m5_chunked_prefill_spec.config import SchedulerConfig
from m5_chunked_prefill_spec.events import RolledBack, Verified, batch_event
from m5_chunked_prefill_spec.outputs import EngineStats, ModelRunnerOutput as StepOutput
from m5_chunked_prefill_spec.prefill_adder import PrefillAdder
from m5_chunked_prefill_spec.schedule_batch import Run, ScheduleBatch

MAX_PASSED_OVER = 32
"""Whoever was overtaken by newcomers in so many steps is not overtaken any more, whatever the policy."""


class _BooksLost(Exception):
    """A part failed in the middle of admission."""

    def __init__(self, rid: str, error: PartError) -> None:
        super().__init__(rid, error)
        self.rid, self.error = rid, error


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
        self.cuts = {"chunk_alignment": chunk_alignment, "is_chunked": scheduler_config.enable_chunked_prefill}
        self.chunked_prefill_size = scheduler_config.chunked_prefill_size
        self.chunked_req: Req | None = None
        """Whoever has a row, and KV of a part of its prompt only. It is in no batch between two of its pieces."""
        self.passed_over: dict[str, int] = {}  # by request id: how often newcomers came before it
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
        except _BooksLost as lost:  # what the part has locked nobody knows: the books are made anew
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
            changed = self.process_batch_result(batch, output)
        elif batch is not None:
            self._send_back([req for req in batch.reqs if req.to_finish is None])
            batch.filter_batch([])
        if marked:  # those who are marked from now on end with the next update
            settled = {req.rid for req in changed}
            changed += [req for req in marked if req.rid not in settled]
        for req in [req for req in changed if req.to_finish is not None]:
            self._finish(req)
            self.passed_over.pop(req.rid, None)
        self.last_batch = batch if batch is not None and batch.num_prompts else None
        self.phase = Phase.IDLE
        if not self.requests:
            self.new_token_ratio.reset()
        if self.pools.debug:
            audit(self)
        return changed

    def process_batch_result(self, batch: ScheduleBatch, output: ModelRunnerOutput) -> list[Req]:
        """Give every request its new tokens; the KV of prompts and their pieces is there for others from now on."""
        runs = batch.take_runs(output)
        is_simple = not self.tracer and not batch.drafts
        prompts = [run for run in runs if run.place < batch.num_prompts]
        decodes = runs[len(prompts) :]
        if is_simple:
            others = self.updater.commit_simply([run.req for run in decodes], [run.token_ids[0] for run in decodes])
            decodes = [decodes[i] for i in others]
        for run in prompts + decodes:
            self._commit(run, batch, output)
        if batch.chunked_req is not None and batch.chunked_req.to_finish is None:
            self._commit_piece(batch.chunked_req, output)
        for run in prompts:
            if run.req.to_finish is None:
                self.tree_cache.cache_unfinished_req(run.req)
        for rid, num_tokens in batch.roll_back().items():
            if self.tracer:
                committed = self.requests[rid].kv_committed_len
                self.tracer.emit(RolledBack(rid=rid, num_tokens=num_tokens, committed=committed))
        return [run.req for run in runs]

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
        is_closed = self.batch_is_full or not waiting or not num_places or self.chunked_req is not chunked
        if num_tokens < 1 or self._has_retracted or (chunked is None and is_closed):
            return None
        newcomers = [] if is_closed else waiting
        try:
            adder = self._new_adder(num_tokens, num_places + (chunked is not None), bound_by)
        except PartError as error:  # nobody's prompt can go on, and to ask again would not help
            self.finish_requests([req.rid for req in [*waiting, *([chunked] if chunked else [])]], FinishError(error))
            return None
        if chunked is not None and not self._add_chunked(adder, chunked):
            newcomers = []
        if newcomers:
            self._add_newcomers(adder, newcomers)
        return self._start(adder, chunked) if adder.can_run_list else None

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

    def _new_adder(self, num_tokens: int, num_places: int, bound_by: str) -> PrefillAdder:
        """What counts whether another prompt fits. Raises `PartError` if the part cannot be made."""
        with blamed_on("prefill_adder", self.prefill_adder):
            adder: PrefillAdder = self.prefill_adder(
                tree_cache=self.tree_cache,
                token_to_kv_pool_allocator=self.pools.token_to_kv_pool_allocator,
                running=self.running_batch.reqs,
                new_token_ratio=self.new_token_ratio.value,
                max_prefill_tokens=num_tokens,
                max_new_reqs=num_places,
                rem_chunk_tokens=self.chunked_prefill_size,
                bound_by=bound_by,
                tracer=self.tracer,
                **self.cuts,
            )
        return adder

    def _add_chunked(self, adder: PrefillAdder, chunked: Req) -> bool:
        """Ask for its next piece; whether others may follow in this step."""
        chunked.extend_input_len = len(chunked.fill_ids) - len(chunked.prefix_indices)
        try:
            with blamed_on("prefill_adder", adder):
                result = adder.add_chunked_req(chunked)
        except PartError as error:
            raise _BooksLost(chunked.rid, error) from error
        if result is AddReqResult.NO_TOKEN and not adder.can_run_list and not self.running_batch.reqs:
            self.finish_requests([chunked.rid], FinishError(outgrown(chunked, self.pools)))  # alone, and no room: never
        return result is AddReqResult.CONTINUE

    def _add_newcomers(self, adder: PrefillAdder, waiting: list[Req]) -> None:
        """Let waiting requests in, in the order of the policy, until one does not fit."""
        try:
            order = order_of(self.policy, waiting, adder.can_run_list)
        except PartError as error:  # nobody can be let in, and to ask again would not help
            self.finish_requests([req.rid for req in waiting], FinishError(error))
            return
        for req in self._fairly(order.ready):
            req.init_next_round_input(self.tree_cache)
            if self.tracer:
                self.tracer.emit(matched_event(req))
            try:
                with blamed_on("prefill_adder", adder):
                    result = adder.add_one_req(req)
            except PartError as error:
                raise _BooksLost(req.rid, error) from error
            is_alone = not self.running_batch.reqs and not adder.can_run_list
            if result is AddReqResult.NO_TOKEN and is_alone:
                self.finish_requests([req.rid], FinishError(outgrown(req, self.pools)))  # no room even so: never
            elif result is not AddReqResult.CONTINUE:
                self.batch_is_full = result is AddReqResult.NO_TOKEN
                break

    def _fairly(self, ready: Sequence[Req]) -> list[Req]:
        """The order of the policy; but whoever was overtaken too often comes first, the oldest of them before all."""
        late = [req for req in ready if self.passed_over.get(req.rid, 0) >= MAX_PASSED_OVER]
        return [*sorted(late, key=lambda req: req.number), *(req for req in ready if req not in late)]

    def _start(self, adder: PrefillAdder, chunked: Req | None) -> ScheduleBatch | None:
        """A batch of requests that were admitted, their prefixes locked."""
        new = [req for req in adder.can_run_list if req is not chunked]
        batch = self.batch_class.init_new(adder.can_run_list, self.pools)
        assert isinstance(batch, ScheduleBatch)
        try:
            batch.prepare_for_extend(self._sampling_info(batch.reqs))
        except (PartError, torch.OutOfMemoryError) as error:  # nothing was taken
            for req in new:
                self.tree_cache.dec_lock_ref(req.last_node)
            self.batch_is_full = False
            self.finish_requests([req.rid for req in adder.can_run_list], FinishError(error))
            return None
        self.chunked_req = batch.chunked_req
        started = {id(req) for req in new}
        self.waiting_queue = [req for req in self.waiting_queue if id(req) not in started]
        newest = max((req.number for req in new), default=0)
        for req in self.waiting_queue:
            if req.number < newest:
                self.passed_over[req.rid] = self.passed_over.get(req.rid, 0) + 1
        for req in new:
            self.passed_over.pop(req.rid, None)
            req.set_status(RequestStatus.RUNNING)
            self.tree_cache.record_hit(req.last_node)
            self.num_cached_tokens += len(req.prefix_indices)
            if not req.num_retractions:
                req.cached_tokens = len(req.prefix_indices)
        return batch

    def _drafts(self, reqs: list[Req], most: int) -> list[list[int]]:
        """The guesses of this step. A proposer that fails guesses nothing any more for those it was asked about."""
        try:
            with blamed_on("proposer", self.speculation.proposer):
                drafts = self.speculation.propose(reqs, most)
        except PartError as error:
            self.finish_requests([req.rid for req in reqs], FinishError(error))
            return []
        return drafts

    def _commit(self, run: Run, batch: ScheduleBatch, output: ModelRunnerOutput) -> None:
        """Append what a request got, as far as it is not ended by it."""
        req, is_prompt = run.req, run.place < batch.num_prompts
        drafts = batch.drafts[run.place] if batch.drafts else []
        if req.to_finish is not None:
            return
        if drafts:
            self.speculation.verified(req, len(drafts), len(run.token_ids) - 1)
            if self.tracer:
                self.tracer.emit(self._verified_event(run, output))
        of_prompt = output.prompt_logprobs.get(req.rid)
        sampled = SampledTokens(tuple(run.token_ids), tuple(run.logprobs), of_prompt)
        self.updater.commit(req, sampled, num_new_kv=req.extend_input_len if is_prompt else 1)

    def _commit_piece(self, chunked: Req, output: ModelRunnerOutput) -> None:
        """A piece of a prompt has its KV: share it. No token comes of it."""
        of_prompt = output.prompt_logprobs.get(chunked.rid)
        if of_prompt is not None:
            chunked.sequence.add_prompt_logprobs(of_prompt)
        chunked.kv_committed_len += chunked.extend_input_len
        self.tree_cache.cache_unfinished_req(chunked)

    def _verified_event(self, run: Run, output: ModelRunnerOutput) -> Verified:
        """What came of a request's guesses; built only for a reader."""
        text = run.req.sequence.detokenizer.token_text
        drafted = output.draft_token_ids.get(run.req.rid, []) if isinstance(output, StepOutput) else []
        return Verified(
            rid=run.req.rid,
            method=self.speculation.algorithm.value,
            drafted=tuple(drafted),
            accepted=len(run.token_ids) - 1,
            tokens=tuple(run.token_ids),
            texts=tuple(map(text, drafted)),
            own=text(run.token_ids[-1]),
            rate=round(run.req.spec_state.rate, 3) if run.req.spec_state is not None else 0.0,
        )

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
        if batch.reqs and batch.check_decode_mem():
            return True
        if len(self.running) == 1:  # all memory is its own; otherwise others leave theirs at the update
            self.finish_requests([req.rid for req in batch.reqs], FinishError(outgrown(self.running[0], self.pools)))
        return False
