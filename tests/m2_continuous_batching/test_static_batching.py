"""Static batching made of the engine's parts: the steps of a group are those of its longest answer."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from m2_continuous_batching import EngineError, SamplingParams
from m2_continuous_batching.demo_static_batching import (
    Measurement,
    Workload,
    compare,
    comparison_table,
    make_workload,
    run_in_groups,
    what_it_shows,
)
from tests.m2_continuous_batching.engines import EXECUTIONS, MakeEngine, failing_runner, greedy, limits

LENGTHS = (2, 9, 4, 4, 1, 6, 3)
WORKLOAD = Workload([[5 + i, 6, 7][: 1 + i % 3] for i in range(7)], [greedy(length) for length in LENGTHS])


def measurement(steps: int, seconds: float, token_ids: list[tuple[int, ...]], max_num_seqs: int = 2) -> Measurement:
    """One with these numbers and a latency of 1, 2, 3, ... seconds for its requests."""
    latencies = [float(i + 1) for i in range(len(token_ids))]
    return Measurement(max_num_seqs, steps, seconds, latencies, token_ids)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_group_lasts_as_long_as_its_longest_answer(execution: str, make_engine: MakeEngine) -> None:
    engine, single = make_engine(**limits(3, execution=execution)), make_engine(**limits(1, execution=execution))
    measured = compare(engine, single, WORKLOAD, rounds=1)
    assert list(measured) == ["one by one", "static", "continuous"]
    assert measured["static"].num_steps == max(2, 9, 4) + max(4, 1, 6) + 3
    assert measured["one by one"].num_steps == sum(LENGTHS)
    assert measured["continuous"].num_steps == 11  # slots: 2 + 4 + 4 + ..., 9 + ..., each refilled when it is free
    for run in measured.values():
        assert run.num_tokens == sum(LENGTHS)
        assert run.token_ids == measured["one by one"].token_ids
        assert run.utilisation == sum(LENGTHS) / (run.num_steps * run.max_num_seqs) <= 1
        assert len(run.latencies) == 7 and 0 < max(run.latencies) <= run.seconds
    assert measured["one by one"].utilisation == 1


def test_the_next_group_comes_when_the_whole_group_has_ended(make_engine: MakeEngine) -> None:
    run = run_in_groups(make_engine(**limits(3)), WORKLOAD, 3)
    assert max(run.latencies[:3]) < min(run.latencies[3:6]) and max(run.latencies[3:6]) < run.latencies[6]
    assert run.latencies[0] < run.latencies[2] < run.latencies[1], "a short answer is there before the long one"


def test_the_fastest_of_several_rounds_counts(make_engine: MakeEngine) -> None:
    engine, single = make_engine(**limits(3)), make_engine(**limits(1))
    compare(engine, single, WORKLOAD, rounds=3)
    warmup = LENGTHS[0]
    assert single.stats().num_steps == warmup + 3 * sum(LENGTHS)
    assert engine.stats().num_steps == warmup + 3 * (18 + 11)


def test_a_failed_request_spoils_the_measurement(make_engine: MakeEngine) -> None:
    runner = failing_runner(RuntimeError("it broke"), rid="req-1", position=0)
    with pytest.raises(EngineError, match="it broke"):
        run_in_groups(make_engine({"model_runner": runner}, **limits(3)), WORKLOAD, 3)


def test_latencies_are_summed_up() -> None:
    run = measurement(10, 4.0, [(1, 2)] * 20)
    assert (run.mean_latency, run.p95_latency, run.tokens_per_second) == (10.5, 19.0, 10.0)
    assert measurement(1, 1.0, [(1,)]).p95_latency == 1.0


# --- the requests -----------------------------------------------------------------------------------------------------


def test_the_workload_is_varied_and_always_the_same() -> None:
    params = SamplingParams(max_tokens=128, temperature=0.7, seed=3)
    workload = make_workload(40, range(100, 400), params, longest_prompt=24)
    assert workload == make_workload(40, range(100, 400), params, longest_prompt=24)
    lengths = [each.max_tokens for each in workload.params]
    assert min(lengths) < 8 and 32 < max(lengths) <= 64 and len(set(lengths)) > 10
    assert sum(length < 32 for length in lengths) > 20, "short ones are more frequent"
    assert {len(prompt) for prompt in workload.prompts} <= set(range(4, 25))
    assert all(each == replace(params, max_tokens=each.max_tokens, ignore_eos=True) for each in workload.params)


@pytest.mark.parametrize(("longest_prompt", "max_tokens"), [(1, 1), (2, 3), (400, 1)])
def test_a_small_workload_keeps_its_limits(longest_prompt: int, max_tokens: int) -> None:
    workload = make_workload(9, [1, 2, 3], SamplingParams(max_tokens=max_tokens), longest_prompt=longest_prompt)
    assert all(1 <= len(prompt) <= longest_prompt for prompt in workload.prompts)
    assert all(1 <= each.max_tokens <= max_tokens for each in workload.params)


# --- the table --------------------------------------------------------------------------------------------------------


def shown(measured: dict[str, Measurement]) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(comparison_table(measured))
    return " ".join(console.file.getvalue().replace("│", " ").split())  # type: ignore[attr-defined]


def test_the_table_says_how_each_side_was_run_and_what_came_out() -> None:
    answers: list[tuple[int, ...]] = [(1,), (2, 3), (4, 5, 6)]
    said = shown(
        {
            "one by one": measurement(6, 6.0, answers, max_num_seqs=1),
            "static": measurement(5, 4.0, answers),
            "continuous": measurement(4, 2.0, answers),
        }
    )
    for row in (
        "steps 6 5 4",
        "output tokens 6 6 6",
        "100% of 1 60% of 2 75% of 2",
        "wall time 6.00 s 4.00 s 2.00 s",
        "tokens per second 1 2 3",
        "against one by one 1.00 x 1.50 x 3.00 x",
        "mean latency 2.00 s 2.00 s 2.00 s",
        "p95 latency 3.00 s 3.00 s 3.00 s",
        "an engine with max_num_seqs = 1",
        "2 requests are submitted at a time, the next 2 when all of these have ended",
        "all requests submitted at once",
    ):
        assert row in said, row


def test_the_difference_is_put_in_words() -> None:
    static, continuous = measurement(5, 4.0, [(1, 2), (3,)]), measurement(4, 2.0, [(1, 2), (3,)])
    said = what_it_shows({"static": static, "continuous": continuous})
    assert "7 of 10 slots stayed empty" in said and "80% of the steps" in said and "2.00 times" in said
    assert "same answers" in said
    other = replace(continuous, token_ids=[(1, 2), (4,)])
    assert "1 answer of 2 differ" in what_it_shows({"static": static, "continuous": other})
    assert "the same number of steps" in what_it_shows({"static": static, "continuous": static})
