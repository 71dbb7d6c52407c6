"""Who runs now, when what one request computed is there for all.

m3 decided every step anew. Here a running batch lives: each step either lets waiting requests in and runs their prompts
(EXTEND), or gives everybody who runs a token (DECODE). Admission asks the policy for an order, finds for each request
what the cache has of it, and counts only the rest against the budget. When memory runs out, first what nobody uses is
evicted, then somebody is retracted. SGLang: `Scheduler.get_next_batch_to_run` and `process_batch_result`.
"""

from collections.abc import Iterable

from m1_single_request.request import FinishError
from m1_single_request.sampler import SampledTokens
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.events import Batch, Matched
from m4_radix_cache.prefill_adder import AddReqResult, PrefillAdder
from m4_radix_cache.request import Req
from m4_radix_cache.retraction import outgrown
from m4_radix_cache.schedule_batch import ScheduleBatch
from m4_radix_cache.schedule_policy import order_of
from m4_radix_cache.scheduler_base import SchedulerBase


class Scheduler(SchedulerBase):
    """Decides who runs, and commits what came of it; the verbs that ask it to are in `SchedulerBase`."""

    nobody_runs = "the parts 'schedule_policy' and 'prefill_adder' let nobody in, and nobody runs"

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
        adder = self._new_adder(num_places, len(waiting))
        for req in order_of(self.policy, waiting).ready:
            req.init_next_round_input(self.tree_cache)
            self.tracer.emit(Matched.of, req)
            result = adder.add_one_req(req)
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

    def process_batch_result(self, batch: ScheduleBatch, output: ModelRunnerOutput) -> list[Req]:
        """Give every request its new token; the KV of a prompt is there for others from now on."""
        reqs, token_ids = batch.take_tokens(output)
        is_extend = batch.forward_mode.is_extend()
        others: Iterable[int] = range(len(reqs))
        if not is_extend:
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

    def trace_batch(self, batch: ScheduleBatch) -> None:
        """Emit the event about a batch."""
        self.tracer.emit(Batch.of, batch, self)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _new_adder(self, num_places: int, num_waiting: int) -> PrefillAdder:
        """The part that decides whether another prompt fits into this step."""
        return self.prefill_adder(
            tree_cache=self.tree_cache,
            token_to_kv_pool_allocator=self.pools.token_to_kv_pool_allocator,
            running=self.running_batch.reqs,
            new_token_ratio=self.new_token_ratio.value,
            max_prefill_tokens=self.max_num_batched_tokens,
            max_new_reqs=num_places,
            num_waiting=num_waiting,
            tracer=self.tracer,
        )
