"""The comparison of the demo: static batching takes the steps of the longest answer of each group."""

import io
import re
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
from rich.console import Console

from m2_continuous_batching import EngineError, SamplingParams
from m2_continuous_batching.demo_tour import ROUNDS, Run, compare, conclusion, make_workload, run, same_answers
from tests.m2_continuous_batching.engines import EXECUTIONS, MakeEngine, failing_runner, greedy, limits

LENGTHS = (2, 9, 4, 4, 1, 6, 3)
WORKLOAD = [([5 + i, 6, 7][: 1 + i % 3], greedy(length)) for i, length in enumerate(LENGTHS)]


def a_run(steps: int, seconds: float, *token_ids: tuple[int, ...]) -> Run:
    """A run with these numbers; its requests end after 1, 2, 3, ... seconds."""
    return Run(seconds, [float(i + 1) for i in range(len(token_ids))], list(token_ids), list(range(steps)))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_group_lasts_as_long_as_its_longest_answer(execution: str, make_engine: MakeEngine) -> None:
    engine, console = make_engine(**limits(3, execution=execution)), Console(file=io.StringIO(), width=100)
    runs = compare(WORKLOAD, {str(size): (engine, size) for size in (1, 3, 7)}, console)
    file: Any = console.file
    steps = {"1": sum(LENGTHS), "3": max(2, 9, 4) + max(4, 1, 6) + 3, "7": 11}
    assert {name: len(each.stats) for name, each in runs.items()} == steps
    assert engine.stats().num_steps == ROUNDS * sum(steps.values()), "each way runs in each round"
    for name, each in runs.items():
        assert each.token_ids == runs["1"].token_ids and each.tokens_per_second == sum(LENGTHS) / each.seconds
        assert len(each.latencies) == 7 and 0 < max(each.latencies) <= each.seconds
        running = [stats.num_running for stats in each.stats]
        assert max(running) <= 3
        row = (
            rf"{name} +{len(running)} +{max(running)} +{mean(running):.1f} +[\d.]+ \w+ +{each.tokens_per_second:,.0f} "
        )
        assert re.search(row, file.getvalue())
    first, second, last = (runs["3"].latencies[part] for part in (slice(3), slice(3, 6), slice(6, 7)))
    assert max(first) < min(second) and max(second) < min(last), "the next group starts when all have ended"
    assert first[0] < first[2] < first[1], "a short answer ends before the long one"


def test_a_failed_request_ends_the_comparison(make_engine: MakeEngine) -> None:
    runner = failing_runner(RuntimeError("it broke"), rid="req-1", position=0)
    with pytest.raises(EngineError, match="it broke"):
        run(make_engine({"model_runner": runner}, **limits(3)), WORKLOAD, 3)


def test_the_workload_is_varied_and_always_the_same() -> None:
    params = SamplingParams(max_tokens=128, temperature=0.7, seed=3)
    workload = make_workload(40, range(100, 400), params, longest_prompt=24)
    assert workload == make_workload(40, range(100, 400), params, longest_prompt=24)
    lengths = [own.max_tokens for _, own in workload]
    assert min(lengths) < 8 and 32 < max(lengths) <= 64 and len(set(lengths)) > 10
    assert sum(length < 32 for length in lengths) > 20, "short ones are more frequent"
    assert {len(prompt) for prompt, _ in workload} <= set(range(4, 25))
    assert all(own == replace(params, max_tokens=own.max_tokens, ignore_eos=True) for _, own in workload)


def test_drawn_answers_have_a_seed_so_that_only_rounding_differs(make_engine: MakeEngine) -> None:
    engine = make_engine(**limits(3, execution="per_request"))
    workload = make_workload(7, range(5, 40), SamplingParams(max_tokens=9, temperature=1.0), longest_prompt=4)
    assert len({own.seed for _, own in workload}) == 7, "no two requests draw the same numbers"
    runs = {str(size): run(engine, workload, size) for size in (1, 7)}
    assert "are the same" in same_answers(*(own.token_ids for own in runs.values()))


def test_the_difference_is_put_in_words() -> None:
    static = a_run(7, 4.0, (1, 2), (3,), (1, 2, 3), (4,), (5, 6))  # groups of 2, the last one of one request
    words = conclusion(static, a_run(5, 2.0, *static.token_ids))
    assert "71% of the steps, 2.00 times the tokens per second." in words
    disturbed = conclusion(static, a_run(5, 9.0, *static.token_ids))
    assert "the tokens per second, because another program disturbed" in disturbed
    assert conclusion(static, static).startswith("Both take as many steps.")


def test_differing_answers_are_counted() -> None:
    one, other = [(1, 2), (3,)], [(1, 2), (4,)]
    assert same_answers(one, other) == "1 of 2 answers differ: other batches round differently."
    assert "the same, token for token, all 2 of them" in same_answers(one, one, one)
