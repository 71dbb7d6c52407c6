"""What a piece of code asks of torch."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
