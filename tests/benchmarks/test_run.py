"""`python -m benchmarks run`: two engines in paired rounds on a small workload, with parts of one's own, and errors."""

import json
import math
import re

import pytest
import torch

from benchmarks import BenchmarkError, side as side_module
from benchmarks.__main__ import main
from benchmarks.metrics import METRICS, Goal, compared, goodput, measured
from benchmarks.side import Measured, SideProcess
from benchmarks.timing import interval, t_quantile

pytestmark = pytest.mark.exhaustive  # whole runs of a benchmark

SMALL = ["--rounds", "2", "--requests", "3", "--threads", "1", "--device", "cpu"]
MINE = """
from m4_radix_cache.mem_cache.radix_cache import RadixCache

class Mine(RadixCache):
    strategies = {"lru": lambda node: -node.last_access_time}

PARTS = {"prefix_cache": Mine}
WRONG = {"prefix_cash": Mine}
NO_PARTS = [Mine]
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def run(tmp_path, capsys, *arguments):
    """Run the command; return what it printed and the JSON that it wrote."""
    status = main(["run", *SMALL, "--output", str(tmp_path / "out"), *arguments])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return " ".join(printed.out.split()), json.loads((tmp_path / "out" / "run.json").read_text())


def error(capsys, *arguments):
    """Return the one line of an error."""
    assert main(["run", *SMALL, *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.exhaustive
def test_two_milestones_answer_the_same_requests_with_the_same_tokens(tmp_path, capsys):
    printed, results = run(
        tmp_path, capsys, "--rounds", "3", "--milestone", "m4", "--against", "m3", "--workload", "shared"
    )
    assert "3 of 3 answers are equal in every round. The tokens are the same." in printed
    assert set(results["sides"]) == {"m4", "m3"}
    assert results["sides"]["m4"]["hit rate"]["mean"] > 0.3 and results["sides"]["m3"]["hit rate"]["mean"] == 0
    assert all(len(row["rounds"]) == 3 for side in results["sides"].values() for row in side.values())
    low, high = results["comparison"]["tokens/s"]["interval"]
    assert 0 < low <= results["comparison"]["tokens/s"]["mean"] <= high
    assert "tokens/s" in printed and "goodput" in printed


@pytest.mark.exhaustive
def test_a_part_of_ones_own_is_measured_against_the_default_one(mine, tmp_path, capsys):
    printed, results = run(tmp_path, capsys, "--milestone", "m4", "--parts", f"{mine}:PARTS", "--workload", "memory")
    assert list(results["sides"]) == [f"m4 {mine}:PARTS", "m4"]
    assert results["comparison"]["tokens/s"]["interval"] is None and "[-]" in printed
    assert "Fewer than 3 rounds give no confidence interval." in printed
    assert results["same_tokens"] == results["num_requests"] == 3


@pytest.mark.exhaustive
def test_drafts_are_on_for_texts_and_their_acceptance_is_measured(tmp_path, capsys):
    arguments = ("--milestone", "m5", "--against", "m4", "--workload", "repeat", "--requests", "2")
    _, results = run(tmp_path, capsys, *arguments)
    assert results["sides"]["m5"]["acceptance"]["mean"] > 0.5 and "acceptance" not in results["sides"]["m4"]
    assert results["same_tokens"] == 2


@pytest.mark.exhaustive
def test_settings_of_either_side_can_be_given(tmp_path, capsys):
    settings = ("--set", "cache.prefix_cache=hash", "--set-against", "cache.prefix_cache=chunk")
    _, results = run(tmp_path, capsys, "--milestone", "m4", "--workload", "chat", *settings)
    assert list(results["sides"]) == ["m4 cache.prefix_cache=hash", "m4 cache.prefix_cache=chunk"]
    hits = [side["hit rate"]["mean"] for side in results["sides"].values()]
    assert hits[0] > 0.3 and hits[1] == 0


@pytest.mark.exhaustive
def test_requests_come_from_a_file_at_their_times_and_turns_follow_their_conversation(tmp_path, capsys):
    path = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": "A token is", "max_tokens": 4, "ignore_eos": True},
        {"prompt": [300] * 40, "max_tokens": 3, "after": 0},
        {"messages": [{"role": "user", "content": "What is a KV cache?"}], "at": 0.2, "max_tokens": 5},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    _, results = run(tmp_path, capsys, "--milestone", "m2", "--against", "m1", "--workload", str(path))
    assert results["num_requests"] == results["same_tokens"] == 3


HERE = [  # found before a process starts
    (["--workload", "raged"], r"there is no workload 'raged': use ragged, shared, .*, or a file FILE\.jsonl"),
    (["--workload", "nowhere.jsonl"], r"the workload nowhere\.jsonl cannot be read: "),
    (["--against", "m7"], r"--against m7 is neither same, m1, .*, nor FILE\.py:NAME"),
    (["--set", "page_size=4"], r"the setting 'page_size=4' is not of the form cache\.page_size=4"),
    (["--milestone", "m2", "--workload", "memory"], "m2 has no settings of the KV memory"),
    (["--milestone", "m5", "--workload", "pictures"], "m5 reads no pictures"),
    (["--rate", "0"], r"--rate 0\.0 must be greater than 0"),
]
THERE = [  # found by the process of a side
    (["--parts", "{mine}:WRONG"], "ConfigError: parts: there is no role 'prefix_cash'"),
    (["--parts", "nowhere.py:PARTS"], r"not of the form FILE\.py:NAME with a file that exists"),
    (["--parts", "{mine}:NO_PARTS"], "has no dictionary 'NO_PARTS' from roles to classes"),
    (["--set", "cache.page=4"], "m4: .*unexpected keyword argument 'page'"),
    (["--set", "cache.page_size=0"], "ConfigError: page_size=0 is not valid"),
]


@pytest.mark.parametrize(("arguments", "message"), HERE)
def test_arguments_that_cannot_be_measured_are_one_clear_line(arguments, message, capsys):
    assert re.match(f"BenchmarkError: .*{message}", error(capsys, *arguments))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("arguments", "message"), THERE)
def test_parts_and_settings_that_an_engine_refuses_are_one_clear_line(arguments, message, mine, capsys):
    line = error(capsys, "--milestone", "m4", *[argument.replace("{mine}", str(mine)) for argument in arguments])
    assert re.match(f"BenchmarkError: .*{message}", line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: Input data was truncated"),
        ('{"prompt": "a", "messages": []}', "line 1 must have either a prompt or messages"),
        ('{"prompt": "a", "tokens": 3}', "line 1: Object contains unknown field `tokens`"),
        ('{"prompt": "a", "max_tokens": 0}', "line 1: Expected `int` >= 1 - at `$.max_tokens`"),
        ('{"prompt": "a", "after": 0}', "line 1: after=0 is not the number of an earlier request"),
        ("", "has no requests"),
    ],
)
def test_a_wrong_line_of_a_workload_is_an_error_with_its_number(line, message, tmp_path, capsys):
    path = tmp_path / "wrong.jsonl"
    path.write_text(line)
    assert message in error(capsys, "--workload", str(path))


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(2, 4.3027), (4, 2.7764), (9, 2.2622), (10, 2.2281), (14, 2.1448), (29, 2.0452), (120, 1.9799), (10**6, 1.9600)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(freedom, quantile):
    assert t_quantile(freedom) == pytest.approx(quantile, abs=2e-4)


def test_the_interval_of_a_mean_is_students_and_needs_three_values():
    low, high = interval([1.0, 2.0, 3.0, 4.0])  # deviation 1.2910 of 4 values: 2.5 -+ 3.1824 * 1.2910 / 2
    assert (low, high) == pytest.approx((0.4457, 4.5543), abs=1e-4)
    assert interval([1.0, 2.0]) is None
    assert interval([2.0, 2.0, 2.0]) == (2.0, 2.0)


def a_run(*, fast=1.0):
    """Return a run of two requests by hand: tokens at 0.1, 0.2, ... and at 1.0, 2.0 s, that times as fast."""
    times = [[0.1 / fast, 0.2 / fast, 0.3 / fast], [1.0 / fast, 2.0 / fast]]
    counts = {"num_draft_tokens": 8, "num_accepted_tokens": 2}
    tokens = {"prompt_tokens": [10, 10], "cached_tokens": [0, 5]}
    return {"arrived": [0.0, 0.0], "times": times, "seconds": 2.0 / fast, "counts": counts} | tokens


def test_the_metrics_are_those_of_their_definitions():
    values = {name: rounds[0] for name, rounds in measured([a_run()], Goal()).items()}
    assert values["tokens/s"] == 2.5
    assert values["time to first token, mean"] == pytest.approx(0.55)
    assert values["gap between tokens, longest"] == pytest.approx(1.0)
    assert values["gap between tokens, median"] == pytest.approx(0.1)
    assert (values["hit rate"], values["acceptance"]) == (0.25, 0.25)
    assert goodput(a_run(), Goal(ttft=0.5, gap=0.11)) == 0.5
    assert goodput(a_run(), Goal(ttft=0.05, gap=0.11)) == 0


def test_sides_are_compared_round_by_round_so_that_a_slow_round_changes_nothing():
    own, other = [10.0, 1.0, 10.4], [5.0, 0.5, 5.2]
    found = compared(METRICS["tokens/s"], own, other)
    assert found["kind"] == "ratio" and found["mean"] == pytest.approx(2.0)
    assert found["interval"] == pytest.approx((2.0, 2.0))
    assert compared(METRICS["hit rate"], [0.5, 0.5], [0.0, 0.25])["mean"] == pytest.approx(0.375)


def test_the_interval_is_wider_where_the_rounds_differ_and_the_same_every_time():
    steady = compared(METRICS["tokens/s"], [2.0, 2.1, 2.0, 2.1], [1.0, 1.0, 1.0, 1.0])
    loose = compared(METRICS["tokens/s"], [1.0, 4.0, 1.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    assert math.prod(loose["interval"]) and loose["interval"][1] / loose["interval"][0] > 2
    assert steady["interval"][1] / steady["interval"][0] < 1.1
    assert loose == compared(METRICS["tokens/s"], [1.0, 4.0, 1.0, 4.0], [1.0, 1.0, 1.0, 1.0])


def test_a_side_that_has_waited_runs_before_it_is_measured(monkeypatch):
    """Its engine looks which cores are free: while it waited, the other side used them."""
    sampled = []
    side = Measured("m2", {"model": {"device": "cpu"}})
    monkeypatch.setattr(side_module, "SETTLE_S", 0.01)
    work = {"drawn": {"number": 1, "prompts": (4, 4), "outputs": (2, 2), "seed": 1}}
    with side.engine as engine:
        for threads in (1, 2):
            monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # noqa: B023
            before = engine.stats().num_output_tokens
            counted = side.measure(dict(work))["counts"]["num_output_tokens"]
            sampled.append(engine.stats().num_output_tokens - before - counted)
    assert counted == 2 and sampled[0] == 0 and sampled[1] >= 4


def test_engine_processes_of_a_side_run_its_own_checkout(tmp_path):
    (tmp_path / "m6_multimodal_pd").mkdir()
    (tmp_path / "m6_multimodal_pd" / "__init__.py").write_text(
        "import os, subprocess, sys\n"
        "if 'CHILD' not in os.environ:\n"
        "    found = 'import m6_multimodal_pd as found; print(found.__file__)'\n"
        "    command, env = [sys.executable, '-P', '-c', found], os.environ | {'CHILD': '1'}\n"
        "    raise RuntimeError(subprocess.run(command, env=env, capture_output=True, text=True).stdout)\n"
    )
    side = SideProcess({"milestone": "m6", "settings": {}, "checkout": tmp_path})
    with pytest.raises(BenchmarkError, match=re.escape(str(tmp_path))), side:
        side({})
