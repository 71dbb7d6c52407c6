"""For tests only: let Triton's interpreter compute bfloat16 as a GPU does.

numpy has no bfloat16, so the interpreter keeps such a tensor as 16-bit integers, the bit patterns. Loads and stores are
right; but `tl.dot` multiplies the bit patterns as if they were numbers, and a cast from fp32 cuts the lower bits off
where hardware rounds to the nearest, ties to even. `install()` replaces these two operations of the interpreter. The
kernels stay as they are for the GPU. (triton-lang/triton issues 10945 and 11585; the same in triton 3.6 and 3.7.)
Other arithmetic on bfloat16 stays wrong: kernels convert to fp32 straight after the load.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def widen(bits: np.ndarray) -> np.ndarray:
    """The fp32 values of bfloat16 bit patterns: bfloat16 is the upper half of fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """The bfloat16 bit patterns nearest to fp32 values. A carry may run up into the exponent: that is how it rounds."""
    bits = np.array(values, np.float32, order="C").view(np.uint32).astype(np.uint64)
    half_less_the_tie = 0x7FFF + (bits >> 16 & 1)
    return np.where(np.isnan(values), 0x7FC0, (bits + half_less_the_tie) >> 16).astype(np.uint16)


def install() -> None:
    """Replace the interpreter's `tl.dot` and its casts. To be called before a kernel runs; once or more often."""
    if getattr(InterpreterBuilder, "computes_bf16", False):
        return
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _as_fp32(a), _as_fp32(b), *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        to_bf16 = target.scalar == tl.bfloat16
        if _is_bf16(source):
            return source if to_bf16 else cast(self, _as_fp32(source), target)
        if to_bf16:
            return TensorHandle(narrow(source.data.astype(np.float32)), tl.bfloat16)
        return cast(self, source, target)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
    InterpreterBuilder.computes_bf16 = True


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _as_fp32(handle: Any) -> Any:
    return TensorHandle(widen(handle.data), tl.float32) if _is_bf16(handle) else handle
