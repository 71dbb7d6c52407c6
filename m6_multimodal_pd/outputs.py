"""Totals of an engine with a vision encoder."""

from dataclasses import dataclass

from m5_chunked_prefill_spec.outputs import EngineStats as SpeculationStats


@dataclass(frozen=True)
class EngineStats(SpeculationStats):
    """m5's totals, and those of the vision encoder."""

    num_encoder_runs: int
    """Number of runs of the vision tower: one for all new items of a step."""
    num_encoded_items: int
    """Number of images and videos encoded."""
    num_encoded_tokens: int
    """Number of embeddings computed."""
    num_encoder_hits: int
    """Number of pieces of prompts whose item was encoded already."""
    encoder_seconds: float
    """Time in the vision tower, in seconds."""
    num_evicted_items: int
    """Number of items whose embeddings were evicted from the embedding cache."""
    embedding_cache_bytes: int
    """Size of the embeddings in the cache, in bytes."""
