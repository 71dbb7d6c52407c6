"""`python -m benchmarks m6_overlap`: a quick run, its sums, and what it does not measure."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.__main__ import main
from benchmarks.m6_overlap import is_fine
from benchmarks.m6_overlap.measures import BOTH_CORES, NORMAL, OVERLAPPED, Decoded, compared_ways, step_seconds
from m3_paged_attention.attention import native_library
from m6_multimodal_pd.overlap import engine_core

pytestmark = pytest.mark.exhaustive  # whole runs of a benchmark

ROUNDS = 3


def runs(other: str = "") -> dict[str, list[Decoded]]:
    """Rounds of all ways; in the last one the way `other` has other tokens."""
    steps = {NORMAL: 10.0, OVERLAPPED: 8.0, BOTH_CORES: 6.0}
    found = {name: [Decoded(step, [[5, 6]], step, 7.5, 6.0)] * ROUNDS for name, step in steps.items()}
    if other:
        found[other] = [*found[other][1:], found[other][0]._replace(answers=[[5, 7]])]
    return found


@pytest.mark.skipif(native_library.obstacle() is not None, reason=str(native_library.obstacle()))
def test_a_quick_run_measures_all_ways_with_the_same_tokens(tmp_path, capsys):
    assert main(["m6_overlap", "--quick", "--only", "embedded", "--output", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "quick" / "m6_overlap.json").read_text("utf-8"))
    rows = results["parts"]["embedded"]["rows"]
    assert [row["requests"] for row in rows] == [1, 4]
    for row in rows:
        assert row["same_tokens"] and all(seconds > 0 for seconds in row["sides"].values())
        assert row["device"] > 0 and row["host"] > 0 and row["hidden"]["mean"] <= 1
        assert row["of_normal"]["interval"] is None  # of one round
    shown = capsys.readouterr().out
    assert "[start:overlap_embedded]" in shown and "[start:overlap_embedded_hidden]" in shown
    assert "[start:overlap_random]" not in shown and "yes |" in shown


def test_the_work_of_the_host_is_hidden_as_far_as_the_device_computes():
    row = compared_ways(runs())
    assert (row["device"], row["host"]) == (7.5, 8.0 - 6.0)
    assert row["hidden"]["mean"] == pytest.approx((7.5 - 6.0) / (8.0 - 6.0))
    assert row["of_normal"]["mean"] == pytest.approx(0.8) and row["of_both_cores"]["mean"] == pytest.approx(8 / 6)
    assert row["of_normal"]["interval"] == pytest.approx((0.8, 0.8))
    assert row["same_tokens"]


@pytest.mark.parametrize("way", [NORMAL, OVERLAPPED, BOTH_CORES])
def test_other_tokens_of_any_way_are_an_exit_status(way):
    row = compared_ways(runs(way))
    assert not row["same_tokens"] and not is_fine({"embedded": {"rows": [row]}})


def test_every_measured_step_gives_all_requests_a_token():
    outputs = iter([{"a": 1, "b": 2}, {"a": 3}])
    with pytest.raises(AssertionError, match=r"steps with \[1, 2\] outputs"):
        step_seconds(SimpleNamespace(step=lambda: next(outputs)), 2, 2)


def test_an_engine_whose_steps_do_not_overlap_is_not_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(engine_core, "obstacle", lambda *_: "of a reason")
    assert main(["m6_overlap", "--quick", "--only", "embedded", "--output", str(tmp_path)]) == 2
    assert "BenchmarkError: steps do not overlap here: of a reason" in capsys.readouterr().err
