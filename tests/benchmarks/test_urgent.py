"""The recorded day with urgent tenants: its file, and a small part of it."""

import pytest

from benchmarks.m3 import on_model
from benchmarks.m4.traffic import recorded
from benchmarks.m4.urgent import FILE, URGENT, arrivals, as_csv, day, urgent


def test_the_file_has_the_arrivals_that_the_seed_gives():
    assert FILE.read_text(encoding="utf-8") == as_csv(arrivals(len(recorded())))


def test_about_one_request_in_ten_is_urgent():
    priorities = [request.priority for request in day().requests]
    assert set(priorities) == {0, URGENT} and 0.08 < priorities.count(URGENT) / len(priorities) < 0.13


@pytest.mark.exhaustive
def test_both_sides_give_the_same_answers():
    found = on_model(lambda engines: urgent(engines, 24, 4096), max_model_len=4096)
    assert [side["same_answers"] for side in found["sides"].values()] == [24, 24]
