"""What a piece of code asks of torch."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def operations() -> Iterator[Counter[str]]:
    """Counts the tensor operations that run inside."""
    seen: Counter[str] = Counter()

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    with Counting():  # type: ignore[no-untyped-call]
        yield seen


@contextmanager
def results() -> Iterator[list[tuple[torch.dtype, int]]]:
    """Collects the type and the number of elements of every tensor that the operations inside return."""
    seen: list[tuple[torch.dtype, int]] = []

    class Collecting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            returned = func(*args, **(kwargs or {}))
            values = returned if isinstance(returned, tuple | list) else (returned,)
            seen.extend((value.dtype, value.numel()) for value in values if isinstance(value, Tensor))
            return returned

    with Collecting():  # type: ignore[no-untyped-call]
        yield seen
