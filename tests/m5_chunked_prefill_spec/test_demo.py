"""The demo: right numbers in the sentences of its tour, the flags of all milestones, and no traceback in any end."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m1_single_request.output_events import Result
from m1_single_request.trace_file import read_trace
from m4_radix_cache import demo_tour as m4_tour
from m5_chunked_prefill_spec import SpeculativeConfig, demo, demo_tour
from m5_chunked_prefill_spec.demo_tour import timeline
from m5_chunked_prefill_spec.views.token_origins import Token, TokenOrigins, coloured, legend
from tests.m5_chunked_prefill_spec.event_examples import VERIFIED
from tests.support.demos import words

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A screen of 80 columns, and one round where there would be three."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(m4_tour, "ROUNDS", 1)


@pytest.fixture
def without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part of the tour is left out."""
    monkeypatch.setattr(demo_tour.Tour, "show_drafts", lambda *args: None)


# --- the tour ---------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_tour_cuts_drafts_and_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    assert demo.main(["--trace-file", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out and max(map(len, out.splitlines())) <= 80
    for part in (
        "4 answers being streamed; when they have 6 tokens each, a prompt of 510 tokens arrives.",
        "a step has at most 64 tokens",
        "step 8: Batch of 5 requests: req-4 prefills 60 tokens; req-3, req-0, req-1, req-2 decode. New",
        "step 16: Batch of 5 requests: req-4 prefills 30 tokens; req-3, req-0, req-1, req-2 decode. New",
        "req-4: The code of ocean is 7115.",
        "Longest gap of a stream: ",
        "first token of a prompt",
        "repeat, ngram: Seven[ boats cross under]",
        "recall, ngram: The[ code of]",
        "The answers are the same, token for token, all 3 of them.",
    ):
        assert part in words(out), part
    assert len(re.findall(r"^(?:in pieces|whole) +[| ]+$", out, re.MULTILINE)) == 2
    rows = re.findall(r"(no drafts|ngram|draft_model) +(\d+) +(\d+) +(\d+) +[\d,]+ +x [\d.]+ +x [\d.]+", out)
    assert len(rows) == 9
    assert all(int(accepted) <= int(drafts) < 2 * int(tokens) for _, tokens, drafts, accepted in rows)
    kinds = [record.event.kind for record in read_trace(trace, "m5_chunked_prefill_spec")]
    assert kinds.count("engine_started") == 5 and {"chunk_cut", "batch", "verified"} <= set(kinds)


def test_the_first_part_has_the_steps_and_streams_of_the_flags(
    without_drafts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--max-num-batched-tokens", "100", "--num-prompts", "2"]) == 0
    out = words(capsys.readouterr().out)
    assert "2 answers being streamed" in out
    pieces = re.findall(r"req-2 prefills (\d+) tokens; req-0, req-1 decode", out)
    assert list(map(int, pieces)) == [98, 98, 20] and "and 3 more" in out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--no-chunked-prefill", "Part 1, a long prompt in pieces, is left out: --no-chunked-prefill."),
        ("--schedule prefill_first", "a step has at most 64 tokens; the streams wait here, too."),
    ],
)
def test_the_description_of_the_first_part_follows_the_flags(
    flags: str, expected: str, without_drafts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(flags.split()) == 0
    assert expected in words(capsys.readouterr().out)


def test_the_recorded_numbers_are_those_of_the_benchmark() -> None:
    table = (ROOT / "benchmarks/results/m5_chunked_prefill_spec.md").read_text(encoding="utf-8")
    row = r"\| {} \| [\d.]+ ms \|[^|]*\| ([\d.]+) ms \([^|]*\|[^|]*\| ([\d,]+) ms"
    for name, row_name in (("in pieces", "decode_first, 64 tokens"), ("whole", "prefill_first, whole prompts")):
        found = re.search(row.format(row_name), table)
        assert found is not None
        for place, kind in enumerate(("gap", "wait"), 1):
            assert float(found[place]) == pytest.approx(demo_tour.RECORDED_TIMES[kind][name] * 1e3)
    one = table.partition("start:speculation_1]")[2].partition("end:speculation_1")[0]
    for kind, methods in demo_tour.RECORDED_SPEEDS.items():
        for method, speed in methods.items():
            assert re.search(rf"\| {kind} \| {method}, k = 4 \|.*\| {speed} \|", one), (kind, method)


def test_a_timeline_has_a_mark_for_each_token_on_one_scale() -> None:
    lines = [timeline(times, 2.0) for times in ([0.0, 1.0, 2.0, 2.5], [0.5])]
    assert [[place for place, mark in enumerate(line) if mark == "|"] for line in lines] == [[0, 30, 60], [15]]


# --- a prompt, and the flags ------------------------------------------------------------------------------------------


def test_a_prompt_with_drafts_is_answered_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--prompt", "Repeat this text:\nlamp river goat lamp river", "--speculative", "ngram", "--trace", "verbose"]
    assert demo.main([*argv, "--num-speculative-tokens", "3"]) == 0
    out = words(capsys.readouterr().out)
    assert "lamp river goat lamp river" in out and "n-grams drafted" in out and "request: req-0 verifies" in out
    assert "prompt tokens: 0 reused" in out


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "argv",
    [
        ["--schedule", "prefill_first", "--max-num-batched-tokens", "32"],
        ["--no-chunked-prefill"],
        ["--chunked-prefill-size", "7"],
        ["--target-gap-ms", "3"],
        ["--cache", "chunk", "--page-size", "1", "--max-total-tokens", "200"],
    ],
    ids=lambda argv: argv[0],
)
def test_the_flags_of_a_step_change_no_answer(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--prompt", "What is prefill?", "--trace", "off", *argv]) == 0
    assert "Prefill is the first phase of generation" in words(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", [{"method": "ngram"}, {"method": "draft_model"}]),
        ("--model other", [{"method": "ngram"}]),
        ("--speculative ngram", [{"method": "ngram"}]),
        ("--model a --speculative draft_model --draft-model b", [{"method": "draft_model", "model": "b"}]),
        ("--prompt a", [{}]),
        ("--prompt a --speculative ngram", [{"method": "ngram"}]),
        ("--model a --num-speculative-tokens 2", [{"method": "ngram", "num_speculative_tokens": 2}]),
    ],
)
def test_a_tour_drafts_in_all_ways_for_which_there_is_a_model_and_a_prompt_as_requested(
    flags: str, expected: list[Any]
) -> None:
    args = demo.m1.make_parser("m5", demo.__doc__, demo.FLAGS).parse_args(flags.split())
    assert demo.speculative_configs(args) == [SpeculativeConfig(**fields) for fields in expected]


# --- the view of origins ----------------------------------------------------------------------------------------------


def test_tokens_are_coloured_by_their_origin_and_marked_where_there_are_no_colours() -> None:
    tokens = [Token(1, "own"), Token(2, "accepted"), Token(3, "accepted"), Token(4, "corrected"), Token(5, "bonus")]

    def text_of(token_ids: list[int]) -> str:
        return "".join(map(str, token_ids))

    assert coloured(tokens, text_of, with_marks=True).plain == "1[23]{4}<5>"
    plain = coloured(tokens, text_of, with_marks=False)
    assert plain.plain == "12345" and len({span.style for span in plain.spans}) == 4
    assert coloured(tokens[1:2], lambda ids: "", with_marks=True).plain == ""
    assert [mark in legend(with_marks=True).plain for mark in "[{<"] == [True] * 3
    assert "[" not in legend(with_marks=False).plain


def test_a_token_s_origin_is_read_from_the_trace() -> None:
    view = TokenOrigins()

    def read(event: Any) -> None:
        view.read(SimpleNamespace(event=event, step=1))  # type: ignore[arg-type]

    def result(*tokens: int) -> Result:
        return Result(rid="b", tokens=tokens, out_len=9, max_tokens=20, new_text="")

    read(result(1))
    read(VERIFIED), read(result(7, 9))
    read(replace(VERIFIED, accepted=2, tokens=(7, 8, 9))), read(result(7, 8, 9))
    read(replace(VERIFIED, accepted=2, tokens=(7, 8, 9))), read(result(7))  # a stop came in between
    origins = [token.origin for token in view.tokens["b"]]
    assert origins == ["own", "accepted", "corrected", "accepted", "accepted", "bonus", "accepted"]
