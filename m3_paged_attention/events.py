"""Events of m3's start and model runner: formats, kernels, limits, size of the KV memory, CPU threads, sampled rows.

Events about blocks are in `kv_events.py`, events about scheduled requests in `scheduler_events.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor

from m1_single_request.events import EngineStarted as SingleStarted
from m1_single_request.model_loader import LoadedModel
from m1_single_request.output_events import Sampled
from m1_single_request.sampler import SamplerOutput
from m1_single_request.sampling_metadata import SamplingMetadata
from m1_single_request.trace_event import Event, size, some
from m3_paged_attention.block_pool import blocks_for
from m3_paged_attention.kv_dtype import LARGEST

SCALED = [str(dtype).removeprefix("torch.") for dtype in LARGEST]


@dataclass(frozen=True, kw_only=True)
class EngineStarted(SingleStarted):
    """The model is loaded and the engine is ready. Linear layers and KV may have other formats than `dtype`."""

    quantization: str | None
    """Format of the weights of the linear layers; None: `dtype`."""
    kv_dtype: str
    """Format of the KV, in which `kv_bytes_per_token` are counted."""

    @classmethod
    def of(cls, loaded: LoadedModel, quantization: str | None = None) -> Self:
        """Build the event for a loaded model, whose `model` is a `Decoder`."""
        spec = loaded.model.kv_cache_spec(1)
        formats = {"quantization": quantization, "kv_dtype": str(spec.dtype).removeprefix("torch.")}
        return cls(**vars(SingleStarted.of(loaded)) | formats | {"kv_bytes_per_token": spec.block_bytes})

    def explain(self) -> str:
        if self.quantization is None and self.kv_dtype == self.dtype:
            return super().explain()
        linears = f", linear layers as {self.quantization}" if self.quantization is not None else ""
        return (
            f"{self.architecture} ({self.model}) is ready on {self.device}: {self.num_parameters / 1e6:,.1f} M "
            f"parameters, {size(self.weight_bytes)} as {self.dtype}{linears}. The KV of one token takes "
            f"{self.kv_bytes_per_token:,} bytes as {self.kv_dtype}. A request has at most "
            f"{self.max_model_len:,} tokens."
        )


@dataclass(frozen=True, kw_only=True)
class BackendChosen(Event):
    """The attention backend was selected."""

    style: ClassVar[str] = "bold"
    headline: ClassVar[bool] = True
    asked: str
    """The setting `attention_backend`."""
    backend: str
    """The selected one: `native`, `torch` or `triton`."""
    obstacle: str | None
    """Reason why `auto` did not select the fastest backend of this device; None if it did, or without `auto`."""

    def explain(self) -> str:
        if self.obstacle is not None:
            return f"Kernels: {self.backend}; the faster ones cannot run here: {self.obstacle}."
        return f"Kernels: {self.backend}, {'the fastest here' if self.asked == 'auto' else 'as asked for'}."


@dataclass(frozen=True, kw_only=True)
class StepLimits(Event):
    """The limits of a step on a CUDA device, set by the user or chosen by `device_limits.py`."""

    style: ClassVar[str] = "bold"
    headline: ClassVar[bool] = True
    max_num_seqs: int
    """Maximum number of running requests."""
    max_num_batched_tokens: int
    """Maximum number of new tokens in one step."""
    total_bytes: int
    """The device's memory, from which the defaults follow."""

    @classmethod
    def of(cls, limits: Any, total_bytes: int | None) -> Self | None:
        """Build the event for resolved limits; None on a CPU, where `total_bytes` is None."""
        if total_bytes is None:
            return None
        seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        return cls(max_num_seqs=seqs, max_num_batched_tokens=tokens, total_bytes=total_bytes)

    def explain(self) -> str:
        return (
            f"At most {some(self.max_num_seqs, 'request')} run, with at most "
            f"{some(self.max_num_batched_tokens, 'new token')} in a step, on a device of {size(self.total_bytes)}."
        )


@dataclass(frozen=True, kw_only=True)
class EagerSteps(Event):
    """The layers of a step run one operation at a time, on a backend that can run them in one call."""

    style: ClassVar[str] = "yellow"
    reason: str
    """Why this model's layers do."""

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Build the event for a `Decoder`; None if its steps are one call, or its backend has no such call."""
        return None if model.eager_reason is None else cls(reason=model.eager_reason)

    def explain(self) -> str:
        return f"Each step calls the operations of its layers one by one, not all layers at once: {self.reason}."


@dataclass(frozen=True, kw_only=True)
class ThreadsChanged(Event):
    """The number of CPU threads of a step changed (see `step_threads.py`)."""

    style: ClassVar[str] = "yellow"
    num_threads: int
    """Threads of a step."""
    limit: int
    """Threads that the caller allows: `torch.set_num_threads`, `OMP_NUM_THREADS`."""
    num_cores: int
    """Cores that this process may use."""
    other_cores: float
    """Cores that other programs used since the last measurement."""

    def counters(self) -> dict[str, float]:
        return {"CPU threads": self.num_threads}

    def explain(self) -> str:
        return (
            f"Steps use {self.num_threads} of {some(self.limit, 'CPU thread')} now: other programs use "
            f"{self.other_cores:.1f} of {some(self.num_cores, 'core')}."
        )


@dataclass(frozen=True, kw_only=True)
class KVSized(Event):
    """The number of KV blocks, and its derivation."""

    style: ClassVar[str] = "bold"
    headline: ClassVar[bool] = True
    source: str
    """The setting that the number comes from: `num_blocks`, `kv_cache_memory_bytes` or `gpu_memory_utilization`."""
    budget_bytes: int | None
    """Maximum size of the KV memory; None if the number of blocks was given."""
    total_bytes: int | None
    """Size of the device's memory, or of an engine's part of it, if a share of it is the limit."""
    gpu_memory_utilization: float | None
    """Share of the device's memory that may be used."""
    peak_bytes: int | None
    """Peak of all other memory, measured by the profiling run."""
    block_size: int
    """Tokens per block."""
    dtype: str
    """Format of its numbers; `int8` and `float8_e4m3fn` have a float32 scale per token and head."""
    block_bytes: int
    """Bytes of K and V of one block over all layers."""
    bytes_per_token: int
    """Bytes of K and V of one token over all layers."""
    fitting_blocks: int
    """Blocks that fit into the budget, including block 0."""
    num_blocks: int
    """Blocks that can be allocated."""
    num_host_blocks: int
    """Blocks in host memory, for requests that are swapped out."""
    num_bytes: int
    """Bytes on the device, including block 0."""
    num_host_bytes: int
    """Bytes on the host."""
    max_model_len: int
    """Tokens of the longest request."""
    max_num_seqs: int | None
    """Maximum number of running requests, if it limits the number of blocks."""

    @classmethod
    def of(cls, config: Any, budget: Any, fitting: int, max_model_len: int, max_num_seqs: int | None) -> Self:
        """Build the event for a `KVCacheConfig`; `fitting` blocks fit into the `Budget`."""
        profile, spec = budget.profile, config.spec
        return cls(
            source=budget.source,
            budget_bytes=budget.num_bytes,
            total_bytes=profile.total_bytes if profile else None,
            gpu_memory_utilization=budget.share,
            peak_bytes=profile.used_bytes if profile else None,
            block_size=spec.block_size,
            dtype=str(spec.dtype).removeprefix("torch."),
            block_bytes=spec.block_bytes,
            bytes_per_token=spec.bytes_per_token,
            fitting_blocks=fitting,
            num_blocks=config.num_blocks,
            num_host_blocks=config.num_host_blocks,
            num_bytes=config.num_bytes,
            num_host_bytes=config.num_host_bytes,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
        )

    @property
    def blocks_per_request(self) -> int:
        return blocks_for(self.max_model_len, self.block_size)

    def explain(self) -> str:
        each = some(self.block_size, "token")
        parts = []
        if self.budget_bytes is None:
            asked = f"num_blocks={self.num_blocks} of {each} was asked for"
            if self.source != "num_blocks":
                asked = f"{self.source} is room for {some(self.num_blocks, 'block')} of {each}"
            parts.append(f"{asked}, {size(self.block_bytes)} each")
        else:
            if self.total_bytes is not None and self.peak_bytes is not None:
                parts.append(
                    f"{self.gpu_memory_utilization:.0%} of {size(self.total_bytes)}, less {size(self.peak_bytes)} for "
                    f"all else, leave {size(self.budget_bytes or 0)}"
                )
            parts.append(
                f"{size(self.budget_bytes or 0)} / {size(self.block_bytes)} per block = "
                f"{some(self.fitting_blocks, 'block')} of {each}"
            )
            if self.max_num_seqs is not None and self.num_blocks < self.fitting_blocks - 1:
                parts.append(
                    f"{some(self.max_num_seqs, 'request')} of {some(self.blocks_per_request, 'block')} at most "
                    f"never fill more than {self.num_blocks:,}, so no more are made"
                )
        parts.append(f"with block 0, which is never handed out, they take {size(self.num_bytes)}")
        concurrency = self.num_blocks / self.blocks_per_request
        parts.append(
            f"room for {self.num_blocks * self.block_size:,} tokens, or {concurrency:,.1f} requests of "
            f"{self.max_model_len:,}"
        )
        scales = ", with a float32 scale per token and head" if self.dtype in SCALED else ""
        parts.append(f"its numbers are {self.dtype}{scales}")
        if self.num_host_blocks:
            host = some(self.num_host_blocks, "more block")
            parts.append(f"{host} on the host for swapping take {size(self.num_host_bytes)}")
        return f"KV memory: {'; '.join(parts)}."


def sampled_row(
    request_id: str,
    batch: Any,
    logits: Tensor,
    metadata: SamplingMetadata,
    chosen: SamplerOutput,
    row: int,
    text: Callable[[int], str],
) -> Sampled:
    """Build m1's event for one row of a `SamplingBatch`."""
    position = int(batch.positions[row])
    return Sampled.of(request_id, batch.params[row], position, logits, metadata, chosen, row, text)
