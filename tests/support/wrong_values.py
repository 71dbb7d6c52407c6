"""Values that a field of a configuration refuses, each with its name."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from m1_single_request.errors import ConfigError, shown

NAN, INFINITE = float("nan"), float("inf")
Wrong = Mapping[Any, Mapping[str, tuple[Any, ...]]]
"""By configuration and field."""


def each_of(wrong: Wrong) -> pytest.MarkDecorator:
    """One test for each value, of `make`, `name` and `value`."""
    cases = [(make, name, value) for make, own in wrong.items() for name, values in own.items() for value in values]
    return pytest.mark.parametrize(("make", "name", "value"), cases, ids=lambda value: getattr(value, "__name__", None))


def check_refused(make: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name}={shown(value)}")):
        make(**{name: value})
