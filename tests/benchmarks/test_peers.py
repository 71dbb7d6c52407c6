"""Other engines beside ours: the loads are fair, and an engine that fails is named. The peers are not installed."""

import sys

import pytest

from benchmarks import BenchmarkError
from benchmarks.__main__ import main
from benchmarks.peers.loads import LOADS, Load
from benchmarks.peers.measure import Side, share_in_common


def test_no_round_repeats_a_prompt_and_all_engines_get_the_same() -> None:
    load = Load("tiny", 3, (4, 9), (2, 5), shared=8)
    prompts, outputs = load.requests(1)
    assert (prompts, outputs) == load.requests(1)
    assert prompts[0][:8] == prompts[1][:8] == prompts[2][:8] and prompts != load.requests(2)[0]
    assert all(12 <= len(prompt) <= 17 for prompt in prompts) and all(2 <= length <= 5 for length in outputs)


def test_tokens_are_compared_up_to_the_first_that_differs() -> None:
    assert share_in_common([[1, 2, 3, 4], [5]], [[1, 2, 9, 4], [5]]) == 3 / 5


def test_an_engine_that_cannot_start_is_named() -> None:
    spec = {"engine": "llama-cpp", "model": "/nowhere", "shared": 0}  # its package is not here
    with Side(spec, sys.executable) as side, pytest.raises(BenchmarkError, match=r"llama-cpp failed: .*llama_cpp"):
        side.answer(([[1]], [1]))


def test_an_unknown_load_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "--only", "nothing"]) == 2
    assert f"unknown loads nothing; there are {next(iter(LOADS))}" in capsys.readouterr().err


@pytest.mark.exhaustive  # two processes
def test_transformers_gets_our_tokens(tmp_path, capsys) -> None:
    assert main(["peers", "--only", "tiny: start", "--rounds", "1", "--threads", "1", "--output", str(tmp_path)]) == 0
    assert "| tiny: start | s to the first token |" in capsys.readouterr().out
