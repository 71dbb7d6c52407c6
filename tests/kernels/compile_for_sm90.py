"""Compile for Hopper (sm_90), on a machine without a GPU, every Triton kernel that an engine launches, and report.

    python -m tests.kernels.compile_for_sm90            the table: registers, spills, shared memory, matrix unit
    python -m tests.kernels.compile_for_sm90 --json     the same for programs

The interpreter, which runs the kernels in the tests, accepts things that the compiler rejects; and only the compiler
tells whether a tile fits. So the engine's own functions are called here, on tensors of the `meta` device that have
shapes and no memory, under a driver that claims to be a Hopper and launches nothing. What is compiled is exactly what
a launch would ask for: the same tiles, the same constants, the same knowledge of which strides are multiples of 16.
The assembler comes with triton. TRITON_INTERPRET must not be set: an interpreted kernel is never compiled.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from m3_paged_attention.attention import triton_backend
from m3_paged_attention.attention.host_to_device import to_device
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.attention.triton_backend import TritonBackend
from m3_paged_attention.attention.triton_store import store_kv_kernel
from m3_paged_attention.kv_dtype import LARGEST
from m3_paged_attention.kv_storage import KVLayer
from m6_multimodal_pd.models.triton_mrope import gather_with_triton

TARGET = GPUTarget("cuda", 90, 32)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that kernels are compiled for."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    num_experts: int = 0
    """Experts of a layer; then `intermediate_size` is the width of one."""


SHAPES = (
    Shape("Qwen2.5-0.5B", 14, 2, 64, 896, 4864),
    Shape("Qwen3-0.6B", 16, 8, 128, 1024, 3072),
    Shape("Llama-3-8B", 32, 8, 128, 4096, 14336),
    Shape("Qwen3-30B-A3B", 32, 4, 128, 2048, 768, 128),
)
PADDED_SHAPES = (Shape("heads of 96", 32, 32, 96, 3072, 8192), Shape("heads of 256", 8, 4, 256, 2304, 9216))
PAGE = 16
NUM_TOKENS, NUM_POSITIONS = 40, 4096
STEPS = [[20, 17, 1, 1, 1], [1], [1] * 512, [4], [8], [16], [16] * 512]
"""New tokens of each row: prefills beside decodes, decodes of few and of many rows, and verifications. A kernel's code
depends on the number of rows and on the longest one, and on no length of a context."""
NUM_TOKENS_OF_EXPERTS, TOP_K = (1, 64, 512, 2048), 8
"""Tokens of a step whose experts are computed: the tile depends on the mean number of pairs of an expert."""
MULTIPROCESSORS = 132
"""Of an H100 and an H200."""


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled for one shape and type."""

    kernel: str
    shape: str
    dtype: str
    num_warps: int
    num_stages: int
    registers: int
    """Per thread; 255 is the most there is."""
    spill_bytes: int
    """Stored per thread to memory because the registers ran out."""
    shared_bytes: int
    """Per program; a Hopper multiprocessor gives a program 227 KiB at most."""
    matrix_unit: str


class HopperThatIsNotThere:
    """The part of triton's driver that compiling asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


def launches(shape: Shape, dtype: torch.dtype) -> None:
    """Call every function of the backend as a model of this shape does, with prefills and decodes in one step, and
    look up the angles of pictures."""

    def meta(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    backend = TritonBackend()
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    qkv = meta(NUM_TOKENS, heads + 2 * kv_heads, head_dim)  # fused: queries, keys and values are views of one tensor
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    cache = meta(9, PAGE, kv_heads, head_dim)
    layer = KVLayer(cache, cache)
    hidden = meta(NUM_TOKENS, shape.hidden_size)
    angles = meta(NUM_TOKENS, head_dim // 2, dtype=torch.float32)
    backend.add_rms_norm(hidden, hidden, meta(shape.hidden_size), 1e-6)
    query_key = qkv[:, : heads + kv_heads]
    backend.rms_norm(query_key, meta(heads + kv_heads, head_dim), 1e-6)
    backend.rotary(query_key, angles, angles)
    backend.store_kv(key, value, layer, meta(NUM_TOKENS, dtype=torch.int64))
    for lens in STEPS:
        backend.attention(query, layer, _metadata(lens), head_dim**-0.5)
    for kv_dtype in LARGEST:
        cache, scales = meta(*cache.shape, dtype=kv_dtype), meta(9, PAGE, kv_heads, dtype=torch.float32)
        layer = KVLayer(cache, cache, scales, scales)
        backend.store_kv(key, value, layer, meta(NUM_TOKENS, dtype=torch.int64))
        for lens in STEPS[:3]:
            backend.attention(query, layer, _metadata(lens), head_dim**-0.5)
    backend.silu_mul(meta(NUM_TOKENS, 2 * shape.intermediate_size))
    if shape.num_experts:
        gate_up = meta(shape.num_experts * 2 * shape.intermediate_size, shape.hidden_size)
        down = meta(shape.num_experts * shape.hidden_size, shape.intermediate_size)
        experts = backend.experts(gate_up, down, shape.num_experts)
        for num_tokens in NUM_TOKENS_OF_EXPERTS:
            chosen = meta(num_tokens, TOP_K, dtype=torch.int64)
            experts(meta(num_tokens, shape.hidden_size), chosen, meta(num_tokens, TOP_K))
    table, axes = meta(NUM_POSITIONS, head_dim // 2, dtype=torch.float32), meta(head_dim // 2, dtype=torch.int64)
    gather_with_triton(meta(3, NUM_TOKENS, dtype=torch.int64), table, table, axes)


def _metadata(query_lens: list[int]) -> AttentionMetadata:
    """A step of these numbers of new tokens."""
    tables, slots = np.zeros((len(query_lens), 4), np.int32), np.zeros(NUM_TOKENS, np.int64)
    metadata = AttentionMetadata.build(query_lens, [7] * len(query_lens), tables, slots)
    return to_device(metadata, torch.device("meta"))


def compile_all(shapes: tuple[Shape, ...], dtypes: tuple[str, ...]) -> Iterator[Compiled]:
    """Compile what the backend launches for these shapes and types, each kernel as often as a constant differs."""
    if not isinstance(store_kv_kernel, JITFunction):
        raise SystemExit("TRITON_INTERPRET is set: the kernels are interpreted in this process, not compiled")
    triton.runtime.driver.set_active(HopperThatIsNotThere())
    triton_backend.multiprocessors = lambda device: MULTIPROCESSORS
    launch = JITFunction.run
    compiled: list[tuple[str, Any]] = []

    def compile_only(kernel: Any, *args: Any, **kwargs: Any) -> None:
        compiled.append((kernel.__name__, launch(kernel, *args, **{**kwargs, "warmup": True})))

    JITFunction.run = compile_only
    try:
        for shape in shapes:
            for dtype in dtypes:
                compiled.clear()
                launches(shape, DTYPES[dtype])
                for name, binary in compiled:
                    yield _resources(name, shape.name, dtype, binary)
    finally:
        JITFunction.run = launch


def _resources(kernel: str, shape: str, dtype: str, binary: Any) -> Compiled:
    ptx = binary.asm["ptx"]
    report = _assemble(ptx)
    spill = re.search(r"(\d+) bytes spill stores", report)
    registers = re.search(r"Used (\d+) registers", report)
    if spill is None or registers is None:
        raise SystemExit(f"ptxas reported neither spills nor registers for {kernel}:\n{report}")
    return Compiled(
        kernel=kernel,
        shape=shape,
        dtype=dtype,
        num_warps=binary.metadata.num_warps,
        num_stages=binary.metadata.num_stages,
        registers=int(registers[1]),
        spill_bytes=int(spill[1]),
        shared_bytes=binary.metadata.shared,
        matrix_unit=next((unit for unit in ("wgmma", "mma.sync") if unit in ptx), "-"),
    )


def _assemble(ptx: str) -> str:
    """What ptxas says of a program: triton calls it too, and keeps its report to itself."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    architecture = re.search(r"\.target (sm_\w+)", ptx)
    assert architecture is not None
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas, "-v", f"-arch={architecture[1]}", source, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def main() -> None:
    """Print one line per kernel, shape and type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--shapes", nargs="+", choices=[shape.name for shape in SHAPES + PADDED_SHAPES])
    arguments = parser.parse_args()
    shapes = tuple(s for s in SHAPES + PADDED_SHAPES if arguments.shapes is None or s.name in arguments.shapes)
    if not arguments.json:
        print(f"triton {triton.__version__}, sm_{TARGET.arch}, pages of {PAGE}")
        columns = [field.name for field in dataclasses.fields(Compiled)]
        print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for compiled in compile_all(shapes, tuple(arguments.dtypes)):
        values = dataclasses.asdict(compiled)
        print(json.dumps(values) if arguments.json else "| " + " | ".join(map(str, values.values())) + " |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
