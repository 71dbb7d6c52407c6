"""What prefill and decode demand of a machine, and what they get: operations, bytes, and measured seconds.

Counted: every weight, read once and used once for each new token (the output layer only for tokens that are sampled),
attention, and the KV that is read and written. Activations are left out: they stay in the processor's caches.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.m3_machine import Reader, peak_flops
from benchmarks.m3_models import TestedModel
from benchmarks.m3_workload import Ragged, watched
from m1_single_request.events import StepDone
from m2_continuous_batching.events import Batch
from m3_paged_attention.models.architecture import DecoderConfig

PREFILLS = (16, 64, 256, 512)
BATCHES = (1, 16, 64)
Row = dict[str, Any]


def forward_flops(config: DecoderConfig, new: Sequence[int], context: Sequence[int]) -> float:
    """Operations of one forward: `new` tokens of each request go in, `context` tokens of it are there already."""
    pairs = sum(n * c + n * (n + 1) / 2 for n, c in zip(new, context, strict=True))  # of a query and a key
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2 * _body(config) * sum(new) + 2 * _head(config) * len(new) + attention


def forward_bytes(config: DecoderConfig, dtype: str, new: Sequence[int], context: Sequence[int]) -> float:
    """Bytes that the same forward moves."""
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (sum(new) + sum(context))
    return (_body(config) + _head(config) + kv) * getattr(torch, dtype).itemsize


def decode_bytes(config: DecoderConfig, dtype: str, context: Sequence[int]) -> float:
    """Bytes of a decode step of requests with these contexts."""
    return forward_bytes(config, dtype, [1] * len(context), context)


def _body(config: DecoderConfig) -> int:
    """Weights of all layers; norms and biases are nothing beside them."""
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def _head(config: DecoderConfig) -> int:
    return config.vocab_size * config.hidden_size


def roofline(model: TestedModel, *, context: int, num_decodes: int, seed: int) -> Row:
    """The roof of this machine, and where prefills and decode steps of different sizes lie below it."""
    read = Reader()
    read()
    flops, bandwidth = peak_flops(getattr(torch, model.dtype)), max(read.bandwidths)
    points = [_prefill(model, length, seed) for length in PREFILLS]
    points += [_decode(model, batch, context, num_decodes, seed) for batch in BATCHES]
    for point in points:
        point["intensity"] = point["flop"] / point["bytes"]
        point["flops"] = point["flop"] / point["seconds"]
        point["bound"] = max(point["flop"] / flops, point["bytes"] / bandwidth)
    return {
        "flops": flops,
        "bandwidth": bandwidth,
        "read_with": read.way,
        "ridge": flops / bandwidth,
        "points": points,
    }


def _steps(model: TestedModel, work: Ragged) -> list[tuple[Batch, float]]:
    """Every step of a run, and the seconds of its forward."""
    engine = model.engine(max_num_seqs=max(BATCHES))
    seen = watched(engine, lambda: work.run(engine), Batch, StepDone)
    return [(b, s.execute_ms / 1e3) for b, s in zip(seen.of(Batch), seen.of(StepDone), strict=True)]


def _prefill(model: TestedModel, length: int, seed: int, *, repeats: int = 3) -> Row:
    """One prompt of `length` tokens."""
    work = Ragged.drawn(1, prompts=(length, length), outputs=(1, 1), seed=seed)
    seconds = statistics.median(_steps(model, work)[0][1] for _ in range(repeats))
    return {
        "kind": "prefill",
        "tokens": length,
        "seconds": seconds,
        "flop": forward_flops(model.config, [length], [0]),
        "bytes": forward_bytes(model.config, model.dtype, [length], [0]),
    }


def _decode(model: TestedModel, batch: int, context: int, num_decodes: int, seed: int) -> Row:
    """Decode steps of `batch` requests that have about `context` tokens each."""
    work = Ragged.drawn(batch, prompts=(context, context), outputs=(num_decodes + 1, num_decodes + 1), seed=seed)
    full = [(b, s) for b, s in _steps(model, work) if b.mode == "decode" and len(b.rids) == batch]
    contexts = [context + num_decodes // 2] * batch
    return {
        "kind": "decode",
        "tokens": batch,
        "context": context,
        "seconds": statistics.median(seconds for _, seconds in full),
        "flop": forward_flops(model.config, [1] * batch, contexts),
        "bytes": decode_bytes(model.config, model.dtype, contexts),
    }
