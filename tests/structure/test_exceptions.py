"""The file of exceptions is read and written."""

import pytest

from tests.structure.exceptions import Key, current, read, write

REASONS = {Key("m1_x.b.f(x)", "options_are_given"): "a test gives it", Key("m1_x.a.A", "everything_is_read"): "why not"}


def test_what_is_written_is_read_again_in_order() -> None:
    text = write(REASONS)
    assert read(text) == REASONS
    assert text.index("m1_x.a.A") < text.index("m1_x.b.f")


def test_an_exception_that_stands_there_twice_is_an_error() -> None:
    lines = write(REASONS).splitlines(keepends=True)
    with pytest.raises(ValueError, match="twice"):
        read("".join([*lines[:-1], lines[-2], lines[-1]]))


def test_what_is_not_found_any_more_is_left_out_and_what_is_new_has_no_reason() -> None:
    old, new = Key("m1_x.a.A", "everything_is_read"), Key("m1_x.a.B", "everything_is_read")
    assert current([old, new], REASONS) == {old: "why not", new: ""}
