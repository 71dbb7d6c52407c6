"""Engines of milestone 5, and m4's beside them, over one copy of each model's weights."""

from typing import Any

from benchmarks.m3_models import TestedModel
from benchmarks.m4_models import Engines as M4Engines
from m1_single_request.model_loader import LoadedModel
from m3_paged_attention.config import ModelConfig
from m3_paged_attention.model_loader import load_model
from m4_radix_cache import CacheConfig
from m5_chunked_prefill_spec import LLMEngine, SchedulerConfig, SpeculativeConfig

KV_BYTES = 2**28


class Engines(M4Engines):
    """m4's engines and m5's. The same arguments give the same engine, and engines share the models."""

    def __init__(self, model: TestedModel, *, max_model_len: int, kv_bytes: int = KV_BYTES) -> None:
        super().__init__(model, max_model_len=max_model_len, kv_bytes=kv_bytes)
        self._drafts: dict[str, LoadedModel] = {}

    def m5(
        self, speculative: SpeculativeConfig | None = None, *, prefix_cache: str = "radix", **limits: Any
    ) -> LLMEngine:
        """An m5 engine, in pages of 16."""
        speculative = speculative or SpeculativeConfig()
        cache = CacheConfig(prefix_cache=prefix_cache, kv_cache_memory_bytes=self.kv_bytes)  # type: ignore[arg-type]
        return self._built(LLMEngine, cache, SchedulerConfig(**limits), speculative_config=speculative)

    def num_parameters(self) -> list[int]:
        """Of every model that was loaded: first the engines' own, then the draft model."""
        own = [] if self._loaded is None else [self._loaded]
        return [loaded.num_parameters for loaded in (*own, *self._drafts.values())]

    def _load(self, config: ModelConfig) -> LoadedModel:
        if config.model == self.config.model:
            return super()._load(config)
        key = str(config.model)
        if key not in self._drafts:
            self._drafts[key] = load_model(config)
        return self._drafts[key]

    def close(self) -> None:
        """Let go of all of them, and of the weights."""
        super().close()
        self._drafts.clear()
