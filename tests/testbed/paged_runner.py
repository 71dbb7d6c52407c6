"""KV memory in blocks, for the fake model: an oracle that knows what every slot must hold.

What the real KV of a token is to a model, the rule's state after that token is here. So a slot that was never written,
was written for other tokens, or was overwritten by another request is noticed as soon as a request reads it. The real
`InputBatch` keeps the block tables, from the messages alone; the KV manager names the owners of blocks.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from m1_single_request.sampler import LogprobRow, SampledTokens
from m3_paged_attention.input_batch import BatchRow, InputBatch
from m3_paged_attention.model_input import make_model_input
from m3_paged_attention.scheduler_output import SchedulerOutput
from tests.testbed.fakes import letter, states_of

Block = list[int | None]  # the states after its tokens; None: never written, or given back since


class PagedRunner:
    """Runs decisions on simulated memory: swaps in, swaps out, copies, writes, reads, and then says the next tokens."""

    def __init__(
        self, kv_manager: Any, *, num_host_blocks: int, max_num_seqs: int, max_model_len: int, tensors: bool = False
    ) -> None:
        """With `tensors`, every step is laid out as the real runner does it, and compared."""
        self.kv_manager = kv_manager
        self.block_size = kv_manager.block_size
        self.tensors = tensors
        self.device: list[Block] = [self._new_block() for _ in range(kv_manager.num_blocks + 1)]
        self.host: list[Block] = [self._new_block() for _ in range(num_host_blocks)]
        self.input_batch = InputBatch(
            max_num_seqs=max_num_seqs,
            max_blocks_per_seq=kv_manager.blocks_for(max_model_len),
            block_size=self.block_size,
        )
        self.num_written = 0  # slots, in all steps

    def run(self, output: SchedulerOutput) -> dict[str, SampledTokens]:
        """Execute a decision; returns the new tokens by request id."""
        rows = self.input_batch.update(output)
        self._move(output)
        self.poison_free_blocks()
        lens = [row.num_tokens for row in rows]
        assert lens == [n for n in lens if n > 1] + [n for n in lens if n == 1], "long rows first"
        assert {row.state.req_id: row.num_tokens for row in rows} == output.num_scheduled_tokens
        slots = self._write(rows)
        if self.tensors and rows:
            self._check_tensors(rows, slots)
        return {row.state.req_id: self._read_and_say(row) for row in rows}

    def poison_free_blocks(self) -> None:
        """Memory without an owner holds nothing that a request may read."""
        owned = {block_id for block_ids in self.kv_manager.owned().values() for block_id in block_ids}
        on_host = {block_id for block_ids in self.kv_manager.swapped().values() for block_id in block_ids}
        empty = self._new_block()
        for memory, kept in ((self.device, owned), (self.host, on_host)):
            for block_id, block in enumerate(memory):
                if block_id not in kept and block != empty:
                    memory[block_id] = self._new_block()

    # --- what a bed asks ----------------------------------------------------------------------------------------------

    def free_request_cache(self, request_id: str) -> None:
        """Forget a request; nothing happens if it is unknown."""
        self.input_batch.remove(request_id)

    def held_request_ids(self) -> list[str]:
        return list(self.input_batch.states)

    def is_empty(self) -> bool:
        """Whether nothing is left of any request."""
        self.poison_free_blocks()
        slots = [state for memory in (self.device, self.host) for block in memory for state in block]
        return not self.input_batch.states and set(slots) == {None}

    def num_kv_tokens(self, request_id: str) -> int:
        """How many of a request's tokens have their KV where its blocks say, from the first one on."""
        state = self.input_batch.states.get(request_id)
        if state is None:
            return 0
        there = self._kv(self.kv_manager.block_ids(request_id))
        expected = states_of(state.prompt_token_ids + state.output_token_ids)
        pairs = enumerate(zip(there, expected, strict=False))
        return next((place for place, (found, right) in pairs if found != right), min(len(there), len(expected)))

    # --- one step -----------------------------------------------------------------------------------------------------

    def _new_block(self) -> Block:
        return [None] * self.block_size

    def _move(self, output: SchedulerOutput) -> None:
        moves = (
            (output.blocks_to_swap_in, self.host, self.device),
            (output.blocks_to_swap_out, self.device, self.host),
            (output.blocks_to_copy, self.device, self.device),
        )
        for pairs, source, target in moves:
            targets = [to for _, to in pairs]
            assert len(set(targets)) == len(targets), "a block is a target twice"
            assert source is self.host or 0 not in [block_id for block_id, _ in pairs], "block 0 is read"
            assert target is self.host or 0 not in targets, "block 0 is written"
            read = [list(source[block_id]) for block_id, _ in pairs]
            for block_id, block in zip(targets, read, strict=True):
                assert source is not target or any(state is not None for state in block), "an empty block is copied"
                target[block_id] = block

    def _write(self, rows: Sequence[BatchRow]) -> list[int]:
        """Write the new tokens' KV, all of it before anybody reads; returns the slots in the order of the rows."""
        written: dict[int, str] = {}
        for row in rows:
            request_id, end = row.state.req_id, row.start + row.num_tokens
            token_ids = row.state.prompt_token_ids + row.state.output_token_ids
            assert end == len(token_ids), f"{request_id} has {len(token_ids)} tokens, and {end} after this step"
            table = self._table(row)
            assert table == self.kv_manager.block_ids(request_id), f"{request_id} has other blocks than it was told of"
            states = states_of(token_ids)
            for position in range(row.start, end):
                block_id, offset = table[position // self.block_size], position % self.block_size
                slot = block_id * self.block_size + offset
                assert block_id > 0, f"{request_id} writes into block 0"
                assert slot not in written, f"{request_id} and {written[slot]} write into the same slot"
                written[slot] = request_id
                self.device[block_id][offset] = states[position]
        self.num_written += len(written)
        return list(written)

    def _read_and_say(self, row: BatchRow) -> SampledTokens:
        """Look at the KV of all of a row's tokens, and choose the next one by the rule."""
        state, end = row.state, row.start + row.num_tokens
        expected = states_of(state.prompt_token_ids + state.output_token_ids)
        found = self._kv(self._table(row))[:end]
        wrong = [position for position, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
        assert not wrong, f"{state.req_id}: the KV of its tokens {wrong} is missing, or another request's"
        prompt_logprobs = None
        if state.params.prompt_logprobs is not None and row.is_prompt:
            assert row.num_tokens == len(state.prompt_token_ids), "they need the whole prompt"
            prompt_logprobs = tuple(LogprobRow((token_id,), (0.0,), (1,)) for token_id in state.prompt_token_ids[1:])
        return SampledTokens((letter(expected[-1], state.sampling_row.seed),), (None,), prompt_logprobs)

    def _table(self, row: BatchRow) -> list[int]:
        """A row's blocks, as far as its tokens reach."""
        num_blocks = self.kv_manager.blocks_for(row.start + row.num_tokens)
        table = self.input_batch.block_tables[row.state.table_row].tolist()
        assert not any(table[num_blocks:]), f"{row.state.req_id} has more blocks than it needs: {table}"
        return table[:num_blocks]

    def _kv(self, block_ids: Iterable[int]) -> Block:
        return [state for block_id in block_ids for state in self.device[block_id]]

    def _check_tensors(self, rows: Sequence[BatchRow], slots: list[int]) -> None:
        model_input = make_model_input(rows, self.input_batch.block_tables, self.block_size)
        metadata = model_input.attn_metadata
        assert metadata.slot_mapping.tolist() == slots
        tokens = [t for row in rows for t in row.state.token_ids(row.start, row.start + row.num_tokens)]
        assert model_input.input_ids.tolist() == tokens
        places = [place for row in rows for place in range(row.start, row.start + row.num_tokens)]
        assert model_input.positions.tolist() == places
        for table, row in zip(metadata.block_tables.tolist(), rows, strict=True):
            known = self._table(row)
            assert table[: len(known)] == known and not any(table[len(known) :])
