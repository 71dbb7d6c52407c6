"""The last parts of m6's demo: the batch and the gaps with engines that share the work, and its flags."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from m6_multimodal_pd import DisaggregationConfig, demo, demo_tour
from m6_multimodal_pd.demo_tour import ONE, RECORDED, TWO
from tests.m6_multimodal_pd.test_demo import run_on
from tests.support.demos import words

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "m6_pd.json"


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """The demo's number of threads stays in its test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", DisaggregationConfig()),
        ("--model somewhere", None),
        ("--chat", None),
        ("--prompt hello --pd", DisaggregationConfig()),
        ("--prefill 2", DisaggregationConfig(prefill=2)),
        ("--chat --decode 3 --transport in_process", DisaggregationConfig(decode=3, transport="in_process")),
    ],
)
def test_the_group_of_the_flags(flags: str, expected: DisaggregationConfig | None) -> None:
    assert demo.group_of(demo.make_parser().parse_args(flags.split())) == expected


def test_engines_that_cannot_be_started_are_one_clear_line(
    seeing_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr("subprocess.Popen", refuse)
    assert run_on(seeing_directory, "--pd", "--prompt", "hello") == 2
    out, err = capsys.readouterr()
    assert "2 engines load the model and join ..." in out
    assert err == "EngineLostError: a process cannot be started: no more processes\n"


@pytest.mark.exhaustive
def test_engines_that_share_the_work_answer_as_one_does(
    seeing_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for flags in ([], ["--transport", "in_process"], ["--pd"]):
        assert run_on(seeing_directory, "--trace", "off", *flags, "--prompt", "What is a KV cache?") == 0
        answers.append(words(capsys.readouterr().out).partition("answer ")[2])
    assert answers[0] and answers[0] == answers[1] == answers[2]


# --- the gaps ---------------------------------------------------------------------------------------------------------


def test_the_recorded_numbers_are_those_of_the_benchmark() -> None:
    gaps: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))["parts"]["gaps"]
    for name, side in ((ONE, "one engine, 1 thread"), (TWO, "prefill + decode, 1 thread each")):
        row = gaps["sides"][side]
        for kind, column in {"gap": "longest", "wait": "mean_ttft", "total": "seconds"}.items():
            assert RECORDED[kind][name] == pytest.approx(row[column], rel=0.01)
    traffic = gaps["traffic"]
    own = [demo_tour.NUM_STREAMS, demo_tour.STREAM_TOKENS, demo_tour.EVERY]
    assert own == [traffic["num_streams"], traffic["stream_tokens"], traffic["every"]]
    assert traffic["prompt_tokens"] == demo_tour.PROMPT_TOKENS
