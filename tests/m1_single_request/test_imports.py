"""The first import of the package changes nothing of Python's collector that a program has set."""

import gc
import importlib
from collections.abc import Iterator

import pytest

from m1_single_request import _imports


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    gc.freeze()  # as conftest.py has it
    gc.enable() if was_enabled else gc.disable()


@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_the_collector_is_as_the_program_has_set_it(is_enabled: bool, is_frozen: bool) -> None:
    gc.enable() if is_enabled else gc.disable()
    gc.freeze() if is_frozen else gc.unfreeze()
    importlib.reload(_imports)
    assert gc.isenabled() is is_enabled
    assert (gc.get_freeze_count() > 0) is is_frozen
