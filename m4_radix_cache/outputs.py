"""The numbers that only an engine with a prefix cache has; what comes back from a step is m3's `ModelRunnerOutput`."""

from dataclasses import dataclass

from m1_single_request.outputs import EngineStats as SingleRequestStats


@dataclass(frozen=True)
class EngineStats(SingleRequestStats):
    """m1's totals, and the state of the cache.

    Sizes are in tokens; what they lack of `max_total_tokens` is in pages that running requests own. `num_prompt_tokens`
    counts all tokens that were prefilled, a retracted request's again, its outputs included.
    """

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

    @property
    def hit_rate(self) -> float:
        """The share of all tokens to be prefilled that were found in the cache."""
        total = self.num_cached_tokens + self.num_prompt_tokens
        return self.num_cached_tokens / total if total else 0.0
