"""A living batch whose requests may have several new tokens in a step, of which some are not kept.

m4's batch held prompts or decodes. Here one batch may hold both: prompts, or pieces of them, in front, decodes behind
(`mix_with_running`). A decode may have drafts, which get slots before it is known whether they are right:

    0                    kv_committed_len              kv_allocated_len
    |  committed KV             | its newest token | draft | draft |      in flight
    |  committed KV                                | draft |              after the step, if one draft was right

`roll_back` frees the slots of wrong drafts: whole pages go to the allocator, the slots of a started page to the next
tokens of the request. SGLang: `mix_with_running`, and `EagleVerifyInput.verify` with its `kv_allocated_len`.
"""

from collections.abc import Sequence
from functools import lru_cache
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
    """New tokens of one request in a step."""

    place: int
    """Its row in the batch."""
    req: Req
    token_ids: list[int]
    """At least one: the accepted drafts and one more."""
    logprobs: Sequence[LogprobRow | None]


@lru_cache
def _ones(count: int) -> Slots:
    """Return `[1] * count`, int64, shared by all callers: do not change it."""
    return np.ones(count, dtype=np.int64)


class ScheduleBatch(PlainScheduleBatch):
    """m4's batch with pieces of prompts, and with drafts.

    `prepare_for_extend` finds the request in pieces, `prepare_for_decode` takes drafts, `filter_batch`
    drops the request in pieces, `get_model_worker_batch` returns m5's.
    """

    def __init__(self, reqs: list[Req], pools: Pools) -> None:
        super().__init__(reqs, pools)
        self.new_lens = NOTHING  # int64 [batch_size]: new tokens of each request in this step
        self.num_prompts = 0  # number of requests that are prefilled in this step, the first ones
        self.chunked_req: Req | None = None  # the prefilled request whose prompt does not end in this step
        self.drafts: list[list[int]] = []  # drafts of this step, by row; empty: there are none

    def prepare_for_extend(self, sampling_info: SamplingBatchInfo) -> None:
        """Give every request a slot for each token to compute, and a row if it has none. Find the request in pieces."""
        super().prepare_for_extend(sampling_info)
        assert self.extend_lens is not None
        self.new_lens, self.num_prompts = np.array(self.extend_lens), len(self.reqs)
        self.output_ids = np.zeros(len(self.reqs), dtype=np.int64)  # so that `mix_with_running` can append decodes
        unfinished = [req for req in self.reqs if len(req.prefix_indices) + req.extend_input_len < len(req.fill_ids)]
        assert len(unfinished) <= 1, "two prompts are in pieces"
        self.chunked_req = unfinished[0] if unfinished else None

    def prepare_for_decode(self, drafts: Sequence[list[int]] = ()) -> None:
        """Prepare the newest token of every request and its `drafts` (by row; empty: there are none). They must have
        room: `check_decode_mem`, `has_room_for`."""
        self.num_prompts, self.chunked_req = 0, None
        if not any(drafts):
            super().prepare_for_decode()
            self.new_lens, self.drafts = _ones(len(self.reqs)), []
            return
        pool, rows = cast(ReqToTokenPool, self.pools.req_to_token_pool), self.req_pool_indices
        assert pool.lens[rows].tolist() == self.seq_lens.tolist(), "a row has slots unknown to the batch"
        last_locs = pool.req_to_token[rows, self.seq_lens - 1].astype(np.int64)
        self.new_lens, self.drafts = np.array([1 + len(own) for own in drafts]), list(drafts)
        after = self.seq_lens + self.new_lens
        slots = self.pools.token_to_kv_pool_allocator.alloc_extend(self.seq_lens, after, last_locs)
        assert slots is not None, "no slots for the drafts after has_room_for"
        pool.append_runs(rows, slots, self.new_lens)
        known = zip(self.output_ids.tolist(), drafts, strict=True)
        self.input_ids = np.array([token_id for newest, own in known for token_id in (newest, *own)])
        self.forward_mode, self.out_cache_loc, self.seq_lens = ForwardMode.TARGET_VERIFY, slots, after
        self.prefix_lens = self.extend_lens = None

    def mix_with_running(self, running: "ScheduleBatch") -> None:
        """Append the requests of a prepared batch of decodes to this prepared batch of prompts."""
        self.drafts = running.drafts and [[] for _ in self.reqs] + running.drafts
        tokens, slots = (self.input_ids, running.input_ids), (self.out_cache_loc, running.out_cache_loc)
        self.new_lens = np.concatenate([self.new_lens, running.new_lens])
        self.merge_batch(running)
        self.input_ids, self.out_cache_loc = np.concatenate(tokens), np.concatenate(slots)
        self.forward_mode, self.prefix_lens, self.extend_lens = ForwardMode.MIXED, None, None

    def filter_batch(self, keep_indices: Sequence[int] | None = None) -> None:
        """Keep only these requests; by default those that run on, less the one in pieces. Their order stays."""
        if keep_indices is None and self.chunked_req is not None:
            super().filter_batch([i for i, req in enumerate(self.reqs) if req is not self.chunked_req])
            self.chunked_req = None
        super().filter_batch(keep_indices)

    def get_model_worker_batch(self) -> ModelWorkerBatch:
        """Return this step as plain data."""
        assert self.sampling_info is not None
        prompts = self.reqs[: self.num_prompts]  # each gets a token, except the one in pieces
        is_decode = self.forward_mode is ForwardMode.DECODE
        return ModelWorkerBatch(
            forward_mode=self.forward_mode,
            rids=self.rids,
            input_ids=self.input_ids,
            req_pool_indices=self.req_pool_indices,
            seq_lens=self.seq_lens,
            out_cache_loc=self.out_cache_loc,
            prefix_lens=None if is_decode else (self.seq_lens - self.new_lens).tolist(),
            extend_lens=None if is_decode else self.new_lens.tolist(),
            prompts_to_rate=self._prompts_to_rate(prompts) if prompts else {},
            sampling_info=self.sampling_info,
            new_lens=self.new_lens,
            sample_lens=[int(req is not self.chunked_req) for req in prompts] + self.new_lens[len(prompts) :].tolist(),
            num_prompts=self.num_prompts,
            num_prompt_tokens=int(self.new_lens[: self.num_prompts].sum()) if prompts else 0,
            spec_info=SpecInput(self.drafts) if self.drafts else None,
        )

    def take_runs(self, output: ModelRunnerOutput) -> list[Run]:
        """Return the tokens of each request, in the order of the batch, and keep the newest ones as the next input."""
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
        newest = [0] * len(self.reqs)  # a request without a token ends now, or is in pieces
        for run in runs:
            counts[run.place], newest[run.place] = len(run.token_ids), run.token_ids[-1]
        self.output_ids = np.array(newest, dtype=np.int64)
        self.sampling_info.advance(
            [token_id for run in runs for token_id in run.token_ids], np.array(counts, dtype=np.int64)
        )
        return runs

    def roll_back(self) -> list[tuple[Req, int]]:
        """Take back the slots of wrong drafts, and free the pages that are empty now. Return the requests that had any,
        and the number of their slots."""
        if not self.drafts:
            return []
        pool, allocator = cast(ReqToTokenPool, self.pools.req_to_token_pool), self.pools.token_to_kv_pool_allocator
        freed: list[Slots] = []
        rolled_back = []
        self.seq_lens = self.seq_lens.copy()
        for place, req in enumerate(self.reqs):
            surplus = int(self.seq_lens[place]) - req.kv_committed_len
            if self.drafts[place] and req.req_pool_idx is not None and surplus > 0:
                freed.append(pool.truncate(req.req_pool_idx, req.kv_committed_len, page_size=allocator.page_size))
                rolled_back.append((req, surplus))
                self.seq_lens[place] = req.kv_committed_len
        if freed:
            allocator.free(np.concatenate(freed))
        self.drafts = []
        return rolled_back

    def pages_for(self, drafts: Sequence[list[int]]) -> int:
        """Return the number of new pages for the next tokens and these drafts."""
        lens = self.seq_lens + 1 + np.array([len(own) for own in drafts])
        return self.pools.token_to_kv_pool_allocator.num_pages_for_extend(self.seq_lens, lens)

    def has_room_for(self, drafts: Sequence[list[int]]) -> bool:
        """Evict until the next tokens and these drafts have room; return whether they have."""
        page_size = self.pools.token_to_kv_pool_allocator.page_size
        return self.pools.make_room(self.pages_for(drafts) * page_size, self.rids)
