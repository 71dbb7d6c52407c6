"""The demo: the tour on a terminal and in a file, m1's flags, and no traceback in any way out."""

import io
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
from rich.text import Text

from m2_continuous_batching import EngineError, TraceConfig, demo, demo_tour
from m2_continuous_batching.demo_tour import LATE_AFTER, RECALL, make_story, run_story, tour
from m2_continuous_batching.views.timeline import Timeline
from tests.m2_continuous_batching.engines import MakeEngine, greedy, limits
from tests.support.demos import events_of, words

ROOT = Path(__file__).parents[2]
SMALL = ("--num-prompts", "5", "--max-tokens", "16")


def lanes(out: str) -> dict[str, str]:
    """The lane of each request in a printed timeline, its lines put together."""
    found: dict[str, str] = {}
    for rid, cells in re.findall(r"^(req-\d+)  ([ .P\-x|]+)$", out, re.MULTILINE):
        found[rid] = found.get(rid, "") + cells
    return found


@pytest.fixture
def without_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part of the tour is left out."""
    monkeypatch.setattr(demo_tour, "show_comparison", lambda *args: None)


# --- the tour ---------------------------------------------------------------------------------------------------------


def test_the_tour_draws_explains_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    trace = tmp_path / "trace.jsonl"
    assert demo.main(["--num-prompts", "5", "--max-tokens", "32", "--trace-file", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out and max(map(len, out.splitlines())) <= 80
    drawn = lanes(out)
    assert list(drawn) == [f"req-{i}" for i in range(8)]
    assert all(cells.strip(" .").startswith("P") and cells.endswith("|") for cells in drawn.values())
    assert out.count("\nstep   1  ") == 1, "the timeline is printed once, when it is complete"
    assert any("x" in cells for cells in drawn.values()) and any("." in cells for cells in drawn.values())
    for part in (
        f"3 questions at the start, 5 more after step {LATE_AFTER}",
        "x left out P prefill - decode . queued | done",
        "The code of zebra is 4821.",
        "max_num_seqs = 4 requests run already",
        "Static: 4 are submitted at a time",
        "tokens per second",
        "until the longest of its group has ended. Continuous batching gives it to the next request at once:",
        "token for token",
    ):
        assert part in words(out), part
    assert len(events_of(trace, "finish")) == 8, "the comparison runs without a trace"


def test_the_limits_are_those_of_the_flags(
    without_comparison: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    flags = "--max-num-seqs 2 --max-num-batched-tokens 60 --execution per_request --trace summary --trace-file".split()
    assert demo.main([*SMALL, *flags, str(trace)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "At most 2 requests run at a time (max_num_seqs), with at most 60 new" in words(out)
    assert out.index("step    1  prefill") < out.index("\nstep   1  "), "the trace comes before the timeline"
    batches = events_of(trace, "batch")
    assert not events_of(trace, "forward")
    assert max(len(batch["rids"]) for batch in batches) == 2 and {batch["budget"] for batch in batches} == {60}


@pytest.mark.exhaustive
def test_ctrl_c_leaves_a_clean_terminal() -> None:
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
        while b"step   1" not in seen:
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
    assert b"\x1b[?25l" in seen and seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l"), "the cursor is shown again"


# --- a prompt, a chat, wrong values -----------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_budget_of_a_conversation_fits_its_prompts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is a KV cache?\n" + "word " * 3000 + "\n"))
    assert demo.main(["--chat", "--max-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("model  >") == 2 and "Error" not in out


# --- the story on a tiny model ----------------------------------------------------------------------------------------


def test_a_live_timeline_is_drawn_after_every_step_and_whole_at_the_end(
    without_comparison: None, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(demo_tour.time, "sleep", waits.append)
    engine = make_engine(**limits(4, 128))
    terminal = Console(file=io.StringIO(), force_terminal=True, width=60, height=40, _environ={"TERM": "xterm"})
    tour(engine, greedy(6), terminal, num_prompts=1)
    out = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert waits == [demo_tour.PACE] * engine.stats().num_steps
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)
    last = lanes(plain[plain.rindex("step   1") :])
    assert len(last) == 8 and all(cells.endswith("|") for cells in last.values())
    assert out.index("\x1b[?25h") < out.rindex("step   1"), "the live drawing has ended"


def test_without_a_terminal_nothing_is_drawn_live(
    without_comparison: None, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_tour.time, "sleep", lambda seconds: seconds and pytest.fail("no terminal needs the time"))
    console = Console(file=io.StringIO(), width=60)
    tour(make_engine(**limits(4, 128)), greedy(3), console, num_prompts=1)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert "The fullest step" in out and out.count("step   1") == 1


@pytest.mark.parametrize(("max_tokens", "arrival"), [(20, LATE_AFTER), (3, 3)])
def test_the_late_questions_come_late_or_when_nothing_else_is_left(
    max_tokens: int, arrival: int, make_engine: MakeEngine
) -> None:
    timeline = Timeline()
    engine = make_engine(**limits(8, 256), trace_config=TraceConfig(readers=(timeline,)))
    outputs = run_story(engine, make_story(engine, greedy(max_tokens), 256), Console(), Text)
    assert [output.request_id for output in outputs] == [f"req-{i}" for i in range(8)]
    assert all(len(output.token_ids) == max_tokens for output in outputs)
    assert [lane.begin for lane in timeline.lanes.values()] == [0] * 3 + [arrival] * 5


@pytest.mark.parametrize("budget", [60, 90, 128])
def test_the_long_prompt_is_as_long_as_the_budget_allows(budget: int, make_engine: MakeEngine) -> None:
    longest = max(make_story(make_engine(), greedy(2), budget), key=lambda question: len(question.token_ids))
    assert longest.text.endswith(RECALL) and budget / 2 < len(longest.token_ids) <= budget


def test_a_failed_question_is_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine(**limits(4, 256))
    story = make_story(engine, greedy(2), 256)

    def broken(*args: Any) -> Any:
        raise RuntimeError("it broke")

    engine.engine_core.executor.worker.model_runner.execute_model_batch = broken
    with pytest.raises(EngineError, match="it broke"):
        run_story(engine, story, Console(), Text)
