"""A model so small that its training takes seconds, and what every training run promises."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from training.loop import Batch

MakeBatches = Callable[[int], list[Batch]]
Run = Callable[[Path, MakeBatches], tuple[list[float], dict[str, torch.Tensor]]]
"""Trains in a directory; returns the losses and the weights."""


def tiny_model(seed: int = 0, hidden_size: int = 16) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    sizes = dict(intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=50, hidden_size=hidden_size, tie_word_embeddings=True, **sizes))


def check_resumes_exactly(path: Path, run: Run, batches: MakeBatches) -> None:
    """A run that is killed in its fourth step and resumed ends exactly where an uninterrupted one does."""
    losses, weights = run(path / "whole", batches)

    def killed(step: int) -> list[Batch]:
        if step == 3:
            raise KeyboardInterrupt
        return batches(step)

    with pytest.raises(KeyboardInterrupt):
        run(path / "parts", killed)
    resumed_losses, resumed = run(path / "parts", batches)
    assert resumed_losses == losses
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
