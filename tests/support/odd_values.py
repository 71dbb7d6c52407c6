"""Values that no parameter is made for, and what an engine answers to them."""

import enum
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m1_single_request import EngineError


class Silent:
    """Has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Quarrelsome:
    """Equals nothing, has no hash and no truth value, and raises for each."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise RuntimeError("no truth value")


class Number(enum.IntEnum):
    """A whole number of another class."""

    THREE = 3


def nested() -> list[Any]:
    """A list of very many levels."""
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


ODD: dict[str, Any] = {
    "nothing": None,
    "true": True,
    "zero": 0,
    "minus one": -1,
    "2**63": 2**63,
    "10**30": 10**30,
    "-10**30": -(10**30),
    "10**5000": 10**5000,
    "NaN": math.nan,
    "infinity": math.inf,
    "a half": 0.5,
    "an empty text": "",
    "half a pair": "\ud800",
    "a NUL": "a\0b",
    "a long text": "x" * 10**6,
    "a path": Path("x"),
    "half a pair in a path": Path("\udcff"),
    "bytes": b"x" * 10**6,
    "an empty list": [],
    "a list of text": ["x"],
    "a list of half a pair": ["\ud800"],
    "a list of NaN": [math.nan],
    "a long list": [2**40] * 10**5,
    "a long range": range(10**9),
    "many texts": [f"x{number}" for number in range(20_000)],
    "many levels": nested(),
    "a mapping": {1: 2},
    "a mapping of half a pair": {"\ud800": 1},
    "a set": {1},
    "an object": object(),
    "a class": int,
    "a function": lambda *_, **__: None,
    "numpy's number": np.int64(3),
    "numpy's double": np.float64(0.5),
    "an array": np.array([1, 2]),
    "an empty array": np.array([]),
    "a large array": np.zeros((500, 500)),
    "a tensor": torch.tensor([1, 2]),
    "a tensor of one number": torch.tensor(3),
    "a list of an array": [np.array([1, 2])],
    "a decimal": Decimal(3),
    "a fraction": Fraction(1, 2),
    "a complex number": 1j,
    "an enum": Number.THREE,
    "no text": Silent(),
    "no comparison": Quarrelsome(),
    "a list of no comparison": [Quarrelsome()],
}

LONGEST_MESSAGE = 500
LONGEST_SECONDS = 1.0


def answer_to(call: Callable[[], Any]) -> str:
    """How a call ended: accepted, or the type of its `EngineError` and its message.

    Any other error, a long message, several lines, or a second of work fail the test.
    """
    began = time.thread_time()  # of this thread alone: the machine may be busy
    try:
        call()
        answer = "accepted"
    except EngineError as error:
        message = str(error)
        assert len(message) < LONGEST_MESSAGE, f"{len(message)} characters: {message[:200]}"
        assert "\n" not in message
        answer = f"{type(error).__name__}: {message}"
    assert time.thread_time() - began < LONGEST_SECONDS
    return answer


@contextmanager
def about(*what: str) -> Iterator[None]:
    """Name the parameter and the value in whatever fails inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(" ".join(what))
        raise
