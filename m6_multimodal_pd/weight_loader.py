"""Weight loader: replaces the weights of a running engine by those of a model of the same shape.

A model in training, for example, is served without a restart. Between two requests no KV is in use, so the model object
is replaced; everything that was compiled and measured for its shape stays. CUDA graphs hold the addresses of the old
weights, so they are captured again. Weights of another shape are rejected before any change. New in this milestone.
SGLang: `update_weights_from_disk`; vLLM: `reload_weights`.
"""

from dataclasses import replace
from typing import Any

from m1_single_request.errors import ModelLoadError
from m3_paged_attention.profiling import kv_cache_spec_of
from m6_multimodal_pd.config import ModelConfig
from m6_multimodal_pd.model_loader import language_of


class WeightLoader:
    """Replaces the target model and its vision tower. A draft model stays: it only makes drafts."""

    def __init__(self, *, config: ModelConfig, load: Any, loaded: Any, runner: Any, encoder: Any) -> None:
        """`load`: the part `model_loader`; `loaded`: the engine's model."""
        precision = str(loaded.dtype).removeprefix("torch.")
        self.config = replace(config, dtype=precision, max_model_len=loaded.max_model_len)  # the values in use
        self.load_model, self.runner, self.encoder = load, runner, encoder
        self.shape = shape_of(loaded)

    def load(self, model: str) -> None:
        """Replace the weights. Raises `ModelLoadError` for weights that cannot be loaded or have another shape, and
        `ConfigError` for a model with fewer positions than the engine's `max_model_len`."""
        loaded = self.load_model(replace(self.config, model=model))
        for name, value in shape_of(loaded).items():
            if value != self.shape[name]:
                raise ModelLoadError(f"{model}: its {name} is not that of the model that runs; start another engine")
        self.runner.use_model(loaded.model)
        self.encoder.tower = loaded.vision
        self.config = replace(self.config, model=model)


def shape_of(loaded: Any) -> dict[str, Any]:
    """Return the properties that must stay the same, by name."""
    language = language_of(loaded)
    return {
        "architecture": loaded.architecture,
        "shape of KV": kv_cache_spec_of(loaded.model, 1),
        "layout of images": (language and language.media_tokens, getattr(loaded.vision, "config", None)),
        "vocabulary": (loaded.vocab_size, loaded.tokenizer.get_vocab()),
        "end-of-sequence ids": loaded.eos_token_ids,
        "number of parameters": loaded.num_parameters,
        "precision": loaded.dtype,
    }
