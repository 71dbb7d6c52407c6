"""CUDA graphs without a GPU: tensor operations and launches of Triton's interpreter are recorded, and run again.

What is wrong with a graph on a GPU goes wrong here, too. A replay runs the recorded calls on the recorded tensors, at
the addresses that they had, whatever was put in their place since. All memory that was allocated in captures with one
pool is spoiled before a replay, as if another graph had used it. And nothing may ask for a value in a capture.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.torch_backend import TorchBackend
from m3_paged_attention.experts import Experts, LinearExperts
from m3_paged_attention.int8_weight import Weight
from m3_paged_attention.kv_storage import KVLayer
from m3_paged_attention.linear import Linear, plain
from m6_multimodal_pd.config import ModelConfig
from m6_multimodal_pd.models.rotary import gather_with_torch

ASKS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")
ONLY_ALLOCATES = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")
GRAPH_BYTES = 2**20
"""What every graph takes here of the device's memory."""


class Pool:
    """What `torch.cuda.graph_pool_handle` returns: memory that graphs share."""

    def __init__(self) -> None:
        self.written: list[Tensor] = []
        """What is not spoiled yet: results of the last replay, and of captures since."""


class RecordedGraph:
    """In place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.calls: list[Callable[[], object]] = []
        self.results: list[Tensor] = []
        self.num_replays, self.is_reset = 0, False

    def reset(self) -> None:
        """Forget all calls."""
        self.is_reset = True

    def replay(self) -> None:
        """Spoil the pool, then make all calls again."""
        assert not self.is_reset, "this graph was destroyed"
        self.num_replays += 1
        with _disable_current_modes():
            for tensor in (*self.pool.written, *self.results):  # others have been spoiled before
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
            self.pool.written = list(self.results)
            for call in self.calls:
                call()


class Capture(TorchDispatchMode):
    """In place of the context `torch.cuda.graph(...)`."""

    active: "Capture | None" = None

    def __init__(self, graph: RecordedGraph, pool: Pool, capture_error_mode: str) -> None:
        super().__init__()
        assert capture_error_mode == "thread_local"
        self.graph, graph.pool = graph, pool

    def __enter__(self) -> "Capture":
        assert Capture.active is None, "one capture inside another"
        Capture.active = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Capture.active = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name in ASKS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        out = func(*args, **kwargs)
        made = new_memory(out, (args, kwargs))
        self.graph.results += made
        self.graph.pool.written += made
        if func._schema.is_mutable:
            self.graph.calls.append(lambda: func(*args, **kwargs))
        elif made and name not in ONLY_ALLOCATES:
            self.graph.calls.append(lambda: write(out, func(*args, **kwargs)))
        return out


class Allocations(TorchDispatchMode):
    """Notes every operation that returns new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names += [func._schema.name] * len(new_memory(out, (args, kwargs)))
        return out


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def new_memory(out: Any, inputs: Any) -> list[Tensor]:
    """The tensors of `out` that are not in the memory of an input."""
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors(inputs)}
    return [tensor for tensor in tensors(out) if tensor.untyped_storage().data_ptr() not in known]


def write(old: Any, new: Any) -> None:
    """Write results to the memory of earlier ones."""
    for target, source in zip(tensors(old), tensors(new), strict=True):
        target.copy_(source)


class StaticExperts(LinearExperts):
    """Every token goes through every expert: nothing depends on which of them are chosen."""

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        layers = zip(self.gate_up.layers, self.down.layers, strict=True)
        outputs = torch.stack([down(self.silu_mul(gate_up(hidden))) for gate_up, down in layers], 1)
        chosen = outputs.take_along_dim(experts[..., None], 1)
        return (chosen * weights[..., None]).sum(1)


class StaticBackend(TorchBackend):
    """Kernels that a graph can hold, like those of the triton backend, and much faster than its interpreter.

    Every token attends to all pages that its block table has room for, behind a mask: nothing is planned on the host.
    """

    name = "triton"

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        return plain(weight, bias)

    def experts(self, gate_up: Weight, down: Weight, num_experts: int) -> Experts:
        return StaticExperts(self, gate_up, down, num_experts)

    def attention(self, query: Tensor, layer: KVLayer, metadata: AttentionMetadata, scale: float) -> Tensor:
        num_tokens, num_heads, _ = query.shape
        starts = metadata.query_start_loc if metadata.num_prefills else torch.arange(num_tokens + 1)
        rows = torch.searchsorted(starts[1:], torch.arange(num_tokens), right=True)
        rows = rows.clamp(max=metadata.seq_lens.shape[0] - 1)  # those of padded tokens are anyone's
        positions = metadata.seq_lens[rows] - starts[rows + 1] + torch.arange(num_tokens)
        caches = (cache[metadata.block_tables] for cache in layer[:2])
        keys, values = (cache.flatten(1, 2) for cache in caches)  # [rows, tokens, kv_heads, dim]
        seen = torch.arange(keys.shape[1]) <= positions[:, None]  # [tokens, tokens of their rows]
        group = num_heads // keys.shape[2]
        keys, values = (each[rows].repeat_interleave(group, 2).transpose(1, 2) for each in (keys, values))
        scores = (query[:, :, None] @ keys.transpose(2, 3))[:, :, 0] * scale  # [tokens, heads, tokens of their rows]
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        values = values.masked_fill(~seen[:, None, :, None], 0.0)
        return (weights[:, :, None] @ values)[:, :, 0]


def record(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Make every CUDA graph a recorded one, on the CPU; returns those that were made, in order."""
    graphs: list[RecordedGraph] = []

    def make_graph() -> RecordedGraph:
        graphs.append(RecordedGraph())
        return graphs[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", make_graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", Pool)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30 - GRAPH_BYTES * len(graphs), 2**30))
    if importlib.util.find_spec("triton") is not None:
        record_launches(monkeypatch)
    return graphs


def record_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a launch in Triton's interpreter one call of a graph, whatever tensor operations it needs."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def launch_and_record(self: Any, *args: Any, **kwargs: Any) -> None:
        def run() -> None:
            with _disable_current_modes(), np.errstate(all="ignore"):  # padded tokens may be any numbers
                launch(self, *args, **kwargs)

        run()
        if Capture.active is not None:
            Capture.active.graph.calls.append(run)

    monkeypatch.setattr(GridExecutor, "__call__", launch_and_record)


def want(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines on the CPU capture graphs, as on a GPU, unless told not to."""
    monkeypatch.setattr(ModelConfig, "wants_graphs", property(lambda config: config.cuda_graphs is not False))


def use_static_kernels(monkeypatch: pytest.MonkeyPatch, loader: str = "m6_multimodal_pd.model_loader") -> None:
    """Give engines kernels that can be captured and are fast."""
    monkeypatch.setattr(f"{loader}.resolve", lambda name, device: StaticBackend())
    monkeypatch.setattr("m6_multimodal_pd.models.rotary._gather_of", lambda backend: gather_with_torch)


@pytest.fixture
def recorded_graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Every CUDA graph is a recorded one."""
    return record(monkeypatch)


@pytest.fixture
def wanted_graphs(recorded_graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Engines on the CPU capture graphs."""
    want(monkeypatch)
    return recorded_graphs


@pytest.fixture
def graphs_of_engines(wanted_graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """The same, and their kernels can be captured and are fast."""
    use_static_kernels(monkeypatch)
    return wanted_graphs
