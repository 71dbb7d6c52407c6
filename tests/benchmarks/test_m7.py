"""`python -m benchmarks m7`: a quick run with all tokens, and a run that has lost some."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.m7 import is_fine
from benchmarks.m7.llama_server import beside_llama_server
from benchmarks.m7.measures import gaps_of


@pytest.mark.exhaustive
def test_a_quick_run_has_all_tokens_and_the_work_of_every_process(tmp_path, capsys):
    assert main(["m7", "--quick", "--only", "embedded", "--rounds", "1", "--output", str(tmp_path)]) == 0
    part = json.loads((tmp_path / "quick" / "m7_serving.json").read_text("utf-8"))["parts"]["embedded"]
    assert part["complete"] and set(part["seconds"]) == {"engine", "raw", "openai"}
    assert set(part["cpu"]["raw"]) == set(part["cpu"]["openai"]) == {"client", "front", "engine"}
    assert all(gap > 0 for gaps in part["gaps"].values() for gap in gaps)
    shown = capsys.readouterr().out
    assert "[start:serving_embedded]" in shown and "[start:serving_random]" not in shown


@pytest.mark.exhaustive
def test_a_quick_run_beside_slow_readers_holds_them_to_its_end(tmp_path, capsys):
    assert (
        main(["m7", "--quick", "--only", "slow_readers,llama_server", "--rounds", "1", "--output", str(tmp_path)]) == 0
    )
    parts = json.loads((tmp_path / "quick" / "m7_serving.json").read_text("utf-8"))["parts"]
    assert parts["slow_readers"]["complete"] and set(parts["slow_readers"]["p99"]) == {"alone", "beside"}
    shown = capsys.readouterr().out
    assert "beside 6 slow readers" in shown and "`llama-server` was not measured: " in shown


def test_a_token_that_is_lost_is_an_exit_status():
    assert is_fine({"embedded": {"complete": True}})
    assert is_fine({"llama_server": {"reason": "there is none"}})
    assert not is_fine({"embedded": {"complete": True}, "random_0_6b": {"complete": False}})


def test_without_llama_server_the_reason_is_the_result(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert beside_llama_server(tmp_path, 1, 1) == {"reason": "there is no llama-server on the PATH"}


def test_gaps_are_those_within_a_stream():
    assert gaps_of({"times": [[1.0, 1.5, 3.5], [10.0], [20.0, 21.0]]}) == [0.5, 2.0, 1.0]
