"""The demo, run as a reader runs it: the tour on a terminal and in a file, m1's flags, and no traceback anywhere."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from m1_single_request import demo as m1_demo
from m2_continuous_batching import EngineError, SamplingParams, demo, demo_tour
from m2_continuous_batching.demo_tour import make_story, run_story, show_timeline
from m2_continuous_batching.timeline import Timeline
from tests.m2_continuous_batching.engines import MakeEngine, greedy, limits

ROOT = Path(__file__).parents[2]
SMALL = ("--num-prompts", "5", "--max-tokens", "16")


def lanes(out: str) -> dict[str, str]:
    """What a timeline that was printed shows of each request, its lines put together."""
    found: dict[str, str] = {}
    for rid, cells in re.findall(r"^(req-\d+)  ([ .P\-x|]+)$", out, re.MULTILINE):
        found[rid] = found.get(rid, "") + cells
    return found


def words(text: str) -> str:
    """A text without its line breaks: the console makes them where it likes."""
    return " ".join(text.split())


@pytest.mark.exhaustive
def test_the_tour_draws_explains_and_compares(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert demo.main(["--num-prompts", "5", "--max-tokens", "32"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= 80
    drawn = lanes(out)
    assert list(drawn) == [f"req-{i}" for i in range(8)]
    assert all(cells.strip(" .").startswith("P") and cells.endswith("|") for cells in drawn.values())
    assert out.count("\nstep   1  ") == 1, "the timeline is printed once, when it is complete"
    assert any("x" in cells for cells in drawn.values()) and any("." in cells for cells in drawn.values())
    said = words(out)
    for part in (
        f"3 questions at the start, 5 more after step {demo_tour.LATE_AFTER}",
        ". queued P prefill - decode x left out by the budget | done",
        "The code of zebra is 4821.",
        "as many run as max_num_seqs = 4 allows",
        "that max_num_batched_tokens allows",
        "places in the tensors of these",
        "reserved",
        "one by one",
        "static: an engine with max_num_seqs = 4",
        "slots used (utilisation)",
        "p95 latency",
        "token for token",
    ):
        assert part in said, part


@pytest.mark.exhaustive
def test_ctrl_c_leaves_a_clean_terminal() -> None:
    """On a terminal the timeline is live. Ctrl-C ends it: the status says so, and the cursor is there again."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "m2_continuous_batching.demo"],
        cwd=ROOT,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "40"},
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    seen = b""
    try:
        while b"step 5 " not in seen:
            seen += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            seen += os.read(ours, 4096)
    except OSError:  # the other end is closed
        process.wait(timeout=60)
    finally:
        process.kill()
        os.close(ours)
        errors = process.communicate()[1]
    assert (process.returncode, errors) == (130, b"")
    assert b"\x1b[?25l" in seen and seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")


@pytest.mark.exhaustive
def test_the_limits_are_those_of_the_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    flags = "--max-num-seqs 2 --max-num-batched-tokens 60 --execution per_request --trace-file".split()
    assert demo.main([*SMALL, *flags, str(trace)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "At most 2 requests run at a time" in words(out) and "At most 60 new tokens" in words(out)
    assert "of 2" in out and "No reserved memory is empty" in words(out)
    events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "engine_started" and "forward" not in kinds and "kv_usage" in kinds
    assert kinds.count("finish") == 8, "the comparison runs without a trace"
    batches = [event for event in events if event["event"] == "batch"]
    assert max(len(batch["rids"]) for batch in batches) == 2 and {batch["budget"] for batch in batches} == {60}
    assert max(sum(batch["extend_lens"]) for batch in batches) <= 60


@pytest.mark.exhaustive
def test_a_trace_on_the_console_comes_before_the_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*SMALL, "--trace", "summary"]) == 0
    out = capsys.readouterr().out
    assert out.index("step    1  prefill") < out.index("\nstep   1  ")
    assert demo.main([*SMALL, "--trace", "off"]) == 0
    assert "step    1" not in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_budget_of_the_tour_is_nearly_filled_by_one_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert demo.main([*SMALL, "--max-num-seqs", "150", "--execution", "per_request"]) == 0
    assert "At most 150 new tokens" in words(capsys.readouterr().out), "never less than every request needs"
    assert demo.main([*SMALL, "--max-model-len", "64"]) == 0
    assert "(4 facts)" in capsys.readouterr().out, "a shorter context holds fewer facts"


def test_the_budget_of_a_conversation_is_whatever_its_prompt_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is a KV cache?\nWhat is prefill?\n" + "word " * 3000 + "\n"))
    assert demo.main(["--chat", "--max-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("model  >") == 3 and "Error" not in out


def test_a_prompt_is_answered_as_in_m1(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--prompt",
        "What is a KV cache?",
        "--trace",
        "off",
        "--max-tokens",
        "9",
        "--temperature",
        "1",
        "--seed",
        "4",
    ]
    assert (demo.main(flags), capsys.readouterr()) == (m1_demo.main(flags), capsys.readouterr())
    assert demo.main(["--prompt", "What is a KV cache?\n", "--raw", "--max-tokens", "4", "--trace", "summary"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "step    1  prefill" in out and "4 tokens" in out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-num-batched-tokens", "2"], "max_num_batched_tokens=2 is less than max_num_seqs=4"),
        (["--max-num-seqs", "0"], "max_num_seqs=0"),
        (["--num-prompts", "0"], "num_prompts=0"),
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--max-model-len", "1"], "max_model_len=1"),
        (["--max-num-seqs", "100000000"], "max_num_seqs of at most"),
        (["--trace-file", "/nowhere/at/all/trace.jsonl"], "/nowhere/at/all/trace.jsonl"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_value_is_one_clear_line(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1 and named in err


def test_a_budget_that_no_question_fits_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--max-num-batched-tokens", "10"]) == 2
    err = capsys.readouterr().err
    assert len(err.strip().splitlines()) == 1 and "max_num_batched_tokens is 10" in err


def test_every_flag_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for program, more in (
        (m1_demo, ()),
        (demo, ("num-prompts", "max-num-seqs", "max-num-batched-tokens", "execution")),
    ):
        with pytest.raises(SystemExit) as caught:
            program.main(["--help"])
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert program.__name__ in words(out)
        for flag in ("prompt", "chat", "raw", "model", "device", "max-model-len", "trace-file", "temperature", *more):
            assert f"--{flag} " in out or f"--{flag}\n" in out, flag


def test_ctrl_c_during_the_comparison_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_tour, "compare", interrupted)
    assert demo.main(list(SMALL)) == 130


# --- the story on a tiny model ----------------------------------------------------------------------------------------


def test_a_live_timeline_is_drawn_after_every_step_and_whole_at_the_end(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_tour, "PACE", 0.0)
    engine = make_engine(**limits(4, 128))
    terminal = Console(file=io.StringIO(), force_terminal=True, width=60, height=40, _environ={"TERM": "xterm"})
    show_timeline(engine, make_story(engine, 128), greedy(6), terminal)
    out = terminal.file.getvalue()  # type: ignore[attr-defined]
    num_steps = engine.stats().num_steps
    drawn = dict.fromkeys(int(number) for number in re.findall(r"step (\d+) \(slowed down", out))
    assert list(drawn) == list(range(1, num_steps + 1))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)
    last = plain[plain.rindex("step   1") :]
    assert len(lanes(last)) == 8 and all(cells.endswith("|") for cells in lanes(last).values())
    assert out.index("\x1b[?25h") < out.rindex("step   1")


def test_no_terminal_is_not_waited_for(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(seconds: float) -> None:
        raise AssertionError("nobody watches")

    monkeypatch.setattr(demo_tour.time, "sleep", wait)
    engine = make_engine(**limits(4, 128))
    for options in ({}, {"force_terminal": True, "_environ": {"TERM": "dumb"}}):
        console = Console(file=io.StringIO(), width=60, **options)  # type: ignore[arg-type]
        show_timeline(engine, make_story(engine, 128), greedy(3), console)
        assert "Facts of this run" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("max_tokens", "arrival"), [(20, demo_tour.LATE_AFTER), (3, 3)])
def test_the_late_questions_come_late_or_when_nothing_else_is_left(
    max_tokens: int, arrival: int, make_engine: MakeEngine
) -> None:
    engine, timeline = make_engine(**limits(8, 256)), Timeline()
    engine.tracer.attach(timeline)
    outputs = run_story(engine, make_story(engine, 256), greedy(max_tokens), lambda: None)
    assert [output.request_id for output in outputs] == [f"req-{i}" for i in range(8)]
    assert all(len(output.token_ids) == max_tokens for output in outputs)
    assert [lane.begin for lane in timeline.lanes.values()] == [0] * 3 + [arrival] * 5


@pytest.mark.parametrize("budget", [60, 90, 128, None])
def test_the_long_prompt_is_as_long_as_the_budget_allows(budget: int | None, make_engine: MakeEngine) -> None:
    engine = make_engine()
    story = make_story(engine, budget)
    longest = max(len(question.token_ids) for question in story.questions)
    assert longest <= min(budget or 255, 255)
    (facts,) = (question for question in story.late if "facts)" in question.title)
    assert len(facts.token_ids) == longest


def test_a_failed_question_is_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine(**limits(4, 256))
    story = make_story(engine, 256)

    def broken(*args: Any) -> Any:
        raise RuntimeError("it broke")

    engine.engine_core.executor.worker.model_runner.execute_model_batch = broken
    with pytest.raises(EngineError, match="it broke"):
        run_story(engine, story, SamplingParams(max_tokens=2), lambda: None)
