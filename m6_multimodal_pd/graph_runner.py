"""CUDA graphs: the decode steps of a model, captured once for some batch sizes, and replayed by one call each.

In a step with few tokens the GPU is faster than Python, which launches about a dozen kernels per layer one by one. A
CUDA graph is such a sequence of launches, captured once and started by one call. Its grids and addresses are fixed:

- The inputs of a step are copied to tensors that never move (`StepInputs`), and the output is in another one.
- Graphs are captured for some numbers of tokens, the buckets. A step is padded to the smallest bucket that holds it.
  Padded rows have no length, and padded tokens write to page 0, which no request reads.

A decode has one new token per row. In the verification of drafts, the numbers of tokens of the rows are data of the
kernels, and only their sum is padded. So a few drafts in a large batch cost no more than their own tokens:

    tokens           | a a a | b | c c | . . |     3 rows, 6 tokens, in the bucket of 8 tokens
    query_start_loc    0       3   4     6 6       the padded tokens belong to no row, the other rows are empty

Prompts, steps with images and larger batches run eagerly. m3's step in one call is the same idea on a CPU. The output
layer and the sampler are not captured: they are a few launches, and their logits would be the largest memory of all.
SGLang: `CudaGraphRunner`; vLLM: `CUDAGraphWrapper` and `CudagraphDispatcher`; mini-sglang: `GraphRunner`.
"""

import functools
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from m1_single_request.tracer import Tracer
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.kv_cache_spec import KVCacheConfig
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.models.decoder import Decoder
from m3_paged_attention.worker import current_device
from m6_multimodal_pd.events import GraphsCaptured, GraphsUnavailable

CAPTURABLE = "triton"
"""The only backend whose launches do not depend on values: `torch` plans on the host, `native` runs on CPUs."""
MOST_TOKENS = 512
"""Maximum tokens of a captured step. In a larger one the arithmetic takes far longer than the launches."""


class Bucket(NamedTuple):
    """The steps of one graph: up to `num_tokens` new tokens, up to `width` of them in a row."""

    num_tokens: int
    width: int


def sizes_up_to(most: int) -> list[int]:
    """Return the buckets' numbers of tokens, ascending: 1, 2, 4, 8, then every eighth, and `most` itself."""
    return [size for size in (1, 2, 4, *range(8, most, 8)) if size < most] + [most]


@dataclass(frozen=True, kw_only=True)
class GraphLimits:
    """The largest step that is captured."""

    max_num_seqs: int
    max_model_len: int
    """Tokens of the longest request, which its block table has room for."""
    width: int = 1
    """Largest number of new tokens of a row: the newest token and its drafts."""

    def sizes(self, width: int) -> list[int]:
        """Return the numbers of tokens of the buckets of this width, ascending."""
        return sizes_up_to(min(self.max_num_seqs * width, MOST_TOKENS))

    def buckets(self) -> list[Bucket]:
        """Return all buckets, from the largest to the smallest."""
        return sorted({Bucket(size, width) for width in (1, self.width) for size in self.sizes(width)}, reverse=True)

    def num_rows(self, bucket: Bucket) -> int:
        """Return the largest number of rows of a step in this bucket."""
        return min(bucket.num_tokens, self.max_num_seqs)


class StepInputs:
    """Inputs of the captured steps. All graphs read the first rows and tokens of the same tensors."""

    def __init__(self, limits: GraphLimits, page_size: int, device: torch.device) -> None:
        max_num_seqs, max_pages = limits.max_num_seqs, -(-limits.max_model_len // page_size)
        self.limits = limits
        self.tokens = torch.zeros((3, limits.buckets()[0].num_tokens), dtype=torch.int64, device=device)
        """`[3, max_num_tokens]`: ids, positions, slots."""
        self.query_start_loc = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((max_num_seqs, max_pages), dtype=torch.int32, device=device)
        self.zero_slots, self.zero_lens = torch.zeros_like(self.tokens[0]), torch.zeros_like(self.seq_lens)

    def tensors(self) -> list[Tensor]:
        """Return all inputs."""
        return [self.tokens, self.query_start_loc, self.seq_lens, self.block_tables]

    def metadata(self, bucket: Bucket) -> AttentionMetadata:
        """Return the layout of a bucket, made of views. In a bucket of width 1 all rows are decodes, else prefills.

        A replay has other lengths than the capture, so they are not known on the host.
        """
        num_tokens, width = bucket
        num_rows = self.limits.num_rows(bucket)
        num_prefills = 0 if width == 1 else num_rows
        return AttentionMetadata(
            query_start_loc=self.query_start_loc[: num_rows + 1],
            seq_lens=self.seq_lens[:num_rows],
            block_tables=self.block_tables[:num_rows],
            slot_mapping=self.tokens[2, :num_tokens],
            num_prefills=num_prefills,
            num_prefill_tokens=0 if width == 1 else num_tokens,
            num_decodes=num_rows - num_prefills,
            max_query_len=width,
            query_lens_host=(),
            seq_lens_host=(),
        )

    def pad_batch(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, bucket: Bucket) -> None:
        """Copy a step to the first rows and tokens, and pad it to its bucket.

        Padded rows have no tokens. Padded tokens write to page 0; their ids and positions stay those of an earlier
        step, because any valid ones will do. These are three launches, and one more with drafts: `_foreach_copy_`
        copies tensors of one type, each into another, by one.
        """
        (num_rows, num_pages), num_tokens = metadata.block_tables.shape, len(input_ids)
        size, most_rows = bucket.num_tokens, self.limits.num_rows(bucket)
        ids, places, slots = self.tokens
        torch._foreach_copy_(
            [ids[:num_tokens], places[:num_tokens], slots[:num_tokens], slots[num_tokens:size]],
            [input_ids, positions, metadata.slot_mapping, self.zero_slots[num_tokens:size]],
        )
        rows = [self.seq_lens[:num_rows], self.seq_lens[num_rows:most_rows]]
        values = [metadata.seq_lens, self.zero_lens[num_rows:most_rows]]
        if bucket.width > 1:  # decodes are found by their row
            rows.append(self.query_start_loc[: num_rows + 1])
            values.append(metadata.query_start_loc)
            self.query_start_loc[num_rows + 1 : most_rows + 1].fill_(num_tokens)
        torch._foreach_copy_(rows, values)
        self.block_tables[:num_rows, :num_pages].copy_(metadata.block_tables)


class GraphRunner:
    """Replays the steps of one model over one KV memory: a `Step` of m3, for steps of few tokens."""

    def __init__(self, model: Decoder, kv: KVStorage, limits: GraphLimits, *, is_alone: bool = True) -> None:
        """Capture all graphs of the model, which must run its layers one by one now.

        `is_alone`: False if other engines start on the same device meanwhile. Raises the error of a step that cannot be
        captured, such as `torch.OutOfMemoryError`.
        """
        self.limits = limits
        self.sizes = {width: limits.sizes(width) for width in (1, limits.width)}
        """Numbers of tokens of the buckets of each width."""
        self._layers, self._captured_layers = model.layers, list(model.layers)
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        buckets = limits.buckets()
        self.inputs = StepInputs(limits, kv.config.spec.block_size, model.device)
        hidden_size = model.config.hidden_size
        self.output = torch.zeros((buckets[0].num_tokens, hidden_size), dtype=model.dtype, device=model.device)
        for bucket in buckets:
            self._run(model, kv, bucket)  # warm-up: what is compiled or allocated at a first call may not be captured
        used = _used_bytes(model.device, is_alone)
        memory = torch.cuda.graph_pool_handle()  # of the largest graph; each smaller one uses a part of it
        for bucket in buckets:
            self._graphs[bucket] = graph = torch.cuda.CUDAGraph()
            # Another engine's thread may allocate memory meanwhile, which a capture in "global" mode would forbid.
            try:
                with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
                    self._run(model, kv, bucket)
            except BaseException:
                _end_failed_capture(model.device, memory)
                raise
        fixed = sum(tensor.nbytes for tensor in (*self.inputs.tensors(), self.output))
        growth = _used_bytes(model.device, is_alone) - used
        self.num_bytes = max(growth, 0) + fixed  # another program may free memory meanwhile
        """GPU memory of all graphs, with their inputs and output."""

    def takes(self, metadata: AttentionMetadata) -> bool:
        """Return whether there is a graph for such a step. A layer replaced since the capture is called."""
        return self.bucket(metadata) is not None and self._layers == self._captured_layers

    def bucket(self, metadata: AttentionMetadata) -> Bucket | None:
        """Return the smallest bucket that holds a step, or None."""
        width = 1 if metadata.max_query_len == 1 else self.limits.width
        num_rows = metadata.num_prefills + metadata.num_decodes
        if metadata.max_query_len > width or num_rows > self.limits.max_num_seqs:
            return None
        sizes, num_tokens = self.sizes[width], metadata.num_prefill_tokens + metadata.num_decodes
        index = bisect_left(sizes, num_tokens)
        return Bucket(sizes[index], width) if index < len(sizes) else None

    def __call__(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Return the hidden states `[num_tokens, hidden_size]` after the last norm, valid until the next call.

        `input_ids` and `positions` are int64 `[num_tokens]`.
        """
        bucket = self.bucket(metadata)
        assert bucket is not None
        self.inputs.pad_batch(input_ids, positions, metadata, bucket)
        self._graphs[bucket].replay()
        return self.output[: len(input_ids)]

    def reset(self) -> None:
        """Destroy the graphs: none may be replayed any more."""
        for graph in self._graphs.values():
            graph.reset()

    def _run(self, model: Decoder, kv: KVStorage, bucket: Bucket) -> None:
        input_ids, positions, _ = self.inputs.tokens[:, : bucket.num_tokens]
        hidden = model.forward(input_ids, positions, kv, self.inputs.metadata(bucket))
        self.output[: bucket.num_tokens].copy_(hidden)


class GraphCapture:
    """Captures the graphs of an engine's models, once for each KV memory."""

    def __init__(self, *, page_size: int, is_alone: bool, tracer: Tracer) -> None:
        """`is_alone`: whether no other engine of a group is on the device."""
        self.page_size, self.is_alone, self.tracer = page_size, is_alone, tracer
        self.make_runner: Callable[..., GraphRunner] = GraphRunner

    @torch.inference_mode()
    def capture(self, name: str, model: Decoder, kv: KVStorage, limits: GraphLimits) -> None:
        """Let the steps of `model` over `kv` be replayed; if they cannot be captured, they run eagerly.

        `name`: name of the model in the trace.
        """
        began, backend = time.perf_counter(), model.backend.name
        if backend != CAPTURABLE:
            reason = f"the {backend} backend reads lengths on the host, which a graph cannot"
            self.tracer.emit(GraphsUnavailable, model=name, reason=reason)
            return
        try:
            kv.step = runner = self._captured(model, kv, limits)
        except Exception as error:
            self.tracer.emit(GraphsUnavailable, model=name, reason=f"{type(error).__name__}: {error}")
            return
        self.tracer.emit(GraphsCaptured.of, name, runner, (time.perf_counter() - began) * 1e3)

    def measure(self, model: Decoder, limits: GraphLimits) -> int:
        """Return the bytes of GPU memory that the graphs of `model` will take; 0 if they cannot be captured.

        They are captured over a KV memory of one page, and dropped: the memory for KV is what they leave.
        """
        if model.backend.name != CAPTURABLE:
            return 0
        kv = KVStorage(KVCacheConfig(spec=model.kv_cache_spec(self.page_size), num_blocks=1), device=model.device)
        try:
            return self._captured(model, kv, limits).num_bytes
        except Exception:
            return 0  # `capture` reports it

    def _captured(self, model: Decoder, kv: KVStorage, limits: GraphLimits) -> GraphRunner:
        """Capture on the model's device. A failed capture leaves torch on another stream, so the stream is restored."""
        with current_device(model.device), ExitStack() as stack:  # also after an update of the weights
            if model.device.type == "cuda":
                stack.enter_context(torch.cuda.stream(torch.cuda.current_stream()))
                torch.cuda.graph.default_capture_stream = _capture_stream(model.device)
            return self.make_runner(model, kv, limits, is_alone=self.is_alone)


@functools.cache
def _capture_stream(device: torch.device) -> Any:
    """Return the stream on which graphs of this device are captured. That of torch is on the device of the first
    capture in the process."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _end_failed_capture(device: torch.device, memory: Any) -> None:
    """Let the allocator of torch end a capture. It does so itself only behind one that succeeds; otherwise it would not
    release memory any more."""
    with suppress(AttributeError, RuntimeError):  # it has ended, or this is no build for CUDA
        torch._C._cuda_endAllocateToPool(device.index, memory)
        torch._C._cuda_releasePool(device.index, memory)


def _used_bytes(device: torch.device, is_alone: bool) -> int:
    """Return the used memory of the device, without what torch keeps for later tensors.

    For an engine that is not alone: only the memory that torch has in this process. The driver's own copy of the
    launches is left out then; like the CUDA contexts it must fit into what `gpu_memory_utilization` leaves.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    if not is_alone:
        return torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free
