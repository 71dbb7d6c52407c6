"""Every kernel compiles for Hopper without a GPU, and fits: registers, shared memory, no spills in 16 bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from m3_paged_attention.attention import triton_attention, triton_pointwise

ROOT = Path(__file__).parents[2]
SHAPES = {
    "bfloat16": ["Qwen2.5-0.5B", "Qwen3-0.6B", "heads of 96", "heads of 256"],
    "float16": ["Qwen2.5-0.5B", "Qwen3-0.6B"],
    "float32": ["Qwen2.5-0.5B", "Qwen3-0.6B"],
}
MAX_REGISTERS = 255
MAX_SHARED_BYTES = 227 * 1024
MAX_SPILL_BYTES = {"bfloat16": 0, "float16": 0, "float32": 16}


def compile_for_sm90(dtype: str, cache: Path) -> list[dict]:
    """In a process of its own: this one may have kernels of the interpreter, which cannot be compiled."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.compile_for_sm90", "--json", "--dtypes", dtype]
    command += ["--shapes", *SHAPES[dtype]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("dtype", SHAPES)
def test_every_kernel_compiles_and_fits(dtype, tmp_path) -> None:
    table = compile_for_sm90(dtype, tmp_path)
    modules = vars(triton_attention) | vars(triton_pointwise)
    for shape in SHAPES[dtype]:
        kernels = {row["kernel"] for row in table if row["shape"] == shape}
        assert kernels == {name for name in modules if name.endswith("_kernel")}
    for row in table:
        assert row["registers"] <= MAX_REGISTERS, row
        assert row["shared_bytes"] <= MAX_SHARED_BYTES, row
        assert row["spill_bytes"] <= MAX_SPILL_BYTES[dtype], row
        if dtype != "float32" and row["kernel"] in ("paged_prefill_kernel", "paged_decode_kernel"):
            prefill = row["kernel"] == "paged_prefill_kernel"
            assert row["matrix_unit"] == ("wgmma" if prefill else "mma.sync"), row  # decode's 16 rows are few for wgmma
