"""Rotary tables: the same angles as transformers', for every type that the supported families have."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from m3_paged_attention.models.architecture import decoder_config
from m3_paged_attention.models.rotary import RotaryTable

LENGTH, HEAD_DIM = 4096, 32
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "default, large base": {"rope_type": "default", "rope_theta": 1_000_000},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3},
    "llama3, narrow": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 1.5, "high_freq_factor": 2.0},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn, large base": {"rope_type": "yarn", "rope_theta": 1_000_000.0, **YARN},
    "yarn, own factor": {"rope_type": "yarn", **YARN, "attention_factor": 1.7},
    "yarn, mscale": {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, betas": {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn, no ramp": {"rope_type": "yarn", **YARN, "beta_fast": 3.0, "beta_slow": 3.0, "truncate": False},
}


def llama(rope_parameters: dict[str, Any], **settings: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": 10_000.0, **rope_parameters},
        **settings,
    )


def table(config: LlamaConfig, length: int = LENGTH) -> RotaryTable:
    rope = decoder_config("model", "LlamaForCausalLM", config, model_type="llama").rope
    return RotaryTable(rope, length, torch.device("cpu"))


@pytest.mark.parametrize("name", ROPES)
def test_angles_are_those_of_transformers(name: str) -> None:
    config = llama(ROPES[name])
    positions = torch.tensor([0, 1, 2, 77, 255, 1023, 1024, 3000, LENGTH - 1])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours = table(config)(positions)
    for mine, theirs in zip(ours, (cos, sin), strict=True):
        assert mine.shape == (len(positions), HEAD_DIM // 2) and mine.dtype == torch.float32
        # an angle of 4,000 radians is a float32 number with steps of 2.4e-4
        torch.testing.assert_close(mine, theirs[0, :, : HEAD_DIM // 2], atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", [name for name in ROPES if name not in ("default", "dynamic")])
def test_every_type_turns_differently(name: str) -> None:
    positions = torch.arange(LENGTH)
    assert (table(llama(ROPES[name]))(positions)[0] - table(llama(ROPES["default"]))(positions)[0]).abs().max() > 0.1


def test_dynamic_is_the_default_up_to_the_length_of_the_model() -> None:
    positions = torch.arange(LENGTH)
    dynamic, default = (table(llama(ROPES[name]))(positions) for name in ("dynamic", "default"))
    assert torch.equal(dynamic[0], default[0]) and torch.equal(dynamic[1], default[1])
