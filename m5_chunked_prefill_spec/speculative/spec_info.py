"""What a step is told of the guesses it is to verify.

A guess, or draft, costs little to make and, beside the token that is due anyway, little to verify: the model reads its
weights once for all of them. SGLang: `SpeculativeAlgorithm` and `SpecInput` in `speculative/spec_info.py`; vLLM:
`SpecDecodeMetadata`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from torch import Tensor

UNKNOWN = -1
"""A draft that the draft model will make on the device: the scheduler knows only that there will be one."""


class SpeculativeAlgorithm(Enum):
    """Who guesses."""

    NONE = "none"
    """Nobody."""
    NGRAM = "ngram"
    """What followed the same tokens before."""
    DRAFT_MODEL = "draft_model"
    """A smaller model."""

    @classmethod
    def from_string(cls, method: str | None) -> "SpeculativeAlgorithm":
        """The algorithm that `SpeculativeConfig.method` names."""
        return cls.NONE if method is None else cls(method)


@dataclass(frozen=True)
class SpecInput:
    """The drafts of a step, a chain for each request. (A tree would name each draft's parent as well.)"""

    draft_token_ids: list[list[int]]
    """By row of the batch; `UNKNOWN` where the device makes them."""

    @property
    def num_draft_tokens(self) -> list[int]:
        """By row."""
        return [len(drafts) for drafts in self.draft_token_ids]


class Drafts(NamedTuple):
    """The drafts of a step, all of them known."""

    token_ids: list[list[int]]
    """By row of the batch."""
    probs: Tensor | None
    """float64 `[all drafts, vocab]`: the distribution that each was drawn from, row after row. None: all were certain,
    and drawn from nothing."""
