"""Other weights for an engine that runs: loaded, compared with what is there, and put in its place.

A model that is trained further, say, is served without starting anew. Between two requests nobody has KV that matters,
so the models are exchanged as objects: everything that was compiled and measured for the shape stays. What would not
fit is refused before anything changes. New in this milestone. SGLang: `update_weights_from_disk`; vLLM:
`reload_weights`.
"""

from dataclasses import replace
from typing import Any

from m1_single_request.errors import ModelLoadError
from m3_paged_attention.config import ModelConfig
from m3_paged_attention.profiling import kv_cache_spec_of


class WeightLoader:
    """Exchanges the target model, and its vision tower. A draft model stays: it only guesses."""

    def __init__(self, *, config: ModelConfig, load: Any, loaded: Any, runner: Any, encoder: Any) -> None:
        """`load`: the part `model_loader`; `loaded`: what it has loaded for the engine."""
        precision = str(loaded.dtype).removeprefix("torch.")
        self.config = replace(config, dtype=precision, max_model_len=loaded.max_model_len)  # as they are settled now
        self.load_model, self.runner, self.encoder = load, runner, encoder
        self.shape = shape_of(loaded)

    def load(self, model: str) -> None:
        """Raises `ModelLoadError` for weights that cannot be loaded, or that are not of the same shape, and
        `ConfigError` for a model of fewer positions than requests may have."""
        loaded = self.load_model(replace(self.config, model=model))
        for name, value in shape_of(loaded).items():
            if value != self.shape[name]:
                raise ModelLoadError(f"{model}: its {name} is not that of the model that runs; start another engine")
        self.runner.model, self.encoder.tower = loaded.model, loaded.vision
        self.config = replace(self.config, model=model)


def shape_of(loaded: Any) -> dict[str, Any]:
    """What must be the same, by what to call it."""
    return {
        "architecture": loaded.architecture,
        "shape of KV": kv_cache_spec_of(loaded.model, 1),
        "layout of pictures": (loaded.media_tokens, getattr(loaded.vision, "config", None)),
        "vocabulary": (loaded.vocab_size, loaded.tokenizer.get_vocab()),
        "end-of-sequence ids": loaded.eos_token_ids,
        "number of parameters": loaded.num_parameters,
        "precision": loaded.dtype,
    }
