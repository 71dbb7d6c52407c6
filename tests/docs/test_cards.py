"""The cards of the landing page: one for each engine of the course, with numbers of the recorded tables."""

import re

import pytest

from docs.cards import COURSE, Card, html_of
from docs.record_steps import PACKAGE


def test_each_engine_of_the_course_has_a_card() -> None:
    assert [card.lesson for card in COURSE] == list(PACKAGE.values())


@pytest.mark.parametrize("card", COURSE, ids=lambda card: card.lesson)
def test_a_card_has_two_numbers_and_the_minutes_of_its_pages(card: Card) -> None:
    text = html_of(card)
    before, after = re.search("<b>(.*?)</b> → <b>(.*?)</b>", text).groups()
    assert re.match(r"\d", before) and re.match(r"\d", after) and before != after
    assert int(re.search(r"<small>(\d+) minutes</small>", text)[1]) >= 10
