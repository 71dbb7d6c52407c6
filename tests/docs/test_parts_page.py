"""The tables of the page about parts are those of today's contracts."""

import pytest

from docs.parts import PAGE, table, written


def test_the_table_of_parts_is_that_of_the_contracts() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert table() in page, "run: python -m docs.parts"


@pytest.mark.exhaustive
def test_what_mistakes_are_told_is_what_the_page_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run: python -m docs.parts"
