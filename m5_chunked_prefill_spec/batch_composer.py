"""What a step is filled with: the two schedules, to be read side by side.

m4 ran prompts or decodes, and whoever was in the middle of an answer waited while prompts kept coming. Here both share
a step and its budget of tokens, and the order in which they are served is all that differs:

    decode_first     | d d d d d | guesses | piece of a prompt ............... |   nobody waits
    prefill_first    | piece of a prompt .................................... |   then, without prompts, | d d d d d |

vLLM V1 serves those who run first (`v1/core/sched/scheduler.py`); SGLang serves prompts first, and mixes with
`enable_mixed_chunk`.
"""

from typing import Protocol

from m5_chunked_prefill_spec.cost_table import CostTable
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch

LEAST_CHUNK = 16
"""Tokens of a prompt that a step takes whatever the target: it must come to an end."""


class Work(Protocol):
    """What a composer may ask of the scheduler, each at most once in a step."""

    max_num_batched_tokens: int

    @property
    def num_running(self) -> int:
        """Requests that would get a token from `update_running_batch`."""
        ...

    @property
    def wants_prefill(self) -> bool:
        """Whether a prompt waits, or is computed in part."""
        ...

    def update_running_batch(self, max_draft_tokens: int) -> ScheduleBatch | None:
        """A token for everybody who runs, and at most so many guesses for all together. None: nobody can go on."""
        ...

    @property
    def prefill_start(self) -> int:
        """Tokens that the prompt that is computed in part has behind it."""
        ...

    def get_new_batch_prefill(self, num_tokens: int, bound_by: str = ...) -> ScheduleBatch | None:
        """Prompts, or pieces of them, of at most so many tokens. None: none fits. `bound_by`: the limit behind it."""
        ...

    def mix(self, prompts: ScheduleBatch, decodes: ScheduleBatch) -> ScheduleBatch:
        """Both in one batch."""
        ...


class DecodeFirst:
    """Everybody who runs gets a token; guesses and prompts share the rest, to the last token.

    Where a prompt wants it guesses get at most half of the rest: they may be wrong, a prompt's tokens never are.
    """

    def __init__(self, *, target_gap_ms: float | None = None, cost_table: CostTable | None = None) -> None:
        """`target_gap_ms`: no piece of a prompt makes a step longer, by the table."""
        self.target_gap_ms, self.cost_table = target_gap_ms, cost_table

    def compose(self, work: Work) -> ScheduleBatch | None:
        """The step's batch; None: nothing can run."""
        left = work.max_num_batched_tokens - work.num_running
        decodes = work.update_running_batch(left // 2 if work.wants_prefill else left)
        if decodes is None:
            return work.get_new_batch_prefill(work.max_num_batched_tokens)
        used = int(decodes.new_lens.sum())
        left = work.max_num_batched_tokens - used
        fitting = self._fitting(left, work.prefill_start, decodes)
        bound_by = "max_num_batched_tokens" if fitting == left else "target_gap_ms"
        prompts = work.get_new_batch_prefill(fitting, bound_by)
        return decodes if prompts is None else work.mix(prompts, decodes)

    def _fitting(self, most: int, start: int, decodes: ScheduleBatch) -> int:
        """How many of `most` tokens of a prompt, `start` tokens into it, may go beside these decodes."""
        if self.target_gap_ms is None or self.cost_table is None:
            return most
        others, context = int(decodes.new_lens.sum()), int((decodes.new_lens * decodes.seq_lens).sum())
        largest = self.cost_table.largest(self.target_gap_ms, most, others=others, decode_context=context, start=start)
        return max(largest, min(LEAST_CHUNK, most))


class PrefillFirst:
    """Prompts as long as there are any, alone; everybody else waits for them."""

    def compose(self, work: Work) -> ScheduleBatch | None:
        """The step's batch; None: nothing can run."""
        budget = work.max_num_batched_tokens
        return work.get_new_batch_prefill(budget) or work.update_running_batch(budget - work.num_running)
