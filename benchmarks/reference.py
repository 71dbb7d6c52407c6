"""The side that the engines are compared with: transformers' `generate`, in static batches.

Fused attention (sdpa) and the dynamic KV cache, without gradients; the same weights as the engines have.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engines import Model
from benchmarks.workloads import Workload


def load(model: Model, seed: int) -> Any:
    """Load a model as transformers does; random weights are those that the engine draws from the same seed."""
    dtype: torch.dtype = getattr(torch, model.dtype)
    if model.load_format == "auto":
        loaded = AutoModelForCausalLM.from_pretrained(model.directory, dtype=dtype, attn_implementation="sdpa")
    else:
        loaded = _with_random_weights(model, dtype, seed)
    return loaded.eval()


def _with_random_weights(model: Model, dtype: torch.dtype, seed: int) -> Any:
    from m3_paged_attention.models.weights import dummy_weights, places

    config, shape = AutoConfig.from_pretrained(model.directory), decoder_shape(model)
    with torch.device("meta"):
        loaded = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    weights = places(shape, dummy_weights(shape, dtype, torch.device("cpu"), seed))
    loaded.load_state_dict(weights, strict=False, assign=True)
    loaded.tie_weights()
    loaded.model.rotary_emb = type(loaded.model.rotary_emb)(config)  # its tables are in no checkpoint
    empty = [name for name, tensor in [*loaded.named_parameters(), *loaded.named_buffers()] if tensor.is_meta]
    assert not empty, empty
    return loaded


def decoder_shape(model: Model) -> Any:
    """Return the shape of a model's decoder (m3's `DecoderConfig`)."""
    from m3_paged_attention.models.architecture import decoder_config

    config = AutoConfig.from_pretrained(model.directory)
    return decoder_config(model.name, "Qwen3ForCausalLM", config, model_type="qwen3")


class Static:
    """Batches of `batch_size` in the order of arrival. A batch runs until its longest answer is complete."""

    def __init__(self, work: Workload, model: Any, batch_size: int = 16) -> None:
        self.work, self.model, self.batch_size = work, model, batch_size
        self.all_seconds: list[float] = []
        self.answers: list[tuple[int, ...]] = []
        self.latencies: list[float] = []
        self.num_steps = 0

    def __call__(self) -> float:
        """Answer everything and return the seconds. The first call only warms up."""
        work = self.work if self.num_steps else self.work.shortened()
        self.answers, self.latencies, self.num_steps = [], [], 0
        begin = time.perf_counter()
        for first in range(0, len(work.requests), self.batch_size):
            requests = work.requests[first : first + self.batch_size]
            longest = max(request.max_tokens for request in requests)
            rows = generate(self.model, [request.prompt for request in requests], longest)
            self.answers += [tuple(row[: r.max_tokens]) for row, r in zip(rows, requests, strict=True)]
            self.latencies += [time.perf_counter() - begin] * len(rows)
            self.num_steps += longest
        self.all_seconds.append(self.latencies[-1])
        return self.latencies[-1]


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int, **settings: Any) -> list[list[int]]:
    """Return `num_tokens` greedy tokens for each prompt, from one batch that is padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)  # `generate` derives the position ids from it
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        **settings,
    )
    return out[:, longest:].tolist()
