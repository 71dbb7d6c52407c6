"""The side that the engines are compared with: transformers' `generate`, in static batches.

Fused attention (sdpa) and the dynamic KV cache, without gradients; the same weights as the engines have.
"""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engines import Model
from benchmarks.serving import Served
from benchmarks.workloads import Workload

CPU = torch.device("cpu")


def load(model: Model, seed: int, device: torch.device = CPU) -> Any:
    """Load a model as transformers does; random weights are those that the engine draws from the same seed."""
    dtype: torch.dtype = getattr(torch, model.dtype)
    if model.load_format == "auto":
        loaded = AutoModelForCausalLM.from_pretrained(model.directory, dtype=dtype, attn_implementation="sdpa")
    else:
        loaded = _with_random_weights(model, dtype, seed, device)
    return loaded.to(device).eval()


def _with_random_weights(model: Model, dtype: torch.dtype, seed: int, device: torch.device) -> Any:
    from m3_paged_attention.models.weights import dummy_weights, places

    config, shape = AutoConfig.from_pretrained(model.directory), decoder_shape(model)
    with torch.device("meta"):
        loaded = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    weights = stacked(places(shape, dummy_weights(shape, dtype, device, seed)), shape)
    loaded.load_state_dict(weights, strict=False, assign=True)
    loaded.tie_weights()
    loaded.model.rotary_emb = type(loaded.model.rotary_emb)(config)  # its tables are in no checkpoint
    empty = [name for name, tensor in [*loaded.named_parameters(), *loaded.named_buffers()] if tensor.is_meta]
    assert not empty, empty
    return loaded


def stacked(weights: dict[str, Any], shape: Any) -> dict[str, Any]:
    """Return the weights with the experts of each layer in one tensor, as transformers has them in memory."""
    if shape.experts is None:
        return weights
    kept = {name: weight for name, weight in weights.items() if ".mlp.experts." not in name}
    for layer in shape.experts.layers:
        mlp = f"model.layers.{layer}.mlp.experts"

        def of(module: str, mlp: str = mlp) -> list[Tensor]:
            return [weights[f"{mlp}.{number}.{module}.weight"] for number in range(shape.experts.num_experts)]

        pairs = zip(of("gate_proj"), of("up_proj"), strict=True)
        kept[f"{mlp}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        kept[f"{mlp}.down_proj"] = torch.stack(of("down_proj"))
    return kept


def decoder_shape(model: Model) -> Any:
    """Return the shape of a model's decoder (m3's `DecoderConfig`)."""
    from m3_paged_attention.models.architecture import decoder_config

    config = AutoConfig.from_pretrained(model.directory)
    return decoder_config(model.name, config.architectures[0], config, model_type=config.model_type)


def static(batch_size: int = 16) -> Callable[[Any, Workload], Served]:
    """Return the run of a `Side` whose engine is a model of `load`: batches in the order of arrival.

    A batch runs until its longest answer is complete, and all its answers end then.
    """

    def run(model: Any, work: Workload) -> Served:
        served, begin = Served([0.0] * len(work.requests), [], [], counts={"num_steps": 0}), time.perf_counter()
        for first in range(0, len(work.requests), batch_size):
            requests = work.requests[first : first + batch_size]
            longest = max(request.max_tokens for request in requests)
            rows = generate(model, [request.prompt for request in requests], longest)
            served.seconds = time.perf_counter() - begin
            metrics = SimpleNamespace(latency=served.seconds)
            served.outputs += [
                SimpleNamespace(token_ids=row[: request.max_tokens], metrics=metrics)
                for row, request in zip(rows, requests, strict=True)
            ]
            served.counts["num_steps"] += longest
        return served

    return run


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int, **settings: Any) -> list[list[int]]:
    """Return `num_tokens` greedy tokens for each prompt, from one batch that is padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64, device=model.device)
    mask = torch.zeros_like(ids)  # `generate` derives the position ids from it
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, device=model.device)
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
