"""Build the composer of m5: the tokens of a step, and in which order they are given away.

A step has a budget of tokens. Every running request needs one, or its stream stops. Drafts of the running requests and
pieces of prompts share what is left. The order decides who waits: decodes first, and no running request ever waits for
the prompt of another one. There is one exception: a waiting request of much higher priority takes the place of running
ones, and can do so only before these have the slots of their next tokens.

Explained in docs/m5_chunked_prefill_spec.md#the-composer-the-order-in-which-a-step-is-filled.

    cp starters/composer.py my_composer.py
    pytest --part composer=my_composer.py:MyDecodeFirst
"""

import numpy as np

from m5_chunked_prefill_spec.batch_composer import LEAST_CHUNK, Work
from m5_chunked_prefill_spec.cost_table import CostTable
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch


class MyDecodeFirst:
    """Every running request gets a token; drafts and prompts share the rest of the budget, to the last token.

    A composer asks the `Work` of the step for at most two batches:

        work.max_num_batched_tokens      the budget of the step, in tokens
        work.num_running                 the running requests: each gets a token from `update_running_batch`
        work.running_lens                int64 array: tokens of each running request with its next one
        work.wants_prefill               whether a prompt waits, or is in pieces
        work.may_preempt                 whether a waiting request may take the place of running ones
        work.update_running_batch(n)     the batch of the running requests: a token for each, and at most n drafts in
                                         all; None if none can run
        work.get_new_batch_prefill(n, bound_by)
                                         a batch of at most n tokens of prompts, the last one perhaps cut; None if n is
                                         0, or if no prompt has room. `bound_by`: the name of the limit behind n, for
                                         the trace; "max_num_batched_tokens" if it is left out
        work.mix(prompts, decodes)       both batches as one

    Such a batch has two int64 arrays, an entry for each request: `new_lens`, its new tokens in this step, drafts
    included, and `seq_lens`, its tokens in all after them. To ask for a batch changes queues and memory: ask for each
    at most once, and return all that you got.
    """

    def __init__(self, *, target_gap_ms: float | None = None, cost_table: CostTable | None = None) -> None:
        """Given. `target_gap_ms`: a step in which requests decode takes no longer, according to the table."""
        self.target_gap_ms, self.cost_table = target_gap_ms, cost_table

    def compose(self, work: Work) -> ScheduleBatch | None:
        """Return the batch of this step; None if no request can run.

        1. Ask for the running batch. Drafts may take all that a token for each running request leaves of the budget;
           if a prompt waits, at most half of it, rounded down.
        2. If a prompt waits, it gets the rest of the budget, to the last token: what the decodes and their drafts did
           not take, by the `new_lens` of their batch. Beside decodes the target limits it as well: `_limit`.
        3. Both batches run as one (`mix`), or the one that there is. If no request can decode, prompts get the whole
           budget, and the target does not matter: no stream waits.

        If a prompt waits and may preempt, ask for the prompts first: they get the budget but for one token for each
        running request, within the target (`_limit`; the decodes then count one new token for each running request,
        and `running_lens` in all). Then ask for the running batch: fewer requests may run now (`num_running`). Drafts
        may take what the prompts and one token for each of these leave.
        """
        raise NotImplementedError

    def _limit(self, work: Work, most: int, new_lens: np.ndarray, seq_lens: np.ndarray) -> tuple[int, str]:
        """Given: return how many of `most` prompt tokens may run beside decodes, and the name of the limit behind it:
        the arguments of `get_new_batch_prefill`. `new_lens`, `seq_lens`: of the decodes, as those of their batch."""
        if self.target_gap_ms is None or self.cost_table is None:
            return most, "max_num_batched_tokens"
        largest = self.cost_table.largest(
            self.target_gap_ms,
            most,
            others=int(new_lens.sum()),
            decode_context=int((new_lens * seq_lens).sum()),
            start=work.prefill_start,
        )
        fitting = max(largest, min(LEAST_CHUNK, most))
        return fitting, "max_num_batched_tokens" if fitting == most else "target_gap_ms"
