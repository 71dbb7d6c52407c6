"""KV memory in slots that requests share, for the fake model: an oracle that knows what every slot must hold.

What the real KV of a token is to a model, the rule's state after that token is here. So a slot that was never written,
was written for other tokens, or was overwritten by another request is noticed as soon as a request reads it. What the
model is to compute comes from `ModelWorkerBatch` and from the rows of `req_to_token`, as for the real runner; only the
tokens that it should have been given are asked of the requests.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from m1_single_request.sampler import LogprobRow, SampledTokens
from m4_radix_cache.forward_batch import ForwardBatch
from m4_radix_cache.model_worker_batch import ForwardMode, ModelWorkerBatch
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_batch import Pools
from tests.testbed import fakes
from tests.testbed.fakes import CPU, letter

UNWRITTEN = -1


def start_of(extra_key: str | None) -> int:
    """The state before the first token: in another namespace (another adapter, say) it is another."""
    return 0 if extra_key is None else crc32(extra_key.encode()) % 2**31


def states_of(token_ids: Iterable[int], extra_key: str | None = None) -> list[int]:
    """What the KV of these tokens must be in a namespace."""
    return fakes.states_of(token_ids, start_of(extra_key))


def answer_of(request: Req, num_tokens: int) -> tuple[int, ...]:
    """The fake model's answer to a request: so many tokens, or as far as the first stop token, which belongs to it."""
    stop_token_ids, start = request.sampling_params.stop_token_ids, start_of(request.extra_key)
    return fakes.answer(request.origin_input_ids, num_tokens, stop_token_ids, seed=request.seed, start=start)


class Row(NamedTuple):
    """What one request sends through the model in a step."""

    request: Req
    start: int
    """Tokens that have their KV."""
    slots: np.ndarray
    """Of all its tokens, those of this step included."""
    states: np.ndarray
    """What these slots must hold after the step."""


class RadixRunner:
    """Runs batches on simulated memory: writes, reads everything that a model would read, and says the next tokens."""

    def __init__(self, pools: Pools, requests: Mapping[str, Req], *, tensors: bool = False) -> None:
        """`requests`: all that ever arrived. With `tensors`, every step is laid out as the real runner does it."""
        self.pools = pools
        self.requests = requests
        self.tensors = tensors
        self.device = CPU
        self.page_size = pools.token_to_kv_pool_allocator.page_size
        self.req_to_token_pool = pools.req_to_token_pool
        self.kv = np.full(pools.token_to_kv_pool_allocator.size + self.page_size, UNWRITTEN, dtype=np.int64)
        """`[slots]`: the state after each slot's token."""
        self.num_written = 0  # slots, in all steps
        self._states: dict[Req, list[int]] = {}

    def run(self, batch: ModelWorkerBatch) -> dict[str, SampledTokens]:
        """Execute a batch; returns the new tokens by request id."""
        self.poison_free_pages()
        rows = self._rows(batch)
        self._write(batch, rows)
        if self.tensors:
            self._check_tensors(batch, rows)
        said = {row.request.rid: self._read_and_say(batch, place, row) for place, row in enumerate(rows)}
        return {rid: sampled for rid, sampled in said.items() if sampled.token_ids}

    def poison_free_pages(self) -> None:
        """Memory without an owner holds nothing that a request may read."""
        is_owned = np.zeros(len(self.kv) // self.page_size, dtype=np.bool_)
        is_owned[self.pools.token_to_kv_pool_allocator.owned_pages()] = True
        self.kv[~np.repeat(is_owned, self.page_size)] = UNWRITTEN

    def states(self, request: Req) -> np.ndarray:
        """What the KV of all of a request's tokens must be."""
        known = self._states.setdefault(request, [])
        if len(known) < request.seqlen:  # what was said before does not change
            known[:] = states_of(request.origin_input_ids + request.output_ids, request.extra_key)
        return np.array(known[: request.seqlen])

    # --- what a bed asks ----------------------------------------------------------------------------------------------

    def held_request_ids(self) -> list[str]:
        """It stores no state of requests."""
        return []

    def is_empty(self) -> bool:
        """Whether what is written belongs to the cache."""
        self.poison_free_pages()
        cache = self.pools.tree_cache
        return int((self.kv != UNWRITTEN).sum()) == cache.evictable_size() + cache.protected_size()

    def num_kv_tokens(self, request_id: str) -> int:
        """How many of a request's tokens have their KV where its row says, from the first one on."""
        request = self.requests[request_id]
        if request.req_pool_idx is None:
            return 0
        slots = self.req_to_token_pool.read(request.req_pool_idx, 0, request.kv_allocated_len)
        expected = self.states(request)[: len(slots)]
        wrong = np.flatnonzero(self.kv[slots[: len(expected)]] != expected)
        return int(wrong[0]) if len(wrong) else len(expected)

    # --- one step -----------------------------------------------------------------------------------------------------

    def _rows(self, batch: ModelWorkerBatch) -> list[Row]:
        """The rows of a batch, with everything that is said twice compared."""
        count, is_extend = len(batch.rids), batch.forward_mode is ForwardMode.EXTEND
        assert count and len(set(batch.rids)) == len(set(batch.req_pool_indices.tolist())) == count
        assert len(batch.req_pool_indices) == len(batch.seq_lens) == len(batch.sampling_info) == count
        assert (batch.prefix_lens is None, batch.extend_lens is None) == (not is_extend, not is_extend)
        extend_lens = batch.extend_lens if batch.extend_lens is not None else [1] * count
        assert all(n > 0 for n in extend_lens), "a request has nothing to compute"
        assert sorted(extend_lens, key=lambda n: n == 1) == list(extend_lens), "long rows first"
        assert sum(extend_lens) == len(batch.input_ids) == len(batch.out_cache_loc)
        rows, first = [], 0
        columns = (batch.rids, batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), extend_lens)
        for place, (rid, row, seq_len, extend) in enumerate(zip(*columns, strict=True)):
            request = self.requests[rid]
            tokens, start, last = request.origin_input_ids + request.output_ids, seq_len - extend, first + extend
            assert row == request.req_pool_idx, f"{rid} has another row"
            assert seq_len == len(tokens), f"{rid} has {len(tokens)} tokens, and {seq_len} after this step"
            assert batch.prefix_lens is None or batch.prefix_lens[place] == start
            assert batch.input_ids[first:last].tolist() == tokens[start:], f"{rid} is given wrong tokens"
            slots = self.req_to_token_pool.read(row, 0, seq_len)
            assert batch.out_cache_loc[first:last].tolist() == slots[start:].tolist()
            self._check_sampling(batch, place, request)
            rows.append(Row(request, start, slots, self.states(request)))
            first = last
        return rows

    def _check_sampling(self, batch: ModelWorkerBatch, place: int, request: Req) -> None:
        """The parameters of a row are its request's, and its history is what the request has said."""
        info, rid = batch.sampling_info, request.rid
        assert info.params[place] is request.sampling_params, f"{rid} is sampled with another request's parameters"
        assert info.seeds[place] == request.seed and info.positions[place] == len(request.output_ids), rid
        if info.numbers["penalised"][place]:
            assert info.output_counts is not None and info.seen is not None, f"the penalties of {rid} are forgotten"
            counts = np.bincount(request.output_ids, minlength=info.vocab_size)
            assert info.output_counts[place].tolist() == counts.tolist(), f"{rid} has another history of outputs"
            seen = sorted(set(request.origin_input_ids + request.output_ids))
            assert np.flatnonzero(info.seen[place].numpy()).tolist() == seen, f"{rid} has another history"

    def _write(self, batch: ModelWorkerBatch, rows: list[Row]) -> None:
        """Write the new tokens' KV, all of it before anybody reads."""
        slots = batch.out_cache_loc
        assert len(np.unique(slots)) == len(slots), "two tokens are written into the same slot"
        pages = np.unique(slots // self.page_size)
        assert 0 not in pages, "page 0 is written"
        owned = self.pools.token_to_kv_pool_allocator.owned_pages()
        assert np.isin(pages, owned).all(), f"pages {np.setdiff1d(pages, owned)} are written, but free"
        self.kv[slots] = np.concatenate([row.states[row.start :] for row in rows])
        self.num_written += len(slots)

    def _read_and_say(self, batch: ModelWorkerBatch, place: int, row: Row) -> SampledTokens:
        """Look at the KV of all of a row's tokens, and choose the next one by the rule."""
        request = row.request
        self._check_kv(row)
        prompt_logprobs = None
        assert (request.rid in batch.prompts_to_rate) == (request.wants_prompt_logprobs and row.start == 0)
        if request.rid in batch.prompts_to_rate:
            prompt, num_best = batch.prompts_to_rate[request.rid]
            assert (prompt, num_best) == (request.origin_input_ids, request.sampling_params.prompt_logprobs)
            prompt_logprobs = tuple(LogprobRow((token_id,), (0.0,), (1,)) for token_id in prompt[1:])
        token_id = letter(int(row.states[-1]), batch.sampling_info.seeds[place])
        return SampledTokens((token_id,), (None,), prompt_logprobs)

    def _check_kv(self, row: Row) -> None:
        wrong = np.flatnonzero(self.kv[row.slots] != row.states)
        assert not len(wrong), f"{row.request.rid}: the KV of its tokens {wrong} is missing, or another request's"

    def _check_tensors(self, batch: ModelWorkerBatch, rows: list[Row]) -> None:
        forward_batch = ForwardBatch.init_new(batch, self)
        metadata: Any = forward_batch.attn_metadata
        assert (forward_batch.forward_mode, forward_batch.batch_size) == (batch.forward_mode, len(rows))
        assert metadata.slot_mapping.tolist() == batch.out_cache_loc.tolist()
        assert forward_batch.input_ids.tolist() == batch.input_ids.tolist()
        places = [place for row in rows for place in range(row.start, len(row.slots))]
        assert forward_batch.positions.tolist() == places
        ends = np.cumsum([len(row.slots) - row.start for row in rows])
        last = forward_batch.logits_indices
        assert (list(range(len(places))) if last is None else last.tolist()) == (ends - 1).tolist()
        for table, row in zip(metadata.block_tables.tolist(), rows, strict=True):
            pages = (row.slots[:: self.page_size] // self.page_size).tolist()
            assert table[: len(pages)] == pages and not any(table[len(pages) :])
