"""What a step costs by the table: straight lines between what was measured, and the largest piece that fits a limit."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, strategies as st

from m1_single_request.errors import ConfigError
from m5_chunked_prefill_spec import cost_table
from m5_chunked_prefill_spec.cost_table import LONGEST_MS, CostTable, measure, milliseconds, sizes_up_to

TABLE = CostTable((1, 4, 16, 64), (1.0, 1.0, 4.0, 10.0), context_ms=0.5, decode_context_ms=2.0)

QUARTERS = st.integers(0, 16).map(lambda number: number / 4)


@st.composite
def tables(draw: Any) -> CostTable:
    """Any table, of round numbers."""
    sizes = (1, *sorted(draw(st.sets(st.integers(2, 300), min_size=1, max_size=5))))
    costs = draw(st.lists(st.integers(1, 400), min_size=len(sizes), max_size=len(sizes)).map(sorted))
    step_ms = tuple(cost / 8 for cost in costs)
    return CostTable(sizes, step_ms, context_ms=draw(QUARTERS), decode_context_ms=draw(QUARTERS))


# --- a look at it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(1, 1.0), (2, 1.0), (4, 1.0), (5, 1.25), (10, 2.5), (16, 4.0), (40, 7.0), (64, 10.0), (65, 10.125), (112, 16.0)],
)
def test_between_two_sizes_and_beyond_the_last_one_runs_a_straight_line(num_tokens: int, expected: float) -> None:
    assert TABLE.step(num_tokens) == expected


def test_every_token_pays_for_the_tokens_before_it() -> None:
    assert TABLE.step(4, context=4 * 500) == 1.0 + 0.5 * 2
    assert TABLE.step(1, context=1000) - TABLE.step(1) == 0.5
    assert TABLE.step(1, decode_context=1000) - TABLE.step(1) == 2.0
    assert TABLE.step(1, 1000, 1000) - TABLE.step(1) == 2.5


@given(tables(), st.integers(1, 400), st.integers(0, 10_000))
def test_a_larger_step_never_costs_less(table: CostTable, num_tokens: int, context: int) -> None:
    assert 0 < table.step(num_tokens, context) <= table.step(num_tokens + 1, context)
    assert table.step(num_tokens, context) <= table.step(num_tokens, context + 1)
    assert table.step(num_tokens, context, context) <= table.step(num_tokens, context, context + 1)


# --- the largest piece ------------------------------------------------------------------------------------------------


@given(
    table=tables(),
    limit_ms=st.integers(0, 800).map(lambda x: x / 8),
    most=st.integers(0, 120),
    others=st.integers(0, 40),
    decode_context=st.integers(0, 5000),
    start=st.integers(0, 2000),
)
def test_the_largest_piece_is_what_trying_all_of_them_finds(
    table: CostTable, limit_ms: float, most: int, others: int, decode_context: int, start: int
) -> None:
    def cost(size: int) -> float:
        return table.step(others + size, size * start, decode_context)

    fitting = [size for size in range(1, most + 1) if cost(size) <= limit_ms]
    found = table.largest(limit_ms, most, others=others, decode_context=decode_context, start=start)
    assert found == max(fitting, default=0)


def test_nothing_fits_where_the_others_alone_take_too_long() -> None:
    assert TABLE.largest(4.0, 64, others=17, decode_context=0, start=0) == 0
    assert TABLE.largest(4.0, 64, others=15, decode_context=0, start=0) == 1
    assert TABLE.largest(1e9, 0, others=1, decode_context=0, start=0) == 0


# --- what is no table -------------------------------------------------------------------------------------------------

NO_TABLES: dict[str, dict[str, Any]] = {
    "no sizes": {"num_tokens": (), "step_ms": ()},
    "not from 1 on": {"num_tokens": (2, 4)},
    "more sizes than costs": {"num_tokens": (1, 2, 4)},
    "sizes that fall": {"num_tokens": (1, 4, 2), "step_ms": (1.0, 2.0, 3.0)},
    "costs that fall": {"step_ms": (2.0, 1.0)},
    "a step that costs nothing": {"step_ms": (0.0, 1.0)},
    "no number": {"step_ms": (1.0, float("nan"))},
    "words": {"step_ms": ("1", "2")},
    "a negative context": {"context_ms": -0.1},
    "no context at all": {"context_ms": None},
}


@pytest.mark.parametrize("name", NO_TABLES)
def test_what_is_no_table_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cost table"):
        CostTable(**{"num_tokens": (1, 4), "step_ms": (1.0, 2.0)} | NO_TABLES[name])


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "expected"), [(1, [1, 2]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20])]
)
def test_sizes_double_up_to_the_budget(most: int, expected: list[int]) -> None:
    assert sizes_up_to(most) == expected


@given(st.lists(st.integers(1, 100), min_size=4, max_size=9), st.integers(0, 300), st.integers(0, 300))
def test_what_seems_to_get_cheaper_was_measured_in_a_quieter_moment(laps: list[int], of_few: int, of_many: int) -> None:
    sizes = [2**i for i in range(len(laps))]
    many = min(sizes[-1], 128)

    def cost_of(num_tokens: int, context: int) -> float:
        more = {4: of_few / 10, many: (of_few if many == 4 else of_many) / 10}
        return laps[sizes.index(num_tokens)] + (more[num_tokens] if context else 0.0)

    table = measure(cost_of, sizes, context=500)
    assert table.num_tokens == tuple(sizes)
    assert table.step_ms == tuple(max(laps[: i + 1]) for i in range(len(laps)))
    assert table.decode_context_ms == pytest.approx(of_few / 10 * 1000 / (4 * 500), abs=1e-9)
    assert table.context_ms == pytest.approx(of_many / 10 * 1000 / (many * 500), abs=1e-9)


def test_a_context_that_seems_to_cost_less_than_nothing_costs_nothing() -> None:
    table = measure(lambda num_tokens, context: 1.0 if context else 2.0, [1, 2, 4], context=100)
    assert table.context_ms == table.decode_context_ms == 0


@pytest.mark.parametrize("disturbed", [0, 1])
def test_what_is_disturbed_for_a_while_is_asked_once_more(disturbed: int) -> None:
    asked = Counter[tuple[int, int]]()

    def cost_of(num_tokens: int, context: int) -> float:
        asked[num_tokens, context] += 1
        slow = 10 if asked[num_tokens, context] == 1 + disturbed else 1
        return slow * num_tokens * (1 + context / 100)

    table = measure(cost_of, [1, 2, 4, 8], context=100)
    assert table == CostTable((1, 2, 4, 8), (1.0, 2.0, 4.0, 8.0), context_ms=10.0, decode_context_ms=10.0)
    assert set(asked.values()) == {2}


def test_one_slow_answer_cuts_no_table_off() -> None:
    asked = Counter[tuple[int, int]]()

    def cost_of(num_tokens: int, context: int) -> float:
        asked[num_tokens, context] += 1
        return 2 * LONGEST_MS if (num_tokens, asked[2, 0]) == (2, 1) else num_tokens

    table = measure(cost_of, [1, 2, 4, 8], context=100)
    assert table.step_ms == (1.0, 2.0, 4.0, 8.0)


def test_sizes_that_take_too_long_are_left_out_but_for_the_first_of_them() -> None:
    asked = []

    def cost_of(num_tokens: int, context: int) -> float:
        asked.append(num_tokens)
        return num_tokens * LONGEST_MS / 10

    table = measure(cost_of, [1, 2, 4, 8, 16, 32, 64], context=100)
    assert table.num_tokens == (1, 2, 4, 8, 16) and max(asked) == 16
    assert table.step(64) == pytest.approx(64 * LONGEST_MS / 10), "the line goes on"
    assert measure(lambda num_tokens, context: 2 * LONGEST_MS, [1, 2, 4], context=1).num_tokens == (1, 2)


def test_a_call_is_timed_by_the_quickest_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    now, laps = [0.0], iter([50.0, 0.003, 9.0, 0.002])

    def run() -> None:
        now[0] += next(laps)

    monkeypatch.setattr(cost_table.time, "perf_counter", lambda: now[0])
    assert milliseconds(run) == pytest.approx(2.0)
    assert next(laps, None) is None, "four calls"
