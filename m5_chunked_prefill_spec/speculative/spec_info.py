"""The drafts of one step, on their way from the scheduler to the model runner.

A draft is a guessed next token. Its verification is cheap: the forward that computes the newest token reads the weights
once for all tokens of the step. SGLang: `SpecInput` in `speculative/spec_info.py`; vLLM: `SpecDecodeMetadata`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

UNKNOWN = -1
"""Placeholder for a draft that the draft model makes on the device: the scheduler decides the number of drafts only."""


@dataclass(frozen=True)
class SpecInput:
    """The drafts of a step, a chain for each request. (A tree would also store the parent of each draft.)"""

    draft_token_ids: list[list[int]]
    """By row of the batch; `UNKNOWN` where the draft model makes them."""

    @property
    def num_draft_tokens(self) -> list[int]:
        """Number of drafts by row of the batch."""
        return [len(drafts) for drafts in self.draft_token_ids]


class Drafts(NamedTuple):
    """The drafts of a step with their token ids."""

    token_ids: list[list[int]]
    """By row of the batch."""
    probs: Tensor | None
    """float32 `[all drafts, vocab]`: the distribution from which each draft was drawn, row after row. None: no draft
    was drawn."""
