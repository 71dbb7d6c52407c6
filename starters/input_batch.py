"""Build the input batch of m3: what the runner remembers of each request, so that messages need only say what changed.

m2 described a batch anew in every step. From m3 on a request is sent in full once, and then only its newest token and
its new blocks are. So the runner has to remember, and to apply every change to the right place: an error is not noticed
at once, but as a wrong token some steps later, or as one request in the memory of another.

Explained in docs/m3_model.md#inputbatch-and-modelinput-one-row-for-all.

    cp starters/input_batch.py my_batch.py
    pytest --part input_batch=my_batch.py:MyInputBatch

The messages are those of `m3_paged_attention/scheduler_output.py`. `CachedRequestState` and `BatchRow` are the engine's
own: `m3_paged_attention/input_batch.py`.
"""

import numpy as np

from m3_paged_attention.input_batch import BatchRow, CachedRequestState
from m3_paged_attention.scheduler_output import SchedulerOutput


class MyInputBatch:
    """The state of all requests of the runner, and their block tables as one array.

    - `states`: a `CachedRequestState` by request id. It has `prompt_token_ids`, `output_token_ids`, `params`,
      `sampling_row` for the sampler, and `table_row`, the request's row of `block_tables`.
    - `block_tables`: int32 `[rows, max_blocks_per_seq]`. The row of a request has the ids of its blocks, in the order
      of its tokens, and 0 behind them. A row belongs to one request, from its first message until it is removed.
    """

    def __init__(self, *, max_num_seqs: int, max_blocks_per_seq: int, block_size: int) -> None:
        """Given, but add what you need to know which rows are free. `block_size`: tokens per block."""
        self.states: dict[str, CachedRequestState] = {}
        self.block_size = block_size
        self.block_tables = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int32)

    def update(self, scheduler_output: SchedulerOutput) -> list[BatchRow]:
        """Apply a message, and return the rows of the step. Do not modify the message, nor the lists in it, now or
        later. In this order:

        1. `finished_req_ids`: these requests are removed. An id that is unknown is ignored. One of these ids may be
           that of a new request of the same message.
        2. `scheduled_new_reqs`, of `NewRequestData`: `states` gets a `CachedRequestState(data, table_row)` in a free
           row, and the row gets `block_ids`. If the id is known, because a step failed and the request starts again,
           the new state replaces the old one. Its row of the step is `BatchRow(state, start, num_tokens, is_prompt)`
           with `start` = `num_computed_tokens`, and `is_prompt` True if that is 0.
        3. `scheduled_resumed_reqs`, of `ResumedReqData`: the request is known. Its output tokens become those of the
           message, and its blocks, all of them, too. Its row of the step: from `num_computed_tokens` on, `is_prompt`
           False.
        4. `scheduled_cached_reqs`, with parallel lists: each request gets its `new_token_ids` behind its output tokens.
           `new_block_ids` is mostly empty. Else it is one block, which holds the token at the position
           `num_computed_tokens`, and its place in the table follows from that: behind the others if that position
           begins a block, or in the place of the last one, of which it is a copy. Its row of the step: one token, from
           `num_computed_tokens` on, `is_prompt` False.

        `num_scheduled_tokens` has the number of new tokens by request id.

        The rows with more than one token come first, then those with one; within each of both in the order above.

        `state.output_token_ids` is one list for the life of a state: `state.sampling_row` has the same. So change it in
        place.

        There may be more requests than rows, because preempted requests keep theirs. Then `block_tables` becomes an
        array with more rows, and the requests keep their rows and what is in them. A row that is free again is used
        again.
        """
        raise NotImplementedError

    def remove(self, request_id: str) -> None:
        """Remove a request; its row is free. Does nothing for an unknown id. Also called by the runner."""
        raise NotImplementedError
