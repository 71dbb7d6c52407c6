"""Totals of an engine with a prefix cache. The output of a step is m3's `ModelRunnerOutput`."""

from dataclasses import dataclass

from m1_single_request.outputs import EngineStats as SingleRequestStats


@dataclass(frozen=True)
class EngineStats(SingleRequestStats):
    """m1's totals, and the state of the cache.

    Sizes are in tokens. `max_total_tokens` less the three other sizes is the size of the pages that running requests
    own. `num_prompt_tokens` counts all prefilled tokens; a retracted request, with its outputs, counts again.
    """

    max_total_tokens: int
    """Capacity of the KV memory."""
    available_size: int
    """Free tokens."""
    evictable_size: int
    """Cached tokens without a lock."""
    protected_size: int
    """Cached tokens that running requests have locked."""
    host_bytes: int
    """KV in host memory, the second tier of the cache; 0 without."""
    disk_bytes: int
    """KV in the directory of the third tier, of all engines that use it; 0 without."""
    num_cached_tokens: int
    """Total number of tokens that admitted requests found in the cache."""
    num_host_hit_tokens: int
    """Those of them that were loaded from host memory."""
    num_disk_hit_tokens: int
    """Total number of tokens that were read from the disk to host memory."""
    num_evicted_tokens: int
    """Total number of evicted tokens."""
    num_retractions: int
    """Total number of retractions."""
    num_preemptions: int
    """Total number of requests that were preempted for one of higher priority."""

    @property
    def hit_rate(self) -> float:
        """Cached tokens as a share of all tokens of admitted requests, between 0 and 1."""
        total = self.num_cached_tokens + self.num_prompt_tokens
        return self.num_cached_tokens / total if total else 0.0
