"""A batch that lives, in which a request may have several new tokens in a step, and keep only some of them.

m4's batch was prompts or decodes. Here prompts, or pieces of them, stand in front and those who decode behind, in one
batch (`mix_with_running`); a decode may carry guesses. For these it takes slots beyond what is certain:

    0                    kv_committed_len              kv_allocated_len
    |  KV that is certain       | its newest token | guess | guess |      in flight
    |  KV that is certain                          | guess |              after the step, if one guess was right

The rest goes back (`roll_back`): whole pages to the allocator, the slots of a started page to the request's next
tokens. SGLang: `mix_with_running`, and `EagleVerifyInput.verify` with its `kv_allocated_len`.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from m1_single_request.sampler import LogprobRow
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.mem_cache.allocator import Slots
from m4_radix_cache.model_worker_batch import ForwardMode
from m4_radix_cache.request import Req
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m4_radix_cache.schedule_batch import NOTHING, Pools, ScheduleBatch as PlainScheduleBatch
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from m5_chunked_prefill_spec.req_to_token_pool import ReqToTokenPool
from m5_chunked_prefill_spec.speculative.spec_info import SpecInput


class Run(NamedTuple):
    """What one request got in a step."""

    place: int
    """Its row in the batch."""
    req: Req
    token_ids: list[int]
    """At least one; with guesses, those that were right and one more."""
    logprobs: Sequence[LogprobRow | None]


class ScheduleBatch(PlainScheduleBatch):
    """m4's, with pieces of prompts, and with guesses."""

    def __init__(self, reqs: list[Req], pools: Pools) -> None:
        super().__init__(reqs, pools)
        self.new_lens = NOTHING  # int64 [batch_size]: new tokens of each in this step
        self.num_prompts = 0  # the first so many requests are prefilled in this step
        self.chunked_req: Req | None = None  # the one among them whose prompt does not end in this step
        self.drafts: list[list[int]] = []  # guesses in this step, of those behind the prompts; empty: nobody has any

    def prepare_for_extend(self, sampling_info: SamplingBatchInfo) -> None:
        """As m4's: a row where one is missing, and a slot for each token to compute."""
        super().prepare_for_extend(sampling_info)
        assert self.extend_lens is not None
        self.new_lens, self.num_prompts = np.array(self.extend_lens), len(self.reqs)
        self.output_ids = np.zeros(len(self.reqs), dtype=np.int64)  # so that decodes can be put behind them
        unfinished = [req for req in self.reqs if len(req.prefix_indices) + req.extend_input_len < len(req.fill_ids)]
        assert len(unfinished) <= 1, "two prompts are in pieces"
        self.chunked_req = unfinished[0] if unfinished else None

    def prepare_for_decode(self, drafts: Sequence[list[int]] = ()) -> None:
        """The newest token of every request goes through the model, and with it its `drafts` (by row; none: nobody has
        any). There must be room: `check_decode_mem`, `has_room_for`."""
        pools, rows = self.pools, self.req_pool_indices
        pool = cast(ReqToTokenPool, pools.req_to_token_pool)
        assert (pool.lens[rows] == self.seq_lens).all(), "a row has slots unknown to the batch"
        last_locs = pool.last_slots(rows)
        self.num_prompts, self.chunked_req, self.prefix_lens, self.extend_lens = 0, None, None, None
        if not any(drafts):
            self.forward_mode, self.drafts = ForwardMode.DECODE, []
            self.new_lens, self.input_ids = np.ones(len(rows), dtype=np.int64), self.output_ids
            slots = pools.token_to_kv_pool_allocator.alloc_decode(self.seq_lens + 1, last_locs)
            assert slots is not None, "check_decode_mem said that there is room"
            pool.append(rows, slots)
        else:
            self.forward_mode, self.drafts = ForwardMode.TARGET_VERIFY, list(drafts)
            self.new_lens = np.array([1 + len(own) for own in drafts])
            known = zip(self.output_ids.tolist(), drafts, strict=True)
            self.input_ids = np.array([token_id for newest, own in known for token_id in (newest, *own)])
            after = self.seq_lens + self.new_lens
            slots = pools.token_to_kv_pool_allocator.alloc_extend(self.seq_lens, after, last_locs)
            assert slots is not None, "has_room_for said that there is room"
            pool.append_runs(rows, slots, self.new_lens)
        self.out_cache_loc, self.seq_lens = slots, self.seq_lens + self.new_lens

    def prepare_for_prebuilt(self, sampling_info: SamplingBatchInfo) -> None:
        """Nothing goes through the model: all rows hold the KV of a whole prompt, which came from elsewhere (m6)."""
        self.forward_mode, self.sampling_info, self.num_prompts = ForwardMode.PREBUILT, sampling_info, len(self.reqs)
        self.req_pool_indices = np.array([req.req_pool_idx for req in self.reqs], dtype=np.int64)
        self.seq_lens = np.array([len(req.fill_ids) for req in self.reqs], dtype=np.int64)
        self.new_lens = np.zeros(len(self.reqs), dtype=np.int64)
        self.output_ids = np.zeros(len(self.reqs), dtype=np.int64)

    def mix_with_running(self, running: "ScheduleBatch") -> None:
        """Let prepared decodes run beside these prepared prompts, behind them, from now on in this batch."""
        self.drafts = running.drafts and [[] for _ in self.reqs] + running.drafts
        tokens, slots = (self.input_ids, running.input_ids), (self.out_cache_loc, running.out_cache_loc)
        self.new_lens = np.concatenate([self.new_lens, running.new_lens])
        self.merge_batch(running)
        self.input_ids, self.out_cache_loc = np.concatenate(tokens), np.concatenate(slots)
        self.forward_mode, self.prefix_lens, self.extend_lens = ForwardMode.MIXED, None, None

    def get_model_worker_batch(self) -> ModelWorkerBatch:
        """This step as plain data."""
        assert self.sampling_info is not None
        sample_lens = [1] * len(self.reqs)
        if self.drafts:
            sample_lens = [1 + len(own) for own in self.drafts]
        if self.chunked_req is not None:
            sample_lens[self.reqs.index(self.chunked_req)] = 0
        return ModelWorkerBatch(
            forward_mode=self.forward_mode,
            rids=self.rids,
            input_ids=self.input_ids,
            req_pool_indices=self.req_pool_indices,
            seq_lens=self.seq_lens,
            out_cache_loc=self.out_cache_loc,
            prefix_lens=(self.seq_lens - self.new_lens).tolist(),
            extend_lens=self.new_lens.tolist(),
            prompts_to_rate=self._prompts_to_rate(self.reqs[: self.num_prompts]),
            sampling_info=self.sampling_info,
            new_lens=self.new_lens,
            sample_lens=sample_lens,
            num_prompts=self.num_prompts,
            spec_info=SpecInput(self.drafts) if self.drafts else None,
        )

    def take_one_each(self, output: ModelRunnerOutput) -> tuple[list[Req], list[int]]:
        """`take_tokens`, after a step of plain decodes in which everybody got a token: the quick way of `take_runs`."""
        reqs, token_ids = self.take_tokens(output)
        assert self.sampling_info is not None
        self.sampling_info.advance(self.output_ids)
        return reqs, token_ids

    def take_runs(self, output: ModelRunnerOutput) -> list[Run]:
        """What each request got, in the order of the batch; the newest tokens are the next step's input."""
        assert self.sampling_info is not None
        places = {rid: place for place, rid in enumerate(self.rids)} if output.req_ids != self.rids else None
        rows = zip(output.req_ids, output.sampled_token_ids, output.logprobs, strict=True)
        runs = []
        for index, (rid, token_ids, logprobs) in enumerate(rows):
            place = index if places is None else places[rid]
            runs.append(Run(place, self.reqs[place], token_ids, logprobs))
        if places is not None:
            runs.sort(key=lambda run: run.place)
        counts = [0] * len(self.reqs)
        newest = [0] * len(self.reqs)  # whoever got none ends now, or is not done
        for run in runs:
            counts[run.place], newest[run.place] = len(run.token_ids), run.token_ids[-1]
        self.output_ids = np.array(newest, dtype=np.int64)
        self.sampling_info.advance(
            [token_id for run in runs for token_id in run.token_ids], np.array(counts, dtype=np.int64)
        )
        return runs

    def roll_back(self) -> list[tuple[Req, int]]:
        """Give back the slots behind what is certain now. Returns from whom how many tokens were taken back."""
        if not self.drafts:
            return []
        pool, allocator = cast(ReqToTokenPool, self.pools.req_to_token_pool), self.pools.token_to_kv_pool_allocator
        freed: list[Slots] = []
        taken_back = []
        self.seq_lens = self.seq_lens.copy()
        for place, req in enumerate(self.reqs):
            surplus = int(self.seq_lens[place]) - req.kv_committed_len
            if self.drafts[place] and req.req_pool_idx is not None and surplus > 0:
                freed.append(pool.truncate(req.req_pool_idx, req.kv_committed_len, page_size=allocator.page_size))
                taken_back.append((req, surplus))
                self.seq_lens[place] = req.kv_committed_len
        if freed:
            allocator.free(np.concatenate(freed))
        self.drafts = []
        return taken_back

    def pages_for(self, drafts: Sequence[list[int]]) -> int:
        """New pages that a step with these drafts would take."""
        lens = self.seq_lens + 1 + np.array([len(own) for own in drafts])
        return self.pools.token_to_kv_pool_allocator.num_pages_for_extend(self.seq_lens, lens)

    def has_room_for(self, drafts: Sequence[list[int]]) -> bool:
        """Make room for everybody's next token and these drafts; whether there is."""
        return self.pools.make_room(self.pages_for(drafts) * self.pools.token_to_kv_pool_allocator.page_size)
