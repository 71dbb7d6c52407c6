"""Every kernel compiles for Hopper without a GPU, and fits: registers, shared memory, no spills in 16 bits."""

import ast
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMON = ["Qwen2.5-0.5B", "Qwen3-0.6B"]  # heads of 64 and of 128
SPARSE = "Qwen3-30B-A3B"
OF_EXPERTS = {"order_by_expert_kernel", "experts_kernel"}
MAX_REGISTERS = 255
MAX_SHARED_BYTES = 227 * 1024
MAX_SPILL_BYTES = {"bfloat16": 0, "float16": 0, "float32": 16}
MATRIX_UNITS = {
    "paged_prefill_kernel": ["wgmma"],
    "paged_decode_kernel": ["mma.sync", "wgmma"],
    "experts_kernel": ["mma.sync", "wgmma"],
}
"""A tile of fewer than 64 rows is too small for wgmma."""


def kernels_of_the_tree() -> set[str]:
    """The names of all Triton functions of the packages that no other one calls: a host launches them."""
    functions = [
        node
        for path in ROOT.glob("m[0-9]_*/**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    ]
    calls = {node.func.id for f in functions for node in ast.walk(f) if isinstance(node, ast.Call) and is_name(node)}
    return {function.name for function in functions} - calls


def is_name(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name)


def test_a_kernel_is_found_where_it_is_written() -> None:
    found = kernels_of_the_tree()
    assert {"paged_decode_kernel", "mrope_angles_kernel", "silu_mul_kernel"} <= found
    assert "online_softmax_step" not in found


def compile_for_sm90(dtypes: list[str], shapes: list[str], cache: Path) -> list[dict]:
    """In a process of its own: this one may have kernels of the interpreter, which cannot be compiled."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.compile_for_sm90", "--json"]
    command += ["--dtypes", *dtypes, "--shapes", *shapes]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtypes", "shapes"),
    [(["bfloat16"], [*COMMON, SPARSE, "heads of 96", "heads of 256"]), (["float16", "float32"], [*COMMON, SPARSE])],
    ids=["bf16", "fp16-fp32"],
)
def test_every_kernel_compiles_and_fits(dtypes, shapes, tmp_path) -> None:
    table = compile_for_sm90(dtypes, shapes, tmp_path)
    for case in itertools.product(dtypes, shapes):
        kernels = {row["kernel"] for row in table if (row["dtype"], row["shape"]) == case}
        assert kernels == kernels_of_the_tree() - (set() if case[1] == SPARSE else OF_EXPERTS)
    for row in table:
        assert row["registers"] <= MAX_REGISTERS, row
        assert row["shared_bytes"] <= MAX_SHARED_BYTES, row
        assert row["spill_bytes"] <= MAX_SPILL_BYTES[row["dtype"]], row
        if row["dtype"] != "float32" and row["kernel"] in MATRIX_UNITS:
            assert row["matrix_unit"] in MATRIX_UNITS[row["kernel"]], row
