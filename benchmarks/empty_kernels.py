"""Kernels of the `native` backend that compute nothing, so that a step takes the time of its Python.

They have the names in the `SIGNATURES` of the checkout that is measured, so that the sides may have other kernels. Only
`linear` and `best_tokens` write: logits in which one token is the best, and this token.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

TOKEN = 77
"""The token of every step, an ordinary one."""
PRECISIONS = {"float32": ("float", "1"), "bfloat16": ("short", "0x3f80")}
"""By precision: the type of a number, and one."""
WRITING = "".join(
    f"""
void linear_{precision}(void*, void*, void*, {number}* y, long rows, long, long out, int) {{
    for ({number}* end = y + rows * out; y < end; y += out) {{
        __builtin_memset(y, 0, out * sizeof *y);
        y[{TOKEN} % out] = {one};
    }}
}}
void best_tokens_{precision}(void*, void*, void*, void*, long* tokens, int, long rows, long, long out, int) {{
    for (long r = 0; r < rows; r++) tokens[r] = {TOKEN} % out;
}}
"""
    for precision, (number, one) in PRECISIONS.items()
)


def source_of(names: Iterable[str]) -> str:
    """Return the C++ of functions with these names, and any arguments."""
    empty = "".join(f"void {name}() {{}}\n" for name in names if f" {name}(" not in WRITING)
    return f'extern "C" {{\n{empty}{WRITING}}}\n'


@contextmanager
def empty_kernels() -> Iterator[None]:
    """Compile and load these in place of the kernels of an engine that is built in the block."""
    from m3_paged_attention.attention import native_library

    names = [f"{name}_{precision}" for name in native_library.SIGNATURES for precision in native_library.PRECISIONS]
    with TemporaryDirectory() as folder:
        native_library.SOURCES = Path(folder)
        (native_library.SOURCES / "kernels.cpp").write_text(source_of(names))
        yield
