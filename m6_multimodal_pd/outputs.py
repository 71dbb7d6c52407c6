"""The totals of an engine that sees."""

from dataclasses import dataclass

from m1_single_request.outputs import EngineStats as SingleRequestStats


@dataclass(frozen=True)
class EngineStats(SingleRequestStats):
    """m5's totals and sizes (in tokens), and what the vision tower did."""

    max_total_tokens: int
    """All that the KV memory has room for."""
    available_size: int
    """Free."""
    evictable_size: int
    """Cached, and nobody uses it now."""
    protected_size: int
    """Cached, and locked by requests that run."""
    num_cached_tokens: int
    """Tokens of admitted requests that were found in the cache, in all."""
    num_evicted_tokens: int
    """Tokens that had to leave the cache, in all."""
    num_retractions: int
    """How often a running request lost its place."""
    num_draft_tokens: int
    """Tokens that were guessed and verified, in all."""
    num_accepted_tokens: int
    """Those among them that were right."""
    num_verifications: int
    """How often a request's guesses were verified: each brings one token more than were right."""
    num_encoder_runs: int
    """How often the vision tower ran; once for all new items of a step."""
    num_encoded_items: int
    """Images and videos that it encoded, in all."""
    num_encoded_tokens: int
    """Embeddings that it made, in all."""
    num_encoder_hits: int
    """How often a piece of a prompt found a picture encoded already."""
    encoder_seconds: float
    """The tower's time, in all."""
    num_evicted_items: int
    """Items whose embeddings had to leave their cache, in all."""
    embedding_cache_bytes: int
    """What that cache holds now."""

    @property
    def hit_rate(self) -> float:
        """The share of all tokens to be prefilled that were found in the cache."""
        total = self.num_cached_tokens + self.num_prompt_tokens
        return self.num_cached_tokens / total if total else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens that a verification brought, on average; 1 would be none right. SGLang: `spec_accept_length`."""
        return 1 + self.num_accepted_tokens / self.num_verifications if self.num_verifications else 0.0

    @property
    def acceptance_rate(self) -> float:
        """The share of all guesses that were right."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0
