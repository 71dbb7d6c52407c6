"""Registry of attention backends: one interface, several implementations.

`auto` selects triton on a GPU, and on a CPU our own C++ if there is a compiler; otherwise torch, which is slower and
runs everywhere. A backend is imported only when it is selected, so an engine on a CPU never loads triton. Triton's
interpreter runs kernels in Python without a GPU; it is for tests, and `auto` never selects it. New in this milestone:
before, transformers chose. vLLM: `AttentionBackendEnum` and the platforms' `get_attn_backend_cls`; SGLang:
`ATTENTION_BACKENDS` in `attention_registry.py`.
"""

import importlib.util
import os
from typing import Any, Protocol

import torch
from torch import Tensor

from m1_single_request.errors import ConfigError
from m1_single_request.model_loader import ModelDescription
from m3_paged_attention.attention import native_library
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.experts import Experts
from m3_paged_attention.int8_weight import Weight
from m3_paged_attention.kv_storage import KVLayer, KVStorage, Step
from m3_paged_attention.linear import Linear


class Backend(Protocol):
    """The operations of a decoder layer. Tensors are flat, `[tokens, ...]`, in the model's precision; sums are
    computed in float32."""

    name: str

    def check(self, model: ModelDescription, head_dim: int, kv_dtype: torch.dtype, quantization: str | None) -> None:
        """Raise `ConfigError` if it does not compute this model with KV in `kv_dtype`, or quantized linear layers."""

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Return a layer `y = x W^T + b` of `weight` `[out_features, in_features]`, which it may keep or copy."""

    def experts(self, gate_up: Weight, down: Weight, num_experts: int) -> Experts:
        """Return the experts of a layer, whose weights it may keep or copy.

        `gate_up`: `[num_experts * 2 * width, hidden_size]`; `down`: `[num_experts * hidden_size, width]`.
        """

    def store_kv(self, key: Tensor, value: Tensor, layer: KVLayer, slot_mapping: Tensor) -> None:
        """Write `key` and `value` `[tokens, kv_heads, head_dim]` to the slots of `slot_mapping`."""

    def attention(self, query: Tensor, layer: KVLayer, metadata: AttentionMetadata, scale: float) -> Tensor:
        """Compute causal attention of `query` `[tokens, heads, head_dim]` over the KV of its requests.

        The result has the same shape and is valid until the next call. Call `store_kv` first: a token attends to
        itself.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

        `weight` is `[width]`, the same for every row, or `[heads, width]`, one row per head of `x`
        `[tokens, heads, width]`.
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the norm of `x + residual`, and the sum itself, which may overwrite `residual`."""

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the pairs `(i, i + head_dim / 2)` of `heads` `[tokens, heads, head_dim]`, possibly in place.

        `cos` and `sin` are float32 `[tokens, head_dim / 2]`, the same tensors for all layers of a step.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute `silu(gate) * up` of `[tokens, 2 * intermediate]`, gate first."""

    def step(self, model: Any, kv: KVStorage) -> Step | str | None:
        """Return all layers of a `Decoder` as one call, or why this model's cannot be; None: no model's can."""


def resolve(name: str, device: torch.device) -> Backend:
    """Build the backend that `choose` returns for `name`."""
    match choose(name, device):
        case "native":
            from m3_paged_attention.attention.native_backend import NativeBackend

            return NativeBackend()
        case "triton":
            from m3_paged_attention.attention.triton_backend import TritonBackend

            return TritonBackend()
        case _:
            from m3_paged_attention.attention.torch_backend import TorchBackend

            return TorchBackend()


def choose(name: str, device: torch.device) -> str:
    """Return `native`, `torch` or `triton` for one of these names or `auto`. The first check of `native` compiles it.

    Raises `ConfigError` if the requested backend cannot run on `device`.
    """
    if name == "auto":
        return BEST.get(device.type, "torch") if obstacle_to_best(device) is None else "torch"
    if name in OBSTACLES and (obstacle := OBSTACLES[name](device)) is not None:
        raise ConfigError(f"attention_backend={name!r} cannot run here: {obstacle}")
    return name


def obstacle_to_best(device: torch.device) -> str | None:
    """Return the reason why `auto` selects `torch` and not the fastest backend of this device type, or None."""
    best = BEST.get(device.type)
    return None if best is None else OBSTACLES[best](device)


def _obstacle_to_native(device: torch.device) -> str | None:
    """Return the reason why our C++ kernels cannot run on `device`, or None."""
    if device.type != "cpu":
        return f"it runs on CPUs, and device={str(device)!r} is not a CPU"
    return native_library.obstacle()


def _obstacle_to_triton(device: torch.device) -> str | None:
    """Return the reason why triton kernels cannot run on `device`, or None. Does not import triton."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return f"device={str(device)!r} is not a GPU (for tests, TRITON_INTERPRET=1 runs its kernels in Python)"
    return None


BEST = {"cpu": "native", "cuda": "triton"}
OBSTACLES = {"native": _obstacle_to_native, "triton": _obstacle_to_triton}
"""Backend -> function that returns the reason why it cannot run on a device, or None; torch can always run."""
