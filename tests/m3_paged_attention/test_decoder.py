"""The decoder: its logits are transformers' logits, for every architecture, over blocks, in flat batches.

Small models have heads that fill no vector of the native backend, which leaves those to torch: the models with "wide
heads" are there for its attention.
"""

import random
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from m1_single_request import DEFAULT_MODEL
from m1_single_request.model_loader import LoadedModel
from m2_continuous_batching.packed_linear import can_pack
from m3_paged_attention.attention import native_library
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.config import ModelConfig
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.linear import PlainLinear
from m3_paged_attention.model_loader import load_model
from m3_paged_attention.models.decoder import Decoder
from m3_paged_attention.models.weights import dummy_weights
from tests.equivalence.models import save_random_model
from tests.m3_paged_attention.test_rotary import LLAMA3, YARN

BACKENDS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(bool(native_library.obstacle()), reason="no C++ compiler")),
]
BLOCK_SIZE, NUM_BLOCKS = 4, 64
TOLERANCE = 1e-4

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3 with an output layer": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama, one KV head": ("llama", {}),
    "llama, all KV heads": ("llama", {"num_key_value_heads": 4}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama with attention biases": ("llama", {"attention_bias": True}),
    "llama with all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, head_dim of its own": ("llama", {"head_dim": 40}),
    "qwen3, wide heads": ("qwen3", {"head_dim": 64}),
    "qwen2, wide heads": ("qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "llama, wide heads": ("llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    "one layer": ("qwen3", {"num_hidden_layers": 1}),
    "a large epsilon": ("qwen3", {"rms_norm_eps": 0.1}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}}),
    "dynamic": ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3}}),
    "yarn": ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1_000_000.0, **YARN}}),
}


class Paged:
    """A model with a KV storage; every request gets blocks that are scattered over it."""

    def __init__(self, loaded: LoadedModel, block_size: int = BLOCK_SIZE) -> None:
        config = loaded.model.config
        spec = KVCacheSpec(
            block_size=block_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=loaded.dtype,
        )
        self.model, self.block_size = loaded.model, block_size
        self.kv = KVStorage(KVCacheConfig(spec=spec, num_blocks=NUM_BLOCKS), device=loaded.device)
        self.free = random.Random(0).sample(range(1, NUM_BLOCKS + 1), NUM_BLOCKS)
        self.blocks: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    @torch.inference_mode()
    def step(self, batch: dict[str, Sequence[int]]) -> dict[str, Tensor]:
        """Run the new tokens of several requests as one flat batch; the logits of each, `[new tokens, vocab]`."""
        rows = sorted(batch.items(), key=lambda row: len(row[1]) == 1)  # prefills first
        contexts = [self.lengths.get(rid, 0) for rid, _ in rows]
        slots, positions = [], []
        for (rid, tokens), context in zip(rows, contexts, strict=True):
            table = self.blocks.setdefault(rid, [])
            for position in range(context, context + len(tokens)):
                if position // self.block_size == len(table):
                    table.append(self.free.pop())
                slots.append(table[position // self.block_size] * self.block_size + position % self.block_size)
                positions.append(position)
            self.lengths[rid] = context + len(tokens)
        metadata = self._metadata([rid for rid, _ in rows], contexts, [len(tokens) for _, tokens in rows], slots)
        input_ids = torch.tensor([token for _, tokens in rows for token in tokens])
        hidden = self.model.forward(input_ids, torch.tensor(positions), self.kv, metadata)
        logits = self.model.compute_logits(hidden).split([len(tokens) for _, tokens in rows])
        return {rid: part for (rid, _), part in zip(rows, logits, strict=True)}

    def _metadata(self, rids: list[str], contexts: list[int], new: list[int], slots: list[int]) -> AttentionMetadata:
        tables = [self.blocks[rid] for rid in rids]
        width = max(map(len, tables))
        rows = np.array([table + [0] * (width - len(table)) for table in tables], dtype=np.int32)
        return AttentionMetadata.build(new, contexts, rows, np.array(slots))


@torch.inference_mode()
def expected(directory: Path, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """transformers' logits of a whole sequence at once: `[tokens, vocab]`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    logits: Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


def load(directory: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(**{"model": directory, "device": "cpu", "attention_backend": "torch"} | settings))


def tokens_of(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(4000), k=count)


def check_against_transformers(directory: Path, backend: str) -> None:
    """Two prompts at once, then a third beside the decodes of the first two, then decodes of all three."""
    paged = Paged(load(directory, attention_backend=backend))
    assert paged.model.backend.name == backend
    texts = {"a": tokens_of(1, 23), "b": tokens_of(2, 12), "c": tokens_of(3, 9)}
    rows: dict[str, list[Tensor]] = {rid: [] for rid in texts}
    plan = [{"a": 17, "b": 6}, {"a": 1, "c": 4, "b": 1}, *[{"b": 1, "c": 1, "a": 1}] * 5]
    for step in plan:
        done = paged.lengths
        batch = {rid: texts[rid][done.get(rid, 0) : done.get(rid, 0) + count] for rid, count in step.items()}
        for rid, logits in paged.step(batch).items():
            rows[rid].append(logits)
    for rid, text in texts.items():
        ours = torch.cat(rows[rid])
        theirs = expected(directory, text)
        assert ours.dtype == torch.float32 and ours.shape == theirs.shape
        assert float(theirs.std()) > 0.5, "the comparison means something"
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.sample(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, backend: str, tmp_path: Path) -> None:
    architecture, settings = MODELS[name]
    check_against_transformers(save_random_model(tmp_path, architecture, **settings), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_of_the_embedded_checkpoint_are_those_of_transformers(backend: str) -> None:
    check_against_transformers(Path(DEFAULT_MODEL), backend)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_logits_do_not_depend_on_the_block_size(block_size: int, tmp_path: Path) -> None:
    loaded = load(save_random_model(tmp_path, "qwen3"))
    text = tokens_of(4, 30)
    whole = Paged(loaded, 16).step({"a": text})["a"]
    paged = Paged(loaded, block_size)
    parts = [paged.step({"a": text[start:end]})["a"] for start, end in ((0, 20), (20, 21), (21, 22), (22, 30))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=TOLERANCE, rtol=0)


@pytest.mark.skipif(bool(native_library.obstacle()), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_native_kernels_decodes_do_not_see_each_other_at_all(dtype: str) -> None:
    """Bit for bit: no product, norm or sum of a row depends on how many rows there are."""
    loaded = load(Path(DEFAULT_MODEL), dtype=dtype, attention_backend="native")
    prompts = {str(seed): tokens_of(seed, count) for seed, count in enumerate((5, 1, 33, 16, 2, 47, 21, 7))}
    together, alone = Paged(loaded), {rid: Paged(loaded) for rid in prompts}
    for rid, prompt in prompts.items():
        assert torch.equal(together.step({rid: prompt})[rid], alone[rid].step({rid: prompt})[rid])
    for seed in range(3):
        tokens = {rid: tokens_of(100 + seed, 1) for rid in prompts}
        for rid, logits in together.step(tokens).items():
            assert torch.equal(logits, alone[rid].step({rid: tokens[rid]})[rid])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_and_its_logits_are_float32(dtype: str, backend: str) -> None:
    text = tokens_of(5, 20)
    paged = Paged(load(Path(DEFAULT_MODEL), dtype=dtype, attention_backend=backend))
    ours = torch.cat([paged.step({"a": text[:15]})["a"], *[paged.step({"a": [token]})["a"] for token in text[15:]]])
    exact, theirs = expected(Path(DEFAULT_MODEL), text), expected(Path(DEFAULT_MODEL), text, getattr(torch, dtype))
    assert ours.dtype == torch.float32
    assert float((ours - exact).abs().mean()) < 1.2 * float((theirs - exact).abs().mean())


@pytest.mark.parametrize("backend_name", BACKENDS)
def test_a_weight_that_is_packed_is_not_kept_as_it_was(backend_name: str) -> None:
    loaded = load(Path(DEFAULT_MODEL), attention_backend=backend_name)
    config, backend = loaded.model.config, loaded.model.backend
    weights = dummy_weights(config, torch.float32, loaded.device, seed=0)
    originals = [weakref.ref(layer.gate_up) for layer in weights.layers]
    model = Decoder(config, weights, backend, max_model_len=64, kv_dtype=torch.float32)
    assert not weights.layers, "they are taken over"
    for layer, original in zip(model.layers, originals, strict=True):
        is_packed = not isinstance(layer.mlp.gate_up_proj, PlainLinear)
        packs = backend_name == "native" or can_pack(torch.float32, loaded.device)
        assert (original() is None) == is_packed == packs


def test_logits_are_computed_for_the_rows_that_are_given() -> None:
    model = load(Path(DEFAULT_MODEL)).model
    for rows in (0, 1, 3):
        assert model.compute_logits(torch.zeros(rows, model.config.hidden_size)).shape == (rows, 4096)
