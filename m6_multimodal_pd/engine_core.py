"""m4's engine core, which also knows what the vision tower made.

The step is m4's to the letter: schedule, execute, update, make outputs. That some tokens of a prompt are pictures is
known to intake, to the adder that cuts prompts, and to the model runner.
"""

from typing import Any

from m1_single_request.outputs import EngineStats as SingleRequestStats
from m4_radix_cache.engine_core import EngineCore as TextEngineCore
from m6_multimodal_pd.multimodal.embedding_cache import EmbeddingCache
from m6_multimodal_pd.outputs import EncoderTotals, EngineStats


class EngineCore(TextEngineCore):
    """Turns the crank."""

    def __init__(self, *, embedding_cache: EmbeddingCache, encoder_totals: EncoderTotals, **settings: Any) -> None:
        super().__init__(**settings)
        self.embedding_cache, self.encoder_totals = embedding_cache, encoder_totals

    def stats(self) -> SingleRequestStats:
        """Totals so far, the state of the caches, and what the tower did."""
        did = self.encoder_totals
        return EngineStats(
            **vars(super().stats()),
            num_encoder_runs=did.num_runs,
            num_encoded_items=did.num_items,
            num_encoded_tokens=did.num_tokens,
            num_encoder_hits=did.num_hits,
            encoder_seconds=did.seconds,
            num_evicted_items=self.embedding_cache.num_evicted,
            embedding_cache_bytes=self.embedding_cache.used_bytes,
        )

    def flush_cache(self) -> bool:
        """Forget the KV that is kept for later requests, and the embeddings. False, and nothing is forgotten, while any
        request is unfinished."""
        is_flushed = super().flush_cache()
        if is_flushed:
            self.embedding_cache.clear()
        return is_flushed

    def close(self) -> None:
        """Forget all KV and all embeddings, then let go of the memory and the models."""
        super().close()
        self.embedding_cache.clear()
