"""The comparison of the demo: static batching takes the steps of the longest answer of each group."""

import io
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from m2_continuous_batching import EngineError, SamplingParams
from m2_continuous_batching.demo_comparison import ROUNDS, Run, compared, fastest, make_workload, run, same_answers
from m2_continuous_batching.demo_tour import conclusion
from tests.m2_continuous_batching.engines import EXECUTIONS, MakeEngine, failing_runner, greedy, limits

LENGTHS = (2, 9, 4, 4, 1, 6, 3)
WORKLOAD = [([5 + i, 6, 7][: 1 + i % 3], greedy(length)) for i, length in enumerate(LENGTHS)]


def a_run(steps: int, seconds: float, *token_ids: tuple[int, ...]) -> Run:
    """A run with these numbers; its requests end after 1, 2, 3, ... seconds."""
    return Run(seconds, [float(i + 1) for i in range(len(token_ids))], list(token_ids), list(range(steps)))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_group_lasts_as_long_as_its_longest_answer(execution: str, make_engine: MakeEngine) -> None:
    engine = make_engine(**limits(3, execution=execution))
    runs = fastest({str(size): partial(run, engine, WORKLOAD, size) for size in (1, 3, 7)})
    steps = {"1": sum(LENGTHS), "3": max(2, 9, 4) + max(4, 1, 6) + 3, "7": 11}
    assert {name: len(each.stats) for name, each in runs.items()} == steps
    assert engine.stats().num_steps == ROUNDS * sum(steps.values()), "each way runs in each round"
    for each in runs.values():
        assert each.num_tokens == sum(LENGTHS) and each.token_ids == runs["1"].token_ids
        assert len(each.latencies) == 7 and 0 < max(each.latencies) <= each.seconds
        assert max(stats.num_running for stats in each.stats) <= 3
    first, second, last = (runs["3"].latencies[part] for part in (slice(3), slice(3, 6), slice(6, 7)))
    assert max(first) < min(second) and max(second) < min(last), "the next group starts when all have ended"
    assert first[0] < first[2] < first[1], "a short answer ends before the long one"


def test_the_fastest_round_counts() -> None:
    runs = iter([a_run(5, 2.0, (1,)), a_run(5, 1.0, (2,))])
    assert fastest({"way": lambda: next(runs)})["way"].token_ids == [(2,)]


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


@pytest.mark.parametrize(("longest_prompt", "max_tokens"), [(1, 1), (2, 3), (400, 1)])
def test_a_small_workload_keeps_its_limits(longest_prompt: int, max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    for prompt, own in make_workload(9, [1, 2, 3], params, longest_prompt=longest_prompt):
        assert 1 <= len(prompt) <= longest_prompt and 1 <= own.max_tokens <= max_tokens


STATIC, CONTINUOUS = a_run(5, 4.0, (1, 2), (3,)), a_run(4, 2.0, (1, 2), (3,))


def test_the_difference_is_put_in_words() -> None:
    words = conclusion(STATIC, CONTINUOUS, 2)
    assert "7 of 10 slots stayed empty" in words and "80% of the steps, 2.00 times the tokens per second." in words
    assert "the tokens per second, because another program disturbed" in conclusion(STATIC, a_run(4, 9.0, (1, 2)), 2)
    assert conclusion(STATIC, STATIC, 2).startswith("No request waited")


def test_differing_answers_are_counted() -> None:
    other: dict[str, Any] = {"a": STATIC, "b": a_run(4, 2.0, (1, 2), (4,))}
    assert same_answers(other) == "1 of 2 answers differ: other batches round differently."
    assert "the same in each column, token for token, all 2 of them" in same_answers({"a": STATIC, "b": CONTINUOUS})


def test_the_table_has_a_column_for_each_run() -> None:
    console = Console(file=io.StringIO(), width=60)
    rows = {"speed": lambda own: f"{own.tokens_per_second:.1f}", "wait": lambda own: f"{own.mean_latency}"}
    console.print(compared({"static": STATIC, "continuous": CONTINUOUS}, rows))
    out = " ".join(console.file.getvalue().replace("│", " ").split())  # type: ignore[attr-defined]
    assert "static ┃ continuous" in out and "speed 0.8 1.5" in out and "wait 1.5 1.5" in out
    assert STATIC.mean(lambda number: number) == 2
