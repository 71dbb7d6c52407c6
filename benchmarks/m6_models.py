"""Engines of milestone 6 and m5's beside them, pictures for them, and clocks around the parts of a step.

The model that sees and the text model that it was made of have decoders of the same shape, so their steps compare.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, Self

import numpy as np

from m1_single_request.config import DEFAULT_MODEL as TEXT_MODEL
from m3_paged_attention.config import ModelConfig
from m5_chunked_prefill_spec import LLMEngine as TextEngine
from m6_multimodal_pd import DEFAULT_MODEL, CacheConfig, LLMEngine, MultimodalConfig, SchedulerConfig
from m6_multimodal_pd.model_loader import LoadedModel, load_model
from training.scenes import CELLS, draw_scene, random_thing

KV_BYTES = 2**28
MAX_MODEL_LEN = 2048
SMALL, LARGE = (96, 96), (256, 256)
"""Width and height: 9 tokens, and 64, which is the largest that the model's processor leaves as it is."""
QUESTION = "Describe the picture."
Row = dict[str, Any]


class Engines:
    """Engines over one copy of each model's weights, until `close`. The same arguments give the same engine."""

    def __init__(self, *, seed: int) -> None:
        self.seed = seed
        self._loaded: dict[str, LoadedModel] = {}
        self._engines: dict[str, Any] = {}

    def seeing(self, multimodal: Mapping[str, Any] | None = None, **limits: Any) -> LLMEngine:
        """m6 on the model that sees. `multimodal`: fields of `MultimodalConfig`; `limits`: of `SchedulerConfig`."""
        config = MultimodalConfig(**dict(multimodal or {}))
        return self._built(LLMEngine, DEFAULT_MODEL, limits, multimodal_config=config)

    def text(self, **limits: Any) -> LLMEngine:
        """m6 on the text model."""
        return self._built(LLMEngine, TEXT_MODEL, limits)

    def m5(self, **limits: Any) -> TextEngine:
        """m5, on the text model."""
        return self._built(TextEngine, TEXT_MODEL, limits)

    def _built(self, engine_class: Any, model: Path, limits: Row, **others: Any) -> Any:
        key = f"{engine_class.__module__} {model} {limits} {others}"
        if key not in self._engines:
            self._engines[key] = engine_class(
                parts={"model_loader": self._load},
                model_config=ModelConfig(
                    model=model, device="cpu", dtype="float32", max_model_len=MAX_MODEL_LEN, seed=self.seed
                ),
                cache_config=CacheConfig(kv_cache_memory_bytes=KV_BYTES),
                scheduler_config=SchedulerConfig(**limits),
                **others,
            )
        return self._engines[key]

    def _load(self, config: ModelConfig) -> LoadedModel:
        key = str(config.model)
        if key not in self._loaded:
            self._loaded[key] = load_model(config)
        return self._loaded[key]

    def close(self) -> None:
        """Let go of all of them, and of the weights."""
        for engine in self._engines.values():
            engine.close()
        self._engines, self._loaded = {}, {}


def pixels(number: int, size: tuple[int, int]) -> np.ndarray:
    """A drawn picture of this width and height, another one for every number: uint8 `[height, width, 3]`."""
    rng = Random(f"picture/{number}")
    cells = rng.sample(CELLS, 3)
    drawn = draw_scene(rng, [random_thing(rng, cell) for cell in cells], size).pixels.copy()
    drawn[0, :4, 0] = [number >> shift & 255 for shift in (0, 8, 16, 24)]  # never twice the same content
    return drawn


def image(number: int, size: tuple[int, int]) -> Row:
    """The same as a part of a message."""
    return {"type": "image", "image": pixels(number, size)}


def said(text: str) -> Row:
    """A text as a part of a message."""
    return {"type": "text", "text": text}


class Clocks:
    """How long some calls of an engine's parts take, added up by name, within `with`."""

    def __init__(self, engine: Any) -> None:
        core = engine.engine_core
        runner = core.executor.worker.model_runner
        self._watched = {"schedule": core.scheduler, "prepare": runner, "forward": runner}
        self.seconds: dict[str, float] = defaultdict(float)

    def __enter__(self) -> Self:
        for name, part in self._watched.items():
            setattr(part, name, self._timed(name, getattr(part, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for name, part in self._watched.items():
            delattr(part, name)  # the method of its class is seen again

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            found = call(*args, **keywords)
            self.seconds[name] += time.perf_counter() - began
            return found

        return timed
