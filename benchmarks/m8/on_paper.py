"""The step of a model of 235 billion weights on eight GPUs, on paper: what it reads, and what its collectives cost.

Nothing here is measured by the project. Sizes: config.json of Qwen/Qwen3-235B-A22B (94 layers, 128 experts of 1,536, of
which a token uses 8). GPU: NVIDIA's data sheet of the H200 SXM, 4.8 TB/s and 989 TFLOP/s in dense bfloat16. An
all-reduce of eight H200 in a CUDA graph: the table of one node in sgl-project/sglang pull request 22734, for NCCL and
for MSCCL++.
"""

from benchmarks.lesson import Row
from benchmarks.roofline import experts_read

RANKS, DTYPE_BYTES = 8, 2
BANDWIDTH, FLOPS = 4.8e12, 989e12
ALL_REDUCE_US = {
    "NCCL": {8192: 17.23, 131072: 20.13, 524288: 20.86},
    "MSCCL++": {8192: 6.00, 131072: 8.80, 524288: 11.96},
}
"""Microseconds by bytes; for other sizes those of the next larger one."""


class Shape:
    """The decoder."""

    num_layers, hidden_size, vocab_size = 94, 4096, 151_936
    num_heads, num_kv_heads, head_dim = 64, 4, 128

    class Experts:
        """Its experts, in every layer."""

        num_experts, top_k, intermediate_size = 128, 8, 1536

    experts = Experts


def step(num_tokens: int, context: int) -> Row:
    """Return the seconds of a decode step of so many requests, each behind `context` tokens, on one of the ranks."""
    shape, experts = Shape, Shape.experts
    kv_heads = max(shape.num_kv_heads / RANKS, 1)  # ranks share a KV head, and each has all of it
    heads = shape.num_heads / RANKS
    attention = shape.hidden_size * shape.head_dim * (2 * heads + 2 * kv_heads)
    router = shape.hidden_size * experts.num_experts
    expert = 3 * shape.hidden_size * experts.intermediate_size / RANKS
    read = experts_read(experts, num_tokens)
    head = shape.hidden_size * shape.vocab_size / RANKS
    weights = shape.num_layers * (attention + router + read * expert) + head
    kv = shape.num_layers * 2 * kv_heads * shape.head_dim * num_tokens * context
    used = shape.num_layers * (attention + router + experts.top_k * expert) + head
    num_collectives, num_bytes = 2 * shape.num_layers + 1, num_tokens * shape.hidden_size * DTYPE_BYTES
    reading = (weights + kv) * DTYPE_BYTES / BANDWIDTH
    return {
        "tokens": num_tokens,
        "context": context,
        "read": (weights + kv) * DTYPE_BYTES,
        "reading": reading,
        "computing": 2 * used * num_tokens / FLOPS,
        "collectives": num_collectives,
        "collective_bytes": num_bytes,
        "all_reduces": {
            name: num_collectives * 1e-6 * next(us for size, us in times.items() if num_bytes <= size)
            for name, times in ALL_REDUCE_US.items()
        },
    }


def weights_bytes() -> float:
    """Return the bytes of all weights."""
    shape, experts = Shape, Shape.experts
    attention = shape.hidden_size * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    each = 3 * shape.hidden_size * experts.intermediate_size
    layer = attention + shape.hidden_size * experts.num_experts + experts.num_experts * each
    return (shape.num_layers * layer + 2 * shape.hidden_size * shape.vocab_size) * DTYPE_BYTES


def paper() -> Row:
    """Return the steps of one request, of 16 and of 64, behind 2,048 tokens."""
    return {"ranks": RANKS, "weights": weights_bytes(), "rows": [step(number, 2048) for number in (1, 16, 64)]}
