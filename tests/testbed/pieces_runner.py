"""The oracle for steps of pieces, decodes and guesses: simulated memory that also knows what a guess must leave in it.

As `RadixRunner`, but a row may end before its prompt does, and may go on behind what is certain: then what its slots
must hold is the rule's state after tokens and guesses. Guesses are read by the rule itself, so that a request gets as
many tokens as the real model would give it.
"""

from itertools import accumulate
from typing import Any

import numpy as np

from m1_single_request.sampler import LogprobRow, SampledTokens
from m5_chunked_prefill_spec.forward_batch import ForwardBatch
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from tests.testbed.fakes import after, letter
from tests.testbed.radix_runner import RadixRunner, Row


class PiecesRunner(RadixRunner):
    """Runs m5's batches."""

    of_pieces: dict[str, tuple[LogprobRow, ...]]
    """What the last step said of the prompts of those that got no token, by request id."""
    guesses: dict[str, list[int]]
    """What was guessed in the last step, by request id."""

    def run(self, batch: Any) -> dict[str, SampledTokens]:
        """Execute a batch; returns the new tokens of those that got any."""
        self.of_pieces = {}
        drafts = batch.spec_info.draft_token_ids if batch.spec_info is not None else [[] for _ in batch.rids]
        self.guesses = dict(zip(batch.rids, drafts, strict=True))
        return super().run(batch)

    def _rows(self, batch: ModelWorkerBatch) -> list[Row]:  # type: ignore[override]
        """The rows of a batch, with everything that is said twice compared. They stand in any order."""
        count, new_lens = len(batch.rids), batch.new_lens.tolist()
        assert count and len(set(batch.rids)) == len(set(batch.req_pool_indices.tolist())) == count
        assert len(batch.req_pool_indices) == len(batch.seq_lens) == len(batch.sampling_info) == count
        assert len(batch.sample_lens) == len(new_lens) == len(self.guesses) == count
        assert all(n > 0 for n in new_lens), "a request has nothing to compute"
        assert sum(new_lens) == len(batch.input_ids) == len(batch.out_cache_loc)
        assert batch.num_prompt_tokens == sum(new_lens[: batch.num_prompts])
        rows, first = [], 0
        for place, rid in enumerate(batch.rids):
            row, last = self._row(batch, place, self.guesses[rid]), first + new_lens[place]
            tokens = row.request.origin_input_ids + row.request.output_ids + self.guesses[rid]
            seq_len = len(row.slots)
            assert batch.input_ids[first:last].tolist() == tokens[row.start : seq_len], f"{rid} is given wrong tokens"
            assert batch.out_cache_loc[first:last].tolist() == row.slots[row.start :].tolist()
            self._check_sampling(batch, place, row.request)
            rows.append(row)
            first = last
        return rows

    def _row(self, batch: ModelWorkerBatch, place: int, guesses: list[int]) -> Row:
        """What one request sends: a prompt or a piece of it, or its newest token and guesses."""
        rid, seq_len, new_len = batch.rids[place], int(batch.seq_lens[place]), int(batch.new_lens[place])
        request, row = self.requests[rid], int(batch.req_pool_indices[place])
        assert row == request.req_pool_idx, f"{rid} has another row"
        if place < batch.num_prompts:
            assert not guesses and seq_len <= request.seqlen
            assert batch.sample_lens[place] == (seq_len == request.seqlen), "a piece gets no token, a whole prompt one"
        else:
            assert seq_len == request.seqlen + len(guesses) and new_len == batch.sample_lens[place] == 1 + len(guesses)
        known = self.states(request)
        states = np.array([*known, *list(accumulate(guesses, after, initial=int(known[-1])))[1:]])
        return Row(request, seq_len - new_len, self.req_to_token_pool.read(row, 0, seq_len), states[:seq_len])

    def _read_and_say(self, batch: Any, place: int, row: Row) -> SampledTokens:
        """Look at the KV of all of a row's tokens; then the next token by the rule, as long as guesses are right."""
        self._check_kv(row)
        rid, of_prompt = row.request.rid, self._rate(batch, place, row)
        if not batch.sample_lens[place]:
            if of_prompt is not None:
                self.of_pieces[rid] = of_prompt
            return SampledTokens((), ())
        said: list[int] = []
        for guess, state in zip([*self.guesses[rid], None], row.states[-batch.sample_lens[place] :], strict=True):
            said.append(letter(int(state), batch.sampling_info.seeds[place]))
            if said[-1] != guess:
                break
        return SampledTokens(tuple(said), (None,) * len(said), of_prompt)

    def _rate(self, batch: Any, place: int, row: Row) -> tuple[LogprobRow, ...] | None:
        """What a prompt's tokens are rated with: each with its place, so that a piece that is missing shows."""
        request, end = row.request, len(row.slots)
        is_asked = place < batch.num_prompts and request.wants_prompt_logprobs
        assert (request.rid in batch.prompts_to_rate) == is_asked
        if not is_asked:
            return None
        prompt, num_best = batch.prompts_to_rate[request.rid]
        assert num_best == request.sampling_params.prompt_logprobs
        assert prompt == request.origin_input_ids[row.start : end + 1], "this piece, and the next token"
        assert len(request.sequence.prompt_logprobs or [None]) == max(row.start, 0) + 1, "no piece is left out"
        return tuple(
            LogprobRow((token_id,), (-float(row.start + number),), (1,)) for number, token_id in enumerate(prompt[1:])
        )

    def _check_tensors(self, batch: Any, rows: list[Row]) -> None:
        """The layout on the device against one that is made by loops: those with several new tokens first."""
        layout = ForwardBatch.init_new(batch, self)
        lens = [len(row.slots) - row.start for row in rows]
        order = [i for i, n in enumerate(lens) if n > 1] + [i for i, n in enumerate(lens) if n == 1]
        starts, total = {}, 0
        for place in order:
            starts[place] = total
            total += lens[place]
        metadata: Any = layout.attn_metadata
        assert layout.positions.tolist() == [p for i in order for p in range(rows[i].start, len(rows[i].slots))]
        assert metadata.slot_mapping.tolist() == [s for i in order for s in rows[i].slots[rows[i].start :].tolist()]
        assert layout.starts.tolist() == [starts[i] for i in range(len(rows))]
        looked_at = [
            starts[i] + lens[i] - count + number for i, count in enumerate(batch.sample_lens) for number in range(count)
        ]
        found = layout.logits_indices
        assert (list(range(total)) if found is None else found.tolist()) == looked_at
        for table, place in zip(metadata.block_tables.tolist(), order, strict=True):
            pages = (rows[place].slots[:: self.page_size] // self.page_size).tolist()
            assert table[: len(pages)] == pages and not any(table[len(pages) :])
