"""Input batch: the runner's state of each request between steps (tokens, sampling parameters, block table).

The scheduler sends a request in full once, and later only changes. m2's runner stored the slot and
its length. Here `update` applies the changes: it appends the newest token, appends new blocks to the block table, and
replaces a copied block. It returns the rows of the step, those with several new tokens first. vLLM:
`v1/worker/gpu_input_batch.py` and `_update_states` in `gpu_model_runner.py`.
"""

from typing import NamedTuple

import numpy as np

from m3_paged_attention.row_sampler import SamplingRow
from m3_paged_attention.scheduler_output import NewRequestData, SchedulerOutput


class CachedRequestState:
    """The runner's state of one request."""

    def __init__(self, data: NewRequestData, table_row: int) -> None:
        self.req_id = data.req_id
        self.prompt_token_ids = data.prompt_token_ids
        self.output_token_ids: list[int] = []
        self.params = data.sampling_params
        self.table_row = table_row
        self.sampling_row = SamplingRow(
            params=data.sampling_params,
            seed=data.seed,
            prompt_token_ids=data.prompt_token_ids,
            output_token_ids=self.output_token_ids,
            stop_ids=data.stop_token_ids,
        )

    def token_ids(self, start: int, end: int) -> list[int]:
        """Return the tokens at positions `start` to `end` of prompt and output together."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return (self.prompt_token_ids[start:] + self.output_token_ids)[: end - start]


class BatchRow(NamedTuple):
    """The new tokens of one request in a step."""

    state: CachedRequestState
    start: int  # position of the first new token
    num_tokens: int
    is_prompt: bool  # True if the prompt runs in this step, from its first token on


FIRST_ROWS = 64  # initial rows of the block tables, which grow with the number of requests


class InputBatch:
    """The state of all requests of the runner, and their block tables as one array."""

    def __init__(self, *, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        self.states: dict[str, CachedRequestState] = {}
        self.block_size = block_size
        num_rows = min(max_num_seqs, FIRST_ROWS)
        self.block_tables = np.zeros((num_rows, max_blocks_per_seq), dtype=np.int32)  # one row per request
        self._free_rows = list(range(num_rows))[::-1]

    def update(self, scheduler_output: SchedulerOutput) -> list[BatchRow]:
        """Apply the scheduler's output; return the rows of the step, those with more than one new token first."""
        for request_id in scheduler_output.finished_req_ids:
            self.remove(request_id)
        counts = scheduler_output.num_scheduled_tokens
        long: list[BatchRow] = []
        short: list[BatchRow] = []
        for new in scheduler_output.scheduled_new_reqs:
            self.remove(new.req_id)  # it is there if a step failed after it was sent, and it starts again
            state = self.states[new.req_id] = CachedRequestState(new, self._take_row())
            self._set_blocks(state, new.block_ids)
            row = BatchRow(state, new.num_computed_tokens, counts[new.req_id], new.num_computed_tokens == 0)
            (long if row.num_tokens > 1 else short).append(row)
        for resumed in scheduler_output.scheduled_resumed_reqs:
            state = self.states[resumed.req_id]
            state.output_token_ids[:] = resumed.output_token_ids
            self._set_blocks(state, resumed.block_ids)
            row = BatchRow(state, resumed.num_computed_tokens, counts[resumed.req_id], False)
            (long if row.num_tokens > 1 else short).append(row)
        cached = scheduler_output.scheduled_cached_reqs
        columns = (cached.req_ids, cached.new_token_ids, cached.new_block_ids, cached.num_computed_tokens)
        for request_id, token_ids, block_ids, start in zip(*columns, strict=True):
            state = self.states[request_id]
            state.output_token_ids += token_ids
            if block_ids:  # appended, or a copy that replaces the last block; the last one holds position `start`
                end = start // self.block_size + 1
                self.block_tables[state.table_row, end - len(block_ids) : end] = block_ids
            short.append(BatchRow(state, start, 1, False))
        return long + short

    def remove(self, request_id: str) -> None:
        """Remove a request; does nothing for an unknown id."""
        state = self.states.pop(request_id, None)
        if state is not None:
            self._free_rows.append(state.table_row)

    def _take_row(self) -> int:
        """Return a free row. Preempted requests keep theirs, so there may be more rows than running requests."""
        if not self._free_rows:
            num_rows = len(self.block_tables)
            self.block_tables = np.concatenate([self.block_tables, np.zeros_like(self.block_tables)])
            self._free_rows = list(range(num_rows, 2 * num_rows))[::-1]
        return self._free_rows.pop()

    def _set_blocks(self, state: CachedRequestState, block_ids: list[int]) -> None:
        table = self.block_tables[state.table_row]
        table[:] = 0
        table[: len(block_ids)] = block_ids
