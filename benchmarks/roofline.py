"""Operations and bytes of a forward, measured seconds, and the roof of the machine above them.

Counted: every weight, read once and used once for each new token (the output layer only for tokens that are sampled),
attention, and the KV that is read and written. Activations are left out: they stay in the processor's caches. Of
experts each token uses a few, and those are read that a fair router is expected to choose for some token.
"""

import statistics
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

from benchmarks.engines import Model
from benchmarks.lesson import SEED, Row
from benchmarks.machine import peak_flops, read_bandwidth
from benchmarks.reference import decoder_shape
from benchmarks.serving import answer, serve
from benchmarks.traces import watched
from benchmarks.workloads import Request, Workload, drawn, tokens
from m1_single_request.events import Batch, StepDone

BUDGET = 1024
Lengths = Sequence[int]
Step = tuple[Any, float]
"""The batch of a step, and the seconds of its forward."""


def forward_flops(shape: Any, new: Lengths, context: Lengths) -> float:
    """Return the operations of one forward: `new` tokens of each request, of which `context` tokens have KV."""
    pairs = sum(n * c + n * (n + 1) / 2 for n, c in zip(new, context, strict=True))  # of a query and a key
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    top_k = 0 if shape.experts is None else shape.experts.top_k
    return 2 * _body(shape, top_k) * sum(new) + 2 * _head(shape) * len(new) + attention


def forward_bytes(shape: Any, dtype: str, new: Lengths, context: Lengths) -> float:
    """Return the bytes that the same forward moves."""
    kv = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * (sum(new) + sum(context))
    num_experts = 0.0 if shape.experts is None else experts_read(shape.experts, sum(new))
    return (_body(shape, num_experts) + _head(shape) + kv) * getattr(torch, dtype).itemsize


def experts_read(experts: Any, num_tokens: int) -> float:
    """Return how many experts of a layer (`ExpertsConfig`) so many tokens are expected to choose, each `top_k`."""
    chosen: float = 1 - (1 - experts.top_k / experts.num_experts) ** num_tokens
    return experts.num_experts * chosen


def _body(shape: Any, num_experts: float) -> float:
    """Return the number of weights of all layers, with so many experts in a sparse one.

    Norms and biases, which are few, are left out.
    """
    heads = shape.num_heads + 2 * shape.num_kv_heads
    attention = shape.hidden_size * shape.head_dim * (heads + shape.num_heads)
    num_sparse, mlps = 0, 0.0
    if shape.experts is not None:
        num_sparse, router = len(shape.experts.layers), shape.experts.num_experts * shape.hidden_size
        mlps = num_sparse * (router + num_experts * 3 * shape.hidden_size * shape.experts.intermediate_size)
    dense = (shape.num_layers - num_sparse) * 3 * shape.hidden_size * shape.intermediate_size
    return shape.num_layers * attention + dense + mlps


def _head(shape: Any) -> int:
    return shape.vocab_size * shape.hidden_size


class Forwards:
    """Forwards of an engine of m3 or later, and their costs."""

    def __init__(self, engine: Any, model: Model) -> None:
        """`engine`: None where forwards are measured elsewhere, and only their costs are counted."""
        self.engine, self.shape, self.dtype = engine, decoder_shape(model), model.dtype

    def prefill(self, length: int, *, repeats: int = 3) -> Row:
        """Measure one prompt of `length` tokens."""
        work = drawn(1, prompts=(length, length), outputs=(1, 1), seed=SEED)
        steps = [self._steps(lambda: answer(self.engine, work))[0] for _ in range(repeats)]
        return self._point("prefill", length, steps)

    def decode(self, batch: int, context: int, num_steps: int) -> Row:
        """Measure decode steps of `batch` requests that have about `context` tokens each."""
        length = num_steps + 1 + batch * context // BUDGET  # the first request answers until the last one has started
        work = drawn(batch, prompts=(context, context), outputs=(length, length), seed=SEED)
        steps = self._steps(lambda: answer(self.engine, work))
        full = [step for step in steps if step[0].mode == "decode" and len(step[0].rids) == batch]
        return self._point("decode", batch, full) | {"context": context}

    def both(self, batch: int, context: int, piece: int, *, repeats: int = 3) -> Row:
        """Measure decode steps of `batch` requests that a prompt of `piece` tokens joins (m5 and later)."""
        length, rng = batch + 3 * repeats, Random(SEED + 1)
        own = drawn(batch, prompts=(context, context), outputs=(length, length), seed=SEED).requests
        pieces = [Request(tokens(rng, piece), 1, batch + 2 * number) for number in range(repeats)]  # all decode by then
        work = Workload([*own, *pieces], "steps")
        steps = self._steps(lambda: serve(self.engine, work))
        steps = [step for step in steps if step[0].mode == "mixed" and step[0].num_prompt_tokens == piece]
        assert len(steps) == repeats, f"{len(steps)} steps of both"
        return self._point("both", piece, steps) | {"decodes": batch}

    def _steps(self, work: Callable[[], object]) -> list[Step]:
        if hasattr(self.engine, "flush_cache"):
            self.engine.flush_cache()
        batches, steps = watched(self.engine, work, Batch, StepDone)
        return [(batch, step.milliseconds("execute") / 1e3) for batch, step in zip(batches, steps, strict=True)]

    def _point(self, kind: str, size: int, steps: Sequence[Step]) -> Row:
        """Return the median of steps of the same kind, and the costs of one of them."""
        batch, _ = steps[len(steps) // 2]
        return self.point(kind, size, statistics.median(s for _, s in steps), batch.extend_lens, batch.prefix_lens)

    def point(self, kind: str, size: int, seconds: float, new: Lengths, context: Lengths) -> Row:
        """Return the costs of a forward that took `seconds`."""
        flop, moved = forward_flops(self.shape, new, context), forward_bytes(self.shape, self.dtype, new, context)
        costs = {"flop": flop, "bytes": moved, "intensity": flop / moved}
        speeds = {"flops": flop / seconds, "bandwidth": moved / seconds}
        return {"kind": kind, "tokens": size, "seconds": seconds} | costs | speeds


def roof_bandwidth(points: Sequence[Row]) -> float:
    """Return the bytes per second that a read of this machine, or the best of these forwards, has reached."""
    return max([read_bandwidth(), *(point["bandwidth"] for point in points)])


def under_roof(points: Sequence[Row], dtype: str) -> Row:
    """Return the roof of this machine, and the points with their bounds in seconds.

    The roof is what torch reaches alone, or the best forward if that is more: kernels may do better than torch.
    """
    flops = max([peak_flops(getattr(torch, dtype)), *(point["flops"] for point in points)])
    bandwidth = roof_bandwidth(points)
    bound = [point | {"bound": max(point["flop"] / flops, point["bytes"] / bandwidth)} for point in points]
    return {"flops": flops, "bandwidth": bandwidth, "ridge": flops / bandwidth, "points": bound}
