"""Who runs now, when what one request computed is there for all.

m3 decided every step anew. Here a running batch lives: each step either lets waiting requests in and runs their prompts
(EXTEND), or gives everybody who runs a token (DECODE). Admission asks the policy for an order, finds for each request
what the cache has of it, and counts only the rest against the budget. When memory runs out, first what nobody uses is
evicted, then somebody is retracted. SGLang: `Scheduler.get_next_batch_to_run` and `process_batch_result`.
"""

from collections.abc import Iterable

import torch

from m1_single_request.request import FinishError, RequestStatus
from m1_single_request.sampling_step import SampledTokens
from m3_paged_attention.errors import PartError
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.errors import blamed_on
from m4_radix_cache.prefill_adder import AddReqResult, PrefillAdder
from m4_radix_cache.recovery import Phase, audit, recover
from m4_radix_cache.request import Req
from m4_radix_cache.retraction import outgrown, retract
from m4_radix_cache.schedule_batch import ScheduleBatch
from m4_radix_cache.schedule_policy import order_of
from m4_radix_cache.scheduler_base import SchedulerBase
from m4_radix_cache.scheduler_events import batch_event, matched_event


class Scheduler(SchedulerBase):
    """Decides who runs; the two verbs of every scheduler, and what SGLang calls their parts."""

    def schedule(self) -> ScheduleBatch | None:
        """Decide what goes through the model now; None: nothing."""
        if self.phase is not Phase.IDLE:
            recover(self)
        self.phase = Phase.DECIDING
        self.cur_batch = self.get_next_batch_to_run()
        if self.cur_batch is None and all(req.to_finish is None for req in self.requests.values()):
            # Nobody goes on and nobody ends: the next step would be the same, for ever.
            error = PartError("the parts 'schedule_policy' and 'prefill_adder' let nobody in, and nobody runs")
            self.finish_requests(list(self.requests), FinishError(error))
        self.phase = Phase.IN_FLIGHT
        if self.tracer and self.cur_batch is not None:
            self.tracer.emit(batch_event(self.cur_batch, self.untold, len(self.running), self.max_num_batched_tokens))
            self.untold = []
        return self.cur_batch

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Prompts first: 1. whose prompt ran in the last step joins the others; 2. if waiting requests can be let in,
        their prompts run, and the others wait for it; 3. otherwise everybody who runs gets a token."""
        if self.last_batch is not None:
            self.last_batch.filter_batch()
            self.running_batch.merge_batch(self.last_batch)
            self.last_batch = None
        self.running_batch.filter_batch()
        return self.get_new_batch_prefill() or self.update_running_batch()

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        """Let waiting requests in, in the order of the policy, as long as places, tokens and memory allow."""
        num_places = self.pools.req_to_token_pool.available_size()
        waiting = [req for req in self.waiting_queue if req.to_finish is None]
        if self.batch_is_full or not waiting or not num_places:
            return None
        try:
            adder = self._new_adder(num_places)
            order = order_of(self.policy, waiting)
        except PartError as error:  # nobody can be let in, and to ask again would not help
            self.finish_requests([req.rid for req in waiting], FinishError(error))
            return None
        for req in order.ready:
            req.init_next_round_input(self.tree_cache)
            if self.tracer:
                self.tracer.emit(matched_event(req))
            try:
                with blamed_on("prefill_adder", self.prefill_adder):
                    result = adder.add_one_req(req)
            except PartError as error:  # what it has locked nobody knows: the books are made anew
                recover(self)
                self.finish_requests([req.rid], FinishError(error))
                return None
            if result is AddReqResult.NO_TOKEN and not self.running and not adder.can_run_list:
                self.finish_requests([req.rid], FinishError(outgrown(req, self.pools)))  # alone, and no room: never
            elif result is not AddReqResult.CONTINUE:
                self.batch_is_full = result is AddReqResult.NO_TOKEN
                break
        return self._start(adder.can_run_list) if adder.can_run_list else None

    def update_running_batch(self) -> ScheduleBatch | None:
        """The running batch, with room for everybody's next token; whoever had to go for that waits again, in front."""
        batch = self.running_batch
        if batch.is_empty():
            return None
        if batch.check_decode_mem():
            self.new_token_ratio.decay()
        elif not self._retract(batch):
            return None
        batch.prepare_for_decode()
        return batch

    def update_from_output(self, batch: ScheduleBatch | None, output: ModelRunnerOutput | None) -> list[Req]:
        """Commit a step: append tokens, share their KV, end what is to end. Returns the requests that changed.

        `output` is None if the step ran nothing or failed; whoever was in it and is not marked starts over. A request
        that was marked to finish (abort, error) ends now, without a token.
        """
        self.phase = Phase.UPDATING
        marked = [req for req in self.marked.values() if req.to_finish is not None]
        changed: list[Req] = []
        if batch is not None and output is not None:
            changed = list(self.process_batch_result(batch, output))
        elif batch is not None:
            self._send_back([req for req in batch.reqs if req.to_finish is None])
            batch.filter_batch([])
        if marked:  # those who are marked from now on end with the next update
            settled = {req.rid for req in changed}
            changed += [req for req in marked if req.rid not in settled]
        for req in [req for req in changed if req.to_finish is not None]:
            self._finish(req)
        self.last_batch = batch if batch is not None and batch.forward_mode.is_extend() else None
        self.phase = Phase.IDLE
        if not self.requests:
            self.new_token_ratio.reset()
        if self.pools.debug:
            audit(self)
        return changed

    def process_batch_result(self, batch: ScheduleBatch, output: ModelRunnerOutput) -> list[Req]:
        """Give every request its new token; the KV of a prompt is there for others from now on."""
        reqs, token_ids = batch.take_tokens(output)
        is_extend = batch.forward_mode.is_extend()
        others: Iterable[int] = range(len(reqs))
        if not is_extend and not self.tracer:
            others = self.updater.commit_simply(reqs, token_ids)
        for index in others:
            req = reqs[index]
            if req.to_finish is None:
                of_prompt = output.prompt_logprobs.get(req.rid)
                sampled = SampledTokens((token_ids[index],), tuple(output.logprobs[index]), of_prompt)
                self.updater.commit(req, sampled, num_new_kv=req.extend_input_len if is_extend else 1)
            if is_extend and req.to_finish is None:
                self.tree_cache.cache_unfinished_req(req)
        return reqs

    # --- inside -------------------------------------------------------------------------------------------------------

    def _new_adder(self, num_places: int) -> PrefillAdder:
        """What counts whether another prompt fits. Raises `PartError` if the part cannot be made."""
        with blamed_on("prefill_adder", self.prefill_adder):
            return self.prefill_adder(
                tree_cache=self.tree_cache,
                token_to_kv_pool_allocator=self.pools.token_to_kv_pool_allocator,
                running=self.running_batch.reqs,
                new_token_ratio=self.new_token_ratio.value,
                max_prefill_tokens=self.max_num_batched_tokens,
                max_new_reqs=num_places,
                tracer=self.tracer,
            )

    def _start(self, reqs: list[Req]) -> ScheduleBatch | None:
        """A batch of requests that were admitted, their prefixes locked."""
        batch = ScheduleBatch.init_new(reqs, self.pools)
        try:
            batch.prepare_for_extend(self._sampling_info(batch.reqs))
        except (PartError, torch.OutOfMemoryError) as error:  # nothing was taken
            for req in reqs:
                self.tree_cache.dec_lock_ref(req.last_node)
            self.batch_is_full = False
            self.finish_requests([req.rid for req in reqs], FinishError(error))
            return None
        started = {id(req) for req in reqs}
        self.waiting_queue = [req for req in self.waiting_queue if id(req) not in started]
        for req in reqs:
            req.set_status(RequestStatus.RUNNING)
            self.tree_cache.record_hit(req.last_node)
            self.num_cached_tokens += len(req.prefix_indices)
            if not req.num_retractions:
                req.cached_tokens = len(req.prefix_indices)
        return batch

    def _retract(self, batch: ScheduleBatch) -> bool:
        """Take requests out until the others' next tokens have room; whether they have."""
        retracted, failure = retract(batch, self.preemption, self.new_token_ratio, self.tracer)
        self._send_back(retracted)
        if failure is not None:  # nobody can run on, and to ask again would not help
            self.finish_requests([req.rid for req in batch.reqs], FinishError(failure))
            return False
        if batch.check_decode_mem():
            return True
        if len(self.running) == 1:  # all memory is its own; otherwise others leave theirs at the update
            self.finish_requests([batch.reqs[0].rid], FinishError(outgrown(batch.reqs[0], self.pools)))
        return False
