"""Which kernels compute: one set of functions, several modules that offer it.

`auto` takes triton on a GPU, and on a CPU our own C++ if there is a compiler; else torch, which is slower and runs
everywhere. Each backend is imported when it is first asked for, so an engine on a CPU never loads triton. Triton's
interpreter runs kernels in Python without a GPU; it is there for tests, and nobody gets it who did not ask for it by
name. New in this milestone: before, transformers chose. vLLM: `AttentionBackendEnum` and the platforms'
`get_attn_backend_cls`; SGLang: `ATTENTION_BACKENDS` in `attention_registry.py`.
"""

import importlib.util
import os
import sys
from importlib.metadata import version
from typing import Protocol

import torch
from torch import Tensor

from m1_single_request.errors import ConfigError
from m3_paged_attention.attention import native_library
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.kv_storage import KVLayer
from m3_paged_attention.linear import Linear


class Backend(Protocol):
    """What a decoder layer computes with. Tensors are flat, `[tokens, ...]`, in the model's precision;
    sums are formed in float32."""

    name: str

    def check_head_dim(self, head_dim: int) -> None:
        """Raise `ConfigError` if `attention` cannot take heads of this width."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A layer `y = x W^T + b` of `weight` `[out_features, in_features]`, which it may keep or copy."""

    def store_kv(self, key: Tensor, value: Tensor, layer: KVLayer, slot_mapping: Tensor) -> None:
        """Write `key` and `value` `[tokens, kv_heads, head_dim]` to their slots of a `KVLayer`."""

    def attention(self, query: Tensor, layer: KVLayer, metadata: AttentionMetadata, scale: float) -> Tensor:
        """Causal attention of `query` `[tokens, heads, head_dim]` over the KV of its requests; a tensor of the same
        shape, good until the next call. `store_kv` comes first: a token sees itself."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

        `weight` `[width]` is that of every row; `[heads, width]` has one for each head of `x` `[tokens, heads, width]`.
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of `x + residual`, and the sum itself. `residual` may be overwritten with it."""

    def rotary(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn the pairs `(i, i + head_dim / 2)` of `heads` `[tokens, heads, head_dim]` by their angle; may work in
        place. `cos` and `sin` are float32 `[tokens, head_dim / 2]`, the same tensors for all layers of a step."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` for `[tokens, 2 * intermediate]`, gate first."""


def resolve(name: str, device: torch.device) -> Backend:
    """The backend called `name`, see `choose`."""
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
    """`native`, `torch` or `triton`, for `auto` or one of them. The first question about `native` compiles it.

    Raises `ConfigError` if the one asked for cannot run on `device`.
    """
    if name not in ("auto", *OBSTACLES, "torch"):
        raise ConfigError(f"attention_backend={name!r} is unknown: use auto, native, torch or triton")
    if name == "auto":
        return BEST.get(device.type, "torch") if obstacle_to_best(device) is None else "torch"
    if name in OBSTACLES and (obstacle := OBSTACLES[name](device)) is not None:
        raise ConfigError(f"attention_backend={name!r} cannot run here: {obstacle}")
    return name


def obstacle_to_best(device: torch.device) -> str | None:
    """Why `auto` is not what is fastest on this kind of device but `torch`, or None."""
    best = BEST.get(device.type)
    return None if best is None else OBSTACLES[best](device)


def _obstacle_to_native(device: torch.device) -> str | None:
    """Why our C++ kernels cannot run on `device`, or None."""
    if device.type != "cpu":
        return f"it is made for CPUs, and device={str(device)!r} is none"
    return native_library.obstacle()


def _obstacle_to_triton(device: torch.device) -> str | None:
    """Why triton kernels cannot run on `device`, or None. Triton is not imported to find out."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        if device.type == "cuda":
            return None
        return (
            f"triton compiles for GPUs and device={str(device)!r} is none "
            f"(for tests, TRITON_INTERPRET=1 set before the start runs its kernels in Python)"
        )
    if _release("triton") < (3, 7) and _release("numpy") >= (2, 4):
        return (
            f"the interpreter (TRITON_INTERPRET=1) of triton {version('triton')} needs numpy < 2.4, "
            f"and numpy {version('numpy')} is installed"
        )
    if _triton_compiles():
        return "triton was imported before TRITON_INTERPRET=1 was set: set it before the program starts"
    return None


BEST = {"cpu": "native", "cuda": "triton"}
OBSTACLES = {"native": _obstacle_to_native, "triton": _obstacle_to_triton}
"""What may be missing, for every backend that is more than torch: a question each, answered by a clause or by None."""


def _triton_compiles() -> bool:
    """Whether triton is loaded already and reads TRITON_INTERPRET no more: one of its own functions tells."""
    return type(getattr(sys.modules.get("triton.language"), "cdiv", None)).__name__ == "JITFunction"


def _release(package: str) -> tuple[int, int]:
    major, minor = version(package).split(".")[:2]
    return int(major), int(minor)
