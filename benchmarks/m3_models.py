"""The two models of milestone 3's measurements, each for our engines and for transformers, with the same weights.

`embedded` is the checkpoint that ships, in float32. `0.6B` has the shape of Qwen3-0.6B and random weights in bfloat16:
what it says means nothing, what it costs is what the real one costs.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from m2_continuous_batching import (
    LLMEngine as DenseEngine,
    ModelConfig as DenseModelConfig,
    SchedulerConfig as DenseSchedulerConfig,
)
from m3_paged_attention import DEFAULT_MODEL, CacheConfig, LLMEngine, ModelConfig, SchedulerConfig
from m3_paged_attention.config import AttentionBackend
from m3_paged_attention.models.architecture import DecoderConfig, decoder_config
from m3_paged_attention.models.weights import dummy_weights, places

SHAPE_0_6B = {
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
MAX_MODEL_LEN = 1024  # prompts of up to 512 and outputs of up to 256 tokens, and no more than that twice over
KV_BYTES = 2 * 2**30


class TestedModel:
    """One model, and whatever was built of it until `close`."""

    def __init__(self, name: str, directory: Path, dtype: str, *, dummy: bool, seed: int) -> None:
        self.name, self.directory, self.dtype, self.dummy, self.seed = name, directory, dtype, dummy, seed
        self.config: DecoderConfig = decoder_config(
            name, "Qwen3ForCausalLM", AutoConfig.from_pretrained(directory), model_type="qwen3"
        )
        self._engines: dict[str, LLMEngine] = {}
        self._reference: Any = None

    def engine(
        self, *, cache: CacheConfig | None = None, backend: AttentionBackend = "auto", **limits: Any
    ) -> LLMEngine:
        """An m3 engine with these limits; the same one for the same limits."""
        cache = cache or CacheConfig(kv_cache_memory_bytes=KV_BYTES)
        key = f"{cache} {backend} {limits}"
        if key not in self._engines:
            self._engines[key] = LLMEngine(
                model_config=ModelConfig(
                    model=self.directory,
                    device="cpu",
                    dtype=self.dtype,
                    max_model_len=MAX_MODEL_LEN,
                    load_format="dummy" if self.dummy else "auto",
                    seed=self.seed,
                    attention_backend=backend,
                ),
                scheduler_config=SchedulerConfig(**limits),
                cache_config=cache,
            )
        return self._engines[key]

    def dense_engine(self, *, max_num_seqs: int, max_model_len: int = MAX_MODEL_LEN) -> DenseEngine:
        """An m2 engine; its slots are as long as `max_model_len`."""
        return DenseEngine(
            model_config=DenseModelConfig(
                model=self.directory, device="cpu", dtype=self.dtype, max_model_len=max_model_len
            ),
            scheduler_config=DenseSchedulerConfig(max_num_seqs=max_num_seqs),
        )

    @property
    def reference(self) -> Any:
        """transformers' own model, with torch's fused attention."""
        if self._reference is None:
            dtype: torch.dtype = getattr(torch, self.dtype)
            if self.dummy:
                self._reference = self._random_reference(dtype)
            else:
                self._reference = AutoModelForCausalLM.from_pretrained(
                    self.directory, dtype=dtype, attn_implementation="sdpa"
                )
            self._reference.eval()
        return self._reference

    def _random_reference(self, dtype: torch.dtype) -> Any:
        """Built without weights, and given those that the engine draws from the same seed."""
        config = AutoConfig.from_pretrained(self.directory)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        weights = places(self.config, dummy_weights(self.config, dtype, torch.device("cpu"), self.seed))
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its tables are in no checkpoint
        empty = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
        assert not empty, empty
        return model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, as transformers loads it."""
        return AutoTokenizer.from_pretrained(self.directory)

    def close(self) -> None:
        """Let go of everything that was built."""
        for engine in self._engines.values():
            engine.close()
        self._engines, self._reference = {}, None


def embedded_model(seed: int) -> TestedModel:
    """The checkpoint that ships, in float32."""
    return TestedModel("embedded", Path(DEFAULT_MODEL), "float32", dummy=False, seed=seed)


def random_model(seed: int, directory: Path, **changes: int) -> TestedModel:
    """Random weights in the shape of Qwen3-0.6B, bfloat16. Its config, and the course's tokenizer, are written."""
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    tokenizer.save_pretrained(directory)
    Qwen3Config(
        **SHAPE_0_6B | changes,
        architectures=["Qwen3ForCausalLM"],
        max_position_embeddings=MAX_MODEL_LEN,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(directory)
    return TestedModel("0.6B", directory, "bfloat16", dummy=True, seed=seed)
