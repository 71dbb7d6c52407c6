"""The deliberate faults of tests/faults are still faults of today's code."""

from pathlib import Path

import pytest

from tests.faults.__main__ import faults, patched

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault["id"])
def test_a_fault_is_a_change_of_one_place(fault: dict[str, str]) -> None:
    text = (ROOT / fault["file"]).read_text()
    changed = patched(fault, text)
    assert changed != text
    compile(changed, fault["file"], "exec")


def test_ids_are_unique() -> None:
    ids = [fault["id"] for fault in faults()]
    assert len(set(ids)) == len(ids)
