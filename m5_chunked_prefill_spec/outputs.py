"""What comes back from a step with guesses, and the totals of an engine that guesses."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from m3_paged_attention.outputs import ModelRunnerOutput as PlainModelRunnerOutput
from m4_radix_cache.outputs import EngineStats as RadixStats


@dataclass(frozen=True)
class ModelRunnerOutput(PlainModelRunnerOutput):
    """What one step made; a request may have several tokens, or none while its prompt is in pieces."""

    draft_token_ids: Mapping[str, list[int]] = field(default_factory=dict)
    """The guesses that were verified, by request id."""


@dataclass(frozen=True)
class EngineStats(RadixStats):
    """m4's totals, and those of speculation."""

    num_draft_tokens: int
    """Tokens that were guessed and verified, in all."""
    num_accepted_tokens: int
    """Those among them that were right."""
    num_verifications: int
    """How often a request's guesses were verified: each brings one token more than were right."""

    @property
    def accept_length(self) -> float:
        """Tokens that a verification brought, on average; 1 would be none right. SGLang: `spec_accept_length`."""
        return 1 + self.num_accepted_tokens / self.num_verifications if self.num_verifications else 0.0

    @property
    def acceptance_rate(self) -> float:
        """The share of all guesses that were right."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0
