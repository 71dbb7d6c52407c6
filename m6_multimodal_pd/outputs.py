"""The totals of an engine that sees."""

from dataclasses import dataclass

from m5_chunked_prefill_spec.outputs import EngineStats as SpeculationStats


@dataclass(frozen=True)
class EngineStats(SpeculationStats):
    """m5's totals, and those of the vision tower."""

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
