"""An m6 engine on a GPU, with random weights in the shape of Qwen3-8B: `python -m benchmarks.device`.

The parts are ordered by what they say alone, because a lent machine may be taken back: each is written when it ends.
Without a GPU there are no numbers. `python -m benchmarks.device.wheels` lists the packages that a machine without a
network must be given.
"""

from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import BenchmarkError
from benchmarks.engines import SHAPE_0_6B
from benchmarks.lesson import Lesson, Parts, Size

DEVICE = "cuda"
SHAPE = {
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
}
QUICK_SHAPE = SHAPE | {"num_hidden_layers": 4}


def parts(size: Size) -> Parts:
    """Return everything that is measured."""
    from benchmarks.device.measures import Bench

    bench = Bench(DEVICE, QUICK_SHAPE if size.quick else SHAPE, size)
    return {
        "machine": bench.machine,
        "decode_1": lambda: bench.decode(1),
        "prefill": bench.prefill,
        "decode_64": lambda: bench.decode(64),
        "many": bench.many,
        "transformers": bench.transformers,
    }


def environment(quick: bool) -> dict[str, Any]:
    """Return the entries of the GPU. Raises `BenchmarkError` if there is none."""
    if not torch.cuda.is_available():
        raise BenchmarkError(
            "torch finds no CUDA device here, and this measures one. For a machine without a network: "
            "python -m benchmarks.device.wheels"
        )
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": {
            "name": properties.name,
            "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "triton": metadata.version("triton"),
        },
        "shape": SHAPE_0_6B | (QUICK_SHAPE if quick else SHAPE),
    }


LESSON = Lesson("device", parts, environment=environment, model=Path("Qwen3-8B, random weights"), rounds=3)
