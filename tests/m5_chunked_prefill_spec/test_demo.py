"""The demo, run as a reader runs it: the tour, its facts, the flags of all milestones, and no traceback."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m1_single_request.output_events import Result
from m5_chunked_prefill_spec import demo
from m5_chunked_prefill_spec.config import DEFAULT_DRAFT_MODEL
from m5_chunked_prefill_spec.demo_parts import guesses, streams
from m5_chunked_prefill_spec.demo_parts.notes import Notes, Token, bar, coloured
from tests.m5_chunked_prefill_spec.event_examples import BATCH, VERIFIED

HAS_DRAFT = DEFAULT_DRAFT_MODEL.exists()


def words(text: str) -> str:
    """A text without its line breaks: the console makes them where it likes."""
    return " ".join(text.split())


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A screen of 80 columns, and one round where there would be three."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(streams, "ROUNDS", 1)
    monkeypatch.setattr(guesses, "ROUNDS", 1)


@pytest.mark.exhaustive
def test_the_tour_cuts_guesses_and_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    assert demo.main(["--trace-file", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out and max(map(len, out.splitlines())) <= 80
    said = words(out)
    for part in (
        "4 answers being streamed. When each has 6 tokens, a prompt of 510 tokens comes.",
        "a step has at most 64 tokens",
        "4 decodes + 60 of the prompt",
        "5 decodes",
        "req-4: The code of ocean is 7115.",
        "Step 8 took 60 of the 510 tokens of req-4: that was what the decodes had left of the budget.",
        "It took 9 pieces; only the last gave it a token.",
        "repeat, ngram: Seven",
        "recall, ngram: The",
    ):
        assert part in said, part
    shown = 6 if HAS_DRAFT else 3
    assert f"{shown} of {shown} answers are those without guesses, token for token." in said
    rows = re.findall(r"^(?:repeat|explain|recall)?\s+(nobody|ngram|draft_model) +(\d+) +(\d+)", out, re.MULTILINE)
    rows += re.findall(r"^(?:repeat|explain|recall) +(nobody|ngram|draft_model) +(\d+) +(\d+)", out, re.MULTILINE)
    for who, tokens, steps in rows:
        assert (int(steps) == int(tokens)) if who == "nobody" else (0 < int(steps) <= int(tokens))
    kinds = {json.loads(line)["event"] for line in trace.read_text(encoding="utf-8").splitlines()}
    assert {"chunk_cut", "batch", "verified", "audit"} <= kinds


def test_the_first_part_shows_how_a_step_is_filled(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--speculative", "none", "--max-num-batched-tokens", "100", "--num-prompts", "2"]) == 0
    out = capsys.readouterr().out
    bars = re.findall(r"step \d+ +\|(.{30})\| +(\d+) decodes?(?: \+ (\d+) of the prompt)?", out)
    assert [int(prompt) for _, _, prompt in bars if prompt] == [98, 98, 98, 98, 98, 20]
    for drawn, decodes, prompt in bars:
        assert drawn.count("D") >= 1 and int(decodes) in (2, 3)
        assert drawn.strip() == "D" * drawn.count("D") + "#" * drawn.count("#")
        assert abs(drawn.count("#") - 30 * int(prompt or 0) / 100) < 2


def test_one_prompt_with_guesses_is_answered_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--prompt", "Repeat this text:\nlamp river goat lamp river", "--speculative", "ngram", "--trace", "verbose"]
    assert demo.main([*argv, "--num-speculative-tokens", "3"]) == 0
    said = words(capsys.readouterr().out)
    assert "lamp river goat lamp river" in said and "ngram drafted" in said and "Target verify batch" in said


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
    ("argv", "message"),
    [
        (["--num-speculative-tokens", "0", "--speculative", "ngram"], "num_speculative_tokens=0"),
        (["--prompt", "x", "--draft-model", "somewhere"], "has no effect with method=None"),
        (["--schedule", "prefill_first", "--target-gap-ms", "3"], "target_gap_ms has no effect"),
        (["--no-chunked-prefill", "--chunked-prefill-size", "8"], "chunked_prefill_size has no effect"),
        (["--max-num-batched-tokens", "3"], "max_num_batched_tokens=3 is less than max_num_seqs=16"),
        (["--speculative", "draft_model", "--draft-model", "/nowhere"], "nowhere"),
        (["--priority", str(2**70)], "priority"),
    ],
    ids=lambda value: value[-2] if isinstance(value, list) else None,
)
def test_what_cannot_be_is_one_clear_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(argv) == 2
    out, err = capsys.readouterr()
    assert message in err and len(err.splitlines()) == 1 and "Traceback" not in out + err


# --- its parts --------------------------------------------------------------------------------------------------------


def test_tokens_are_coloured_by_their_origin_and_marked_where_there_are_no_colours() -> None:
    tokens = [Token(1, "own"), Token(2, "accepted"), Token(3, "accepted"), Token(4, "corrected"), Token(5, "bonus")]

    def text_of(token_ids: list[int]) -> str:
        return "".join(map(str, token_ids))

    assert coloured(tokens, text_of, with_marks=True).plain == "1[23]{4}<5>"
    plain = coloured(tokens, text_of, with_marks=False)
    assert plain.plain == "12345" and len({span.style for span in plain.spans}) == 4


def test_a_token_s_origin_is_read_from_the_trace() -> None:
    notes = Notes()

    def tell(event: Any) -> None:
        notes.read(SimpleNamespace(event=event, step=1))  # type: ignore[arg-type]

    def got(*tokens: int) -> Result:
        return Result(rid="b", tokens=tokens, out_len=9, max_tokens=20, new_text="")

    tell(got(1))
    tell(VERIFIED), tell(got(7, 9))
    tell(replace(VERIFIED, accepted=2, tokens=(7, 8, 9))), tell(got(7, 8, 9))
    tell(replace(VERIFIED, accepted=2, tokens=(7, 8, 9))), tell(got(7))  # a stop came in between
    origins = [token.origin for token in notes.tokens["b"]]
    assert origins == ["own", "accepted", "corrected", "accepted", "accepted", "bonus", "accepted"]


def test_a_bar_shows_who_takes_how_much_of_the_budget() -> None:
    assert bar(BATCH, 32).plain == "|D?" + "#" * 30 + "|"


def test_the_help_of_earlier_flags_is_of_this_tour(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    for right in ("to the long prompt of part 1", "being streamed in part 1 of the tour; default: 4", "128 on a CPU"):
        assert right in words
    for stale in ("last user", "users in part 1", "part 3", "as the longest prompt needs", "416", "of m3 is gone"):
        assert stale not in words
