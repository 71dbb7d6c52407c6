"""Output of a step with drafts, and the totals of an engine with speculation."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from m3_paged_attention.outputs import ModelRunnerOutput as PlainModelRunnerOutput
from m4_radix_cache.outputs import EngineStats as RadixStats


@dataclass
class ModelRunnerOutput(PlainModelRunnerOutput):
    """Output of one step. A request may have several tokens, or none while its prompt is in pieces."""

    draft_token_ids: Mapping[str, list[int]] = field(default_factory=dict)
    """The drafts that were verified, by request id."""


@dataclass(frozen=True)
class EngineStats(RadixStats):
    """m4's totals, and those of speculation."""

    num_draft_tokens: int
    """Number of drafts that were verified."""
    num_accepted_tokens: int
    """Number of accepted drafts."""
    num_verifications: int
    """Number of verifications, one per request and step with drafts. Each gives one token more than accepted drafts."""

    @property
    def accept_length(self) -> float:
        """Return the mean number of tokens of a verification; 1: no draft accepted. SGLang: `spec_accept_length`."""
        return 1 + self.num_accepted_tokens / self.num_verifications if self.num_verifications else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Return the share of accepted drafts among all drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0
