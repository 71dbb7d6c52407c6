"""Loading into the engine's own decoder: what loads, what is counted, and one clear error for what does not."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from m1_single_request import ConfigError, ModelConfig as M1ModelConfig, ModelLoadError
from m1_single_request.model_loader import SUPPORTED_ARCHITECTURES, LoadedModel, load_model as m1_load_model
from m3_paged_attention.config import ModelConfig
from m3_paged_attention.model_loader import load_model
from m3_paged_attention.models.architecture import decoder_config
from tests.equivalence.models import ARCHITECTURES, EVERY_61ST, save_random_model
from tests.m3_paged_attention.checkpoints import edit_config
from tests.support.checkpoints import refusal_of


def load(model: Any, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(**{"model": model, "device": "cpu"} | settings))


refusal = partial(refusal_of, load)


# --- what loads -------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_said_of_a_model_is_what_m1_says(architecture: str, dtype: str, tmp_path: Path) -> None:
    directory = save_random_model(tmp_path, architecture)
    ours = load(directory, dtype=dtype)
    theirs = m1_load_model(M1ModelConfig(model=directory, device="cpu", dtype=dtype))
    for name in "name device dtype eos_token_ids max_model_len vocab_size num_parameters weight_bytes".split():
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.model.kv_cache_spec(1).bytes_per_token == theirs.kv_bytes_per_token
    assert set(EVERY_61ST) < ours.eos_token_ids
    assert ours.architecture == type(theirs.model).__name__ in SUPPORTED_ARCHITECTURES
    assert ours.tokenizer.get_vocab() == theirs.tokenizer.get_vocab()


def test_the_model_is_in_the_precision_that_was_asked_for(saved: Path) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        model = load(saved, dtype=dtype).model
        assert model.dtype == model.norm.dtype == getattr(torch, dtype)
        assert model.rotary.cos.dtype == torch.float32


def test_positions_reach_as_far_as_a_request_may(saved: Path) -> None:
    assert load(saved).model.rotary.cos.shape[0] == 1024
    assert load(saved, max_model_len=100).model.rotary.cos.shape[0] == 100
    with pytest.raises(ConfigError, match=r"max_model_len=1025.*1024"):
        load(saved, max_model_len=1025)


def test_the_older_form_of_the_rope_settings_is_read(directory: Path) -> None:
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    edit_config(directory, rope_parameters=new)
    expected = load(directory).model.rotary
    edit_config(
        directory, without=("rope_parameters",), rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0}
    )
    assert torch.equal(load(directory).model.rotary.cos, expected.cos)
    edit_config(directory, without=("rope_scaling",))
    assert not torch.equal(load(directory).model.rotary.cos, expected.cos)


def test_weights_are_tied_as_the_config_says(tmp_path: Path) -> None:
    for tied in (True, False):
        directory = save_random_model(tmp_path / str(tied), "qwen2", tie_word_embeddings=tied)
        ours = load(directory)
        count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(directory).parameters())
        assert (ours.model.config.tie_word_embeddings, ours.num_parameters) == (tied, count)


@pytest.mark.parametrize("shards", [False, True])
def test_a_hub_id_is_loaded_from_the_cache_without_a_network(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: bool
) -> None:
    repository, commit = tmp_path / "models--someone--something", "0" * 40
    snapshot = Path(shutil.copytree(saved, repository / "snapshots" / commit))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    if shards:
        (snapshot / "model.safetensors").unlink()
        AutoModelForCausalLM.from_pretrained(saved).save_pretrained(snapshot, max_shard_size="300KB")
        assert len(list(snapshot.glob("*.safetensors"))) > 1
    loaded, expected = load("someone/something"), load(saved)
    assert loaded.eos_token_ids == expected.eos_token_ids
    assert torch.equal(loaded.model.embedding, expected.model.embedding)
    for file in snapshot.glob("*.safetensors*"):
        file.unlink()
    assert "has neither model.safetensors nor" in refusal("someone/something")
    assert load("someone/something", load_format="dummy").num_parameters == expected.num_parameters


# --- weights without files --------------------------------------------------------------------------------------------


def test_dummy_weights_need_no_files(directory: Path) -> None:
    expected = load(directory)
    (directory / "model.safetensors").unlink()
    dummy = load(directory, load_format="dummy", seed=1)
    assert (dummy.num_parameters, dummy.eos_token_ids) == (expected.num_parameters, expected.eos_token_ids)
    assert torch.equal(dummy.model.embedding, load(directory, load_format="dummy", seed=1).model.embedding)
    assert not torch.equal(dummy.model.embedding, load(directory, load_format="dummy", seed=2).model.embedding)
    assert "has no .safetensors file" in refusal(directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_dummy_weights_need_config_and_tokenizer(directory: Path, name: str) -> None:
    (directory / name).unlink()
    assert "tokenizer" in refusal(directory, load_format="dummy") or "config.json" in refusal(
        directory, load_format="dummy"
    )


def test_a_dummy_model_that_no_memory_holds_is_an_error_of_ours(directory: Path) -> None:
    edit_config(directory, vocab_size=10**12)
    assert "its weights cannot be loaded" in refusal(directory, load_format="dummy")


# --- what does not load -----------------------------------------------------------------------------------------------


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 1}, "sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "run the model with m1_single_request"),
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantized"),
        ({"num_attention_heads": 5}, "5 heads are not a multiple of 2 KV heads"),
        ({"intermediate_size": 0}, "intermediate_size=0"),
        ({"rms_norm_eps": float("nan")}, "in config.json, rms_norm_eps=nan is not valid: Expected `float` >= 0.0"),
        ({"initializer_range": float("nan")}, "initializer_range=nan"),
        ({"head_dim": 3}, "head_dim=3 is odd"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "is not supported; supported are"),
    ],
    ids=str,
)
def test_a_network_that_the_decoder_is_not_is_refused(directory: Path, values: dict[str, Any], message: str) -> None:
    edit_config(directory, **values)
    assert message in refusal(directory)
    assert message in refusal(directory, load_format="dummy")


LONGROPE = {"short_factor": [1.0] * 12, "long_factor": [2.0] * 12, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", **LONGROPE}, "rope type 'longrope' is not supported; supported are default, linear"),
        ({"rope_type": "spiral"}, "rope type 'spiral' is not supported"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor=nan"),
        ({"rope_type": "default", "rope_theta": float("inf")}, "rope_theta=inf"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "'rope_theta': 1.0"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": "x"}, "mscale='x'"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": float("nan")}, "beta_fast=nan"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": -64}, "original_max_position"),
        # Older releases of transformers stumble over it themselves.
        ({"full_attention": {"rope_type": "default", "rope_theta": 5.0}}, "parameters for full_attention|its config"),
    ],
    ids=str,
)
def test_rope_settings_that_make_no_sense_are_named(directory: Path, rope: dict[str, Any], message: str) -> None:
    edit_config(directory, rope_parameters={"rope_theta": 10_000.0, **rope})
    said = refusal(directory)
    assert any(each in said for each in message.split("|"))


def test_more_positions_than_any_table_holds_need_a_max_model_len(directory: Path) -> None:
    edit_config(directory, max_position_embeddings=10**12)
    with pytest.raises(ConfigError, match=r"names 1,000,000,000,000 positions.*max_model_len of at most"):
        load_model(ModelConfig(model=directory, device="cpu"))
    assert load_model(ModelConfig(model=directory, device="cpu", max_model_len=64)).max_model_len == 64


@pytest.mark.parametrize("field", ["head_dim", "rms_norm_eps", "initializer_range"])
@pytest.mark.parametrize("value", ["8", None, [8], float("nan"), float("inf"), -1, 10**400], ids=repr)
def test_a_number_that_is_none_is_named_even_where_transformers_lets_it_pass(
    saved: Path, field: str, value: Any
) -> None:
    """Its older releases read what they find."""
    config = AutoConfig.from_pretrained(saved)
    vars(config)[field] = value
    derived = {"head_dim": 16, "initializer_range": 0.02}
    if value is None and field in derived:
        decoder = decoder_config("somebody", "Qwen3ForCausalLM", config, model_type="qwen3")
        assert getattr(decoder, field) == derived[field]
        return
    with pytest.raises(ModelLoadError, match=rf"^somebody: .*{field}="):
        decoder_config("somebody", "Qwen3ForCausalLM", config, model_type="qwen3")
