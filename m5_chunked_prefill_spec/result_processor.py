"""Commits the result of a step to its requests: new tokens, the KV of prompt pieces, accepted and rejected drafts.

In m4 every request of a step got one token. Here a request in pieces gets none, but the cache takes the KV of its
piece; a request with drafts may get several. All tokens go through m1's updater, which calls the stop checker first:
tokens behind a stop are never appended, never committed, and so never in a cache. SGLang:
`SchedulerOutputProcessorMixin`.
"""

from m1_single_request.output_events import Result, TextHeld
from m1_single_request.sampler import SampledTokens
from m1_single_request.tracer import Tracer
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.request_updater import RequestUpdater
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.model_worker_batch import ForwardMode
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.events import RolledBack, Verified
from m5_chunked_prefill_spec.outputs import ModelRunnerOutput as StepOutput
from m5_chunked_prefill_spec.schedule_batch import Run, ScheduleBatch
from m5_chunked_prefill_spec.speculative.speculation import Speculation


class ResultProcessor:
    """Commits the result of a batch. It marks the requests that end, and leaves their end to the scheduler."""

    def __init__(
        self, *, updater: RequestUpdater, speculation: Speculation, tree_cache: BasePrefixCache, tracer: Tracer
    ) -> None:
        self.updater, self.speculation, self.tree_cache, self.tracer = updater, speculation, tree_cache, tracer

    def process(self, batch: ScheduleBatch, output: ModelRunnerOutput) -> list[Req]:
        """Give every request its tokens, insert the KV of prompts and pieces into the cache, free the rejected drafts.

        Return the requests with a new token.
        """
        if batch.forward_mode is ForwardMode.DECODE and output.req_ids == batch.rids:
            return self._process_decodes(batch, output)
        runs = batch.take_runs(output)
        prompts = [run for run in runs if run.place < batch.num_prompts]
        decodes = runs[len(prompts) :]
        if not batch.drafts:
            others = self.updater.commit_simply([run.req for run in decodes], [run.token_ids[0] for run in decodes])
            decodes = [decodes[i] for i in others]
        for run in prompts + decodes:
            if run.req.to_finish is None:
                self._commit(run, batch, output)
        if batch.chunked_req is not None and batch.chunked_req.to_finish is None:
            self._commit_piece(batch.chunked_req, output)
        for run in prompts:
            if run.req.to_finish is None:
                self.tree_cache.cache_unfinished_req(run.req)
        for req, num_tokens in batch.roll_back():
            self.tracer.emit(RolledBack, rid=req.rid, num_tokens=num_tokens, committed=req.kv_committed_len)
        return [run.req for run in runs]

    def _process_decodes(self, batch: ScheduleBatch, output: ModelRunnerOutput) -> list[Req]:
        """Give each request of a batch without prompts and drafts its token, as in most steps."""
        reqs, token_ids = batch.take_tokens(output)
        for index in self.updater.commit_simply(reqs, token_ids):
            run = Run(index, reqs[index], [token_ids[index]], output.logprobs[index])
            if run.req.to_finish is None:
                self._commit(run, batch, output)
        return list(reqs)

    def _commit(self, run: Run, batch: ScheduleBatch, output: ModelRunnerOutput) -> None:
        """Append the tokens of a request, up to a stop, and count its drafts."""
        req = run.req
        self.verified(run, batch, output)
        is_prompt = run.place < batch.num_prompts
        if not is_prompt and commit_run_simply(self.updater, req, run.token_ids):
            return
        sampled = SampledTokens(tuple(run.token_ids), tuple(run.logprobs), output.prompt_logprobs.get(req.rid))
        num_new_kv = req.extend_input_len if is_prompt else 1
        self.updater.commit(req, sampled, num_new_kv=num_new_kv)

    def verified(self, run: Run, batch: ScheduleBatch, output: ModelRunnerOutput) -> None:
        """Count the drafts of a request."""
        drafts = batch.drafts[run.place] if batch.drafts else []
        if drafts:
            self.speculation.verified(run.req, len(drafts), len(run.token_ids) - 1)
            drafted = output.draft_token_ids.get(run.req.rid, []) if isinstance(output, StepOutput) else []
            self.tracer.emit(Verified.of, run.req, run.token_ids, drafted, self.speculation.method)

    def _commit_piece(self, chunked: Req, output: ModelRunnerOutput) -> None:
        """Commit the KV of a prompt piece, and insert it into the cache. The request gets no token."""
        piece_logprobs = output.prompt_logprobs.get(chunked.rid)
        if piece_logprobs is not None:
            chunked.sequence.add_prompt_logprobs(piece_logprobs)
        chunked.kv_committed_len += chunked.extend_input_len
        self.tree_cache.cache_unfinished_req(chunked)


def commit_run_simply(updater: RequestUpdater, req: Req, token_ids: list[int]) -> bool:
    """Append several tokens, all but the last with KV, to a request that they cannot end.

    Return False, and change nothing, if they may end the request: then `updater.commit` is needed.
    """
    sequence, stops = req.sequence, req.simple_stops or updater.simple_stops(req)
    output = sequence.output_token_ids
    if stops is None or len(output) + len(token_ids) >= stops.num_output or req.to_finish:
        return False
    if not stops.stop_ids.isdisjoint(token_ids):
        return False
    before = sequence.detokenizer.mark()
    try:
        for token_id in token_ids:
            sequence.detokenizer.push(token_id)
    except Exception:  # from a user's class; `commit` ends this request with it
        sequence.detokenizer.rewind(before)
        return False
    output.extend(token_ids)
    sequence.num_computed_tokens += len(token_ids)
    updater.num_output_tokens += len(token_ids)
    updater.tracer.emit(Result.of, req, len(token_ids))
    updater.tracer.emit(TextHeld.of, req)
    return True
