"""Engines of milestone 4, and m3's beside them, over one copy of a model's weights.

The models are m3's: `embedded` in float32, and random weights in the shape of Qwen3-0.6B in bfloat16.
"""

from typing import Any

from benchmarks.m3_models import TestedModel
from m1_single_request.model_loader import LoadedModel
from m3_paged_attention import (
    CacheConfig as BlockCacheConfig,
    LLMEngine as BlockEngine,
    ModelConfig,
    SchedulerConfig as BlockSchedulerConfig,
)
from m3_paged_attention.model_loader import load_model
from m4_radix_cache import CacheConfig, LLMEngine, SchedulerConfig

KV_BYTES = 9 * 2**28  # the 0.6B shape: 21,000 tokens, a little more than the requests need without sharing


class Engines:
    """Engines on one model, loaded once, until `close`. The same arguments give the same engine."""

    def __init__(self, model: TestedModel, *, max_model_len: int, kv_bytes: int = KV_BYTES) -> None:
        self.name, self.kv_bytes = model.name, kv_bytes
        self.config = ModelConfig(
            model=model.directory,
            device="cpu",
            dtype=model.dtype,
            max_model_len=max_model_len,
            load_format="dummy" if model.dummy else "auto",
            seed=model.seed,
        )
        self._loaded: LoadedModel | None = None
        self._engines: dict[str, Any] = {}

    def _load(self, config: ModelConfig) -> LoadedModel:
        if self._loaded is None:
            self._loaded = load_model(config)
        return self._loaded

    def m4(self, prefix_cache: str = "radix", **limits: Any) -> LLMEngine:
        """An m4 engine with this cache, in pages of 16."""
        cache = CacheConfig(prefix_cache=prefix_cache, kv_cache_memory_bytes=self.kv_bytes)  # type: ignore[arg-type]
        return self._built(LLMEngine, cache, SchedulerConfig(**limits))

    def m3(self, **limits: Any) -> BlockEngine:
        """An m3 engine, in blocks of 16."""
        cache = BlockCacheConfig(kv_cache_memory_bytes=self.kv_bytes)
        return self._built(BlockEngine, cache, BlockSchedulerConfig(**limits))

    def _built(self, engine_class: Any, cache: Any, scheduler: Any, **others: Any) -> Any:
        key = f"{engine_class.__module__} {cache} {scheduler} {others}"
        if key not in self._engines:
            self._engines[key] = engine_class(
                parts={"model_loader": self._load},
                model_config=self.config,
                cache_config=cache,
                scheduler_config=scheduler,
                **others,
            )
        return self._engines[key]

    def close(self) -> None:
        """Let go of all of them, and of the weights."""
        for engine in self._engines.values():
            engine.close()
        self._engines, self._loaded = {}, None
