"""Formats of the KV memory: what they cost, how far they move the logits, and where they are refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from m1_single_request.trace_readers import Records
from m3_paged_attention import CacheConfig, ConfigError, LLMEngine, ModelConfig, SamplingParams, TraceConfig
from m3_paged_attention.attention.native_backend import NativeBackend
from m3_paged_attention.config import KVCacheDtype
from m3_paged_attention.events import EngineStarted, KVSized
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_dtype import KV_DTYPES, dequantize, kv_dtype_of, quantize
from m3_paged_attention.kv_storage import KVStorage
from tests.equivalence.models import save_random_model
from tests.m3_paged_attention.engines import MakeEngine, runner_of
from tests.support.engines import ids

SCALED = [torch.int8, torch.float8_e4m3fn]
BOUNDS = {"auto": 0.0, "bfloat16": 0.03, "int8": 0.1, "fp8": 0.3}
"""Largest change of a log-probability of a random model."""


def storage(dtype: torch.dtype, num_host_blocks: int = 0) -> KVStorage:
    spec = KVCacheSpec(block_size=4, num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype)
    config = KVCacheConfig(spec=spec, num_blocks=6, num_host_blocks=num_host_blocks)
    return KVStorage(config, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", SCALED, ids=str)
def test_a_block_has_a_byte_for_each_number_and_a_scale_for_each_token_and_head(dtype: torch.dtype) -> None:
    kv = storage(dtype, num_host_blocks=2)
    spec = kv.config.spec
    assert spec.bytes_per_token == 3 * 2 * 2 * (8 + 4) and spec.block_bytes == 4 * spec.bytes_per_token
    assert kv.blocks.nbytes == kv.config.num_bytes and kv.host_blocks.nbytes == kv.config.num_host_bytes
    for index in range(3):
        keys, values, key_scales, value_scales = kv.layer(index)
        assert key_scales is not None and value_scales is not None
        assert keys.shape == values.shape == (7, 4, 2, 8) and keys.dtype == values.dtype == dtype
        assert key_scales.shape == value_scales.shape == (7, 4, 2) and key_scales.dtype == torch.float32
        assert not keys[0].float().any() and not value_scales[0].any(), "padding reads block 0"


@pytest.mark.parametrize("dtype", SCALED, ids=str)
def test_scales_move_with_their_numbers(dtype: torch.dtype) -> None:
    kv = storage(dtype, num_host_blocks=2)
    content = torch.randn(3, 2, 7, 4, 2, 8)

    def read(block: int) -> torch.Tensor:
        layers = [kv.layer(index) for index in range(3)]
        pairs = [pair for each in layers for pair in zip(each[:2], each[2:], strict=True)]
        return torch.stack([dequantize(cache[block], scales[block]) for cache, scales in pairs])

    for index in range(3):
        keys, values, key_scales, value_scales = kv.layer(index)
        keys[:], key_scales[:] = quantize(content[index, 0], dtype)
        values[:], value_scales[:] = quantize(content[index, 1], dtype)
    before = [read(block) for block in range(7)]
    assert (before[5] - content[:, :, 5].flatten(0, 1)).abs().max() < 0.15
    kv.copy_blocks([(1, 2), (2, 3)])
    kv.swap_out([(4, 1)])
    kv.swap_in([(1, 6)])
    origins = [0, 1, 1, 2, 4, 5, 4]
    assert all(torch.equal(read(block), before[origin]) for block, origin in enumerate(origins))


@pytest.mark.parametrize("kv_dtype", BOUNDS)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_logits_stay_within_bounds(tiny_directory: Any, kv_dtype: str, backend: str) -> None:
    """Against float32 KV."""
    found = []
    for name in ("auto", kv_dtype):
        cache = CacheConfig(kv_cache_dtype=name)
        model = ModelConfig(model=tiny_directory, device="cpu", dtype="float32", attention_backend=backend)
        with LLMEngine(model_config=model, cache_config=cache) as engine:
            kv = runner_of(engine).kv
            assert kv.layer(0).key_cache.dtype == KV_DTYPES.get(name, torch.float32)
            output = engine.generate(ids(60), SamplingParams(max_tokens=1, prompt_logprobs=0))
            found.append(torch.tensor([next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]]))
    assert (found[0] - found[1]).abs().max() <= BOUNDS[kv_dtype]
    assert kv_dtype == "auto" or not torch.equal(*found)


def test_statistics_and_blocks_count_the_bytes_of_the_format(make_engine: MakeEngine) -> None:
    sizes = {}
    for name in ("auto", "int8"):
        engine = make_engine(cache_config=CacheConfig(kv_cache_memory_bytes=2**20, kv_cache_dtype=name))
        engine.add_request(ids(9), SamplingParams(max_tokens=4))
        engine.step()
        kv, stats = runner_of(engine).kv, engine.stats()
        assert stats.kv_bytes == stats.kv_tokens * kv.config.spec.bytes_per_token
        assert kv.blocks.nbytes <= 2**20
        sizes[name] = kv.config.spec.bytes_per_token
    assert sizes["int8"] * 32 == sizes["auto"] * 9, "32 numbers of 4 bytes; 32 bytes and a scale"


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_native_step_computes_the_bits_of_the_layers_one_by_one(make_engine: MakeEngine, kv_dtype: str) -> None:
    found = []
    for in_one_call in (True, False):
        engine = make_engine(cache_config=CacheConfig(kv_cache_dtype=kv_dtype, num_blocks=8))
        kv = runner_of(engine).kv
        if not isinstance(runner_of(engine).model.backend, NativeBackend):
            pytest.skip("no compiler")
        assert kv.step is not None
        kv.step = kv.step if in_one_call else None
        with torch.inference_mode():
            kv.blocks.zero_()
        output = engine.generate(ids(20), SamplingParams(max_tokens=8))
        found.append((output.token_ids, kv.blocks.view(torch.uint8)))
    assert found[0][0] == found[1][0] and found[0][1].any() and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_heads_that_a_format_does_not_fit_are_refused_before_the_weights_are_read(name: Any, tmp_path: Path) -> None:
    directory = save_random_model(tmp_path, "qwen3", head_dim=6)
    (directory / "model.safetensors").unlink()
    config = ModelConfig(model=directory, device="cpu", attention_backend="torch")
    with pytest.raises(ConfigError, match=f"'{name}' needs a head_dim .* multiple of 4, and that of {directory} is 6"):
        LLMEngine(model_config=config, cache_config=CacheConfig(kv_cache_dtype=name))


def test_every_name_is_a_format() -> None:
    described: Any = SimpleNamespace(name="a model", dtype=torch.float16)
    formats = {name: kv_dtype_of(name, described, 64) for name in get_args(KVCacheDtype)}
    assert formats == {"auto": torch.float16, **KV_DTYPES}


def test_the_start_names_the_formats_and_counts_in_them(tiny_directory: Path) -> None:
    records = Records()
    with LLMEngine(
        model_config=ModelConfig(model=tiny_directory, device="cpu", dtype="float32", quantization="int8"),
        cache_config=CacheConfig(kv_cache_dtype="int8"),
        trace_config=TraceConfig(readers=(records,)),
    ):
        ((_, started),), ((_, sized),) = records.of(EngineStarted), records.of(KVSized)
    assert (started.dtype, started.quantization, started.kv_dtype) == ("float32", "int8", sized.dtype)
    assert started.kv_bytes_per_token == sized.bytes_per_token


@pytest.mark.parametrize("wrong", ["float32", "INT8", "", 8, None])
def test_another_name_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        CacheConfig(kv_cache_dtype=wrong)
