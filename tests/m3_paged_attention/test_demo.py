"""The demo, run as a reader runs it: the tour in a file and on a terminal, m1's and m2's flags, and no traceback."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from m1_single_request import demo as m1_demo
from m1_single_request.errors import EngineError
from m2_continuous_batching.demo_static_batching import Workload
from m2_continuous_batching.demo_tour import LATE_AFTER, make_story
from m3_paged_attention import DEFAULT_MODEL, SamplingParams, TraceConfig, demo
from m3_paged_attention.block_map import BlockMap
from m3_paged_attention.demo_parts import tour as demo_tour
from m3_paged_attention.demo_parts.comparison import (
    PAGED,
    TIGHT,
    WIDE,
    Run,
    compare,
    comparison_table,
    contest,
    what_it_shows,
)
from m3_paged_attention.demo_parts.tour import FORKED, fork_one, most_tokens, show_block_map
from tests.m3_paged_attention.engines import MakeEngine, greedy, ids, setting

ROOT = Path(__file__).parents[2]


def words(text: str) -> str:
    """A text without its line breaks: the console makes them where it likes."""
    return " ".join(text.split())


@pytest.fixture
def without_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part of the tour is left out."""
    monkeypatch.setattr(demo_tour, "show_comparison", lambda *args: None)


# --- as a reader runs it ----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_the_tour_maps_explains_and_compares(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    ran = subprocess.run(
        [sys.executable, "-m", "m3_paged_attention.demo", "--num-prompts", "4", "--trace-file", str(trace)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80", "CI": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout and max(map(len, ran.stdout.splitlines())) <= 80
    said = words(ran.stdout)
    for part in (
        f"3 questions at the start, 5 more after step {LATE_AFTER}, with 3 answers to 'Hello world!'",
        "The KV memory is 36 blocks of 8 tokens",
        "So m2 would call our memory 0.07 slots, and run nothing.",
        "A prompt is stored once for several answers (fork)",
        "Their ways part (copy on write)",
        "Most requests in flight",
        "The memory is full (preemption)",
        "Who had to go comes back",
        "req-1/1 shares blocks",
        "it gets a copy, block",
        "is preempted",
        "The code of zebra is 4821.",
        "prompt tokens are not computed again",
        "As many slots of m2 would take",
        "what it had said is not lost",
        "Reserved for nothing",
        "m2, as many",
        "m2, same bytes",
        "37 blocks",
        "tokens per second",
        "token for token",
        "1 CPU thread",
    ):
        assert part in said, part
    grids = re.findall(r"^ +1  ((?:[A-Z][\d ] |[a-z][\d ] |\.  ){8})", ran.stdout, re.MULTILINE)
    assert len(grids) == 5, "a map for each highlight"
    assert "A  A  a  B3 B3 b3 E  E" in grids[0], "three of the first blocks have three holders"
    events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    kinds = {event["event"] for event in events}
    assert {"kv_sized", "blocks_forked", "block_copied", "preempted", "blocks_freed", "blocks_used"} <= kinds
    assert any(event["event"] == "admit" and event["num_output_tokens"] for event in events), "somebody came back"
    assert sum(event["event"] == "finish" for event in events) == 10, "the comparison runs without a trace"


def test_the_memory_is_that_of_the_flags(
    without_comparison: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    flags = "--block-size 16 --num-blocks 18 --preemption swap --n 4 --max-num-seqs 6 --max-tokens 24 --trace-file"
    assert demo.main([*flags.split(), str(trace)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "with 4 answers to" in words(out) and "18 blocks of 16 tokens" in words(out)
    events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    (sized,) = (event for event in events if event["event"] == "kv_sized")
    assert (sized["block_size"], sized["num_blocks"], sized["num_host_blocks"]) == (16, 18, 18)
    assert max(len(event["rids"]) for event in events if event["event"] == "batch") == 6
    assert {event["mode"] for event in events if event["event"] == "preempted"} <= {"swap"}


@pytest.mark.parametrize(
    ("flags", "block_size", "num_blocks"),
    [
        ("", 8, 36),
        ("--block-size 5", 5, 58),
        ("--num-blocks 50", 8, 50),
        ("--kv-cache-memory-bytes 1000000", 8, None),
        ("--prompt a", 16, None),
        ("--chat --block-size 4 --num-blocks 9", 4, 9),
    ],
)
def test_the_tour_has_little_memory_and_everything_else_the_engines_own(
    flags: str, block_size: int, num_blocks: int | None
) -> None:
    config = demo.cache_config(demo.make_parser().parse_args(flags.split()))
    assert (config.block_size, config.num_blocks) == (block_size, num_blocks)


def test_random_weights_have_nobody_to_be_compared_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--load-format", "dummy", "--max-tokens", "4", "--num-prompts", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "with random weights only m3 runs" in words(out) and "m2, as many" not in out


def test_a_prompt_is_answered_as_in_m1(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "What is a KV cache?", "--trace", "off", "--max-tokens", "9"]
    flags += ["--temperature", "1", "--seed", "4"]
    assert (demo.main(flags), capsys.readouterr()) == (m1_demo.main(flags), capsys.readouterr())


def test_the_model_that_ships_runs_on_one_thread_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    for flags in (
        [],
        ["--threads", "2"],
        ["--model", str(DEFAULT_MODEL)],
        ["--model", str(DEFAULT_MODEL), "--threads", "3"],
    ):
        assert demo.main(["--prompt", "a", "--trace", "off", "--max-tokens", "1", *flags]) == 0
    assert threads == [1, 2, 3], "another model has torch's own number"


def test_several_answers_to_a_prompt_are_all_shown(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "Explain.", "--n", "3", "--temperature", "1", "--max-tokens", "5", "--trace", "summary"]
    assert demo.main(flags) == 0
    out, err = capsys.readouterr()
    assert err == "" and "step    1  prefill" in out
    assert re.findall(r"^answer (\d)  ", out, re.MULTILINE) == ["0", "1", "2"] and out.count("length, 5 tokens") == 3


def test_a_conversation_is_that_of_m1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is a KV cache?\nWhat is prefill?\n"))
    assert demo.main(["--chat", "--max-tokens", "4", "--num-blocks", "8"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("model  >") == 2 and "Error" not in out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--n", "0"], "n=0"),
        (["--chat", "--n", "2"], "n=2"),
        (["--threads", "0"], "threads=0"),
        (["--num-prompts", "0"], "num_prompts=0"),
        (["--block-size", "0"], "block_size=0"),
        (["--num-blocks", "0"], "num_blocks=0"),
        (["--num-blocks", "9", "--kv-cache-memory-bytes", "9"], "give one of them"),
        (["--kv-cache-memory-bytes", "100000"], "max_model_len of at most"),
        (["--num-blocks", "1"], "the whole KV memory has 1"),
        (["--max-num-batched-tokens", "2"], "max_num_batched_tokens=2 is less than max_num_seqs=16"),
        (["--trace-file", "/nowhere/at/all/trace.jsonl"], "/nowhere/at/all/trace.jsonl"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_value_is_one_clear_line(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(flags) == 2
    err = capsys.readouterr().err
    assert len(err.strip().splitlines()) == 1 and named in err


def test_the_execution_of_m2_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(["--execution", "padded"])
    assert caught.value.code == 2 and "unrecognized arguments: --execution" in capsys.readouterr().err


def test_every_flag_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and "m3_paged_attention.demo" in words(out)
    for flag in (
        *("prompt", "chat", "model", "trace-file", "temperature", "max-num-seqs", "max-num-batched-tokens"),
        *("num-prompts", "n", "load-format", "attention-backend", "threads", "block-size", "num-blocks"),
        *("kv-cache-memory-bytes", "gpu-memory-utilization", "preemption"),
    ):
        assert f"--{flag} " in out or f"--{flag}\n" in out, flag


# --- the story on a tiny model ----------------------------------------------------------------------------------------

Show = Callable[..., str]


@pytest.fixture
def show(make_engine: MakeEngine) -> Show:
    """Runs the story on a tiny model in few blocks; returns what is on the console."""

    def run(console: Console) -> str:
        block_map = BlockMap()
        config = setting(8, blocks=40, block_size=8)
        engine = make_engine(**config, trace_config=TraceConfig(readers=(block_map,)))
        story = fork_one(make_story(engine, most_tokens(engine)), greedy(12), 3)
        show_block_map(engine, block_map, story, greedy(12), console)
        return console.file.getvalue()  # type: ignore[attr-defined]

    return run


def test_a_live_map_is_drawn_after_every_step_and_leaves_nothing_behind(
    show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(demo_tour.time, "sleep", waited.append)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=90, height=50, _environ={"TERM": "xterm"})
    out = show(terminal)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out)
    live, after = plain[: plain.index("A prompt is stored once")], plain[plain.index("A prompt is stored once") :]
    drawn = list(dict.fromkeys(int(number) for number in re.findall(r"step (\d+): ", live)))
    assert drawn == list(range(1, len(drawn) + 1)) and len(waited) == len(drawn)
    assert "slowed down to be watched" in live and "slowed down to be watched" not in after
    end = out[out.rindex("slowed down to be watched") : out.index("A prompt is stored once")]
    assert "\x1b[2K" in end, "the last frame is erased"
    assert "\x1b[?25l" in out and out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l"), "the cursor is there again"
    assert 2 <= sum(seconds == demo_tour.PAUSE for seconds in waited) <= 3


def test_no_terminal_is_not_waited_for(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(seconds: float) -> None:
        raise AssertionError("nobody watches")

    monkeypatch.setattr(demo_tour.time, "sleep", wait)
    for options in ({}, {"force_terminal": True, "_environ": {"TERM": "dumb"}}):
        console = Console(file=io.StringIO(), width=80, **options)  # type: ignore[arg-type]
        assert "What there is to see" in show(console)


def test_one_question_gets_several_answers_that_differ(make_engine: MakeEngine) -> None:
    story = make_story(make_engine(), 256)
    (one,) = (each for each in fork_one(story, greedy(9), 3).questions if each.changes)
    assert one.title == FORKED and one.changes["n"] == 3 and one.changes["temperature"] > 0
    (drawn,) = (each for each in fork_one(story, SamplingParams(temperature=0.5), 2).questions if each.changes)
    assert drawn.changes == {"n": 2}, "who draws anyway keeps the own settings"


# --- the comparison ---------------------------------------------------------------------------------------------------

WORKLOAD = Workload([ids(3 + i) for i in range(6)], [greedy(2 + 2 * i) for i in range(6)])


def test_the_comparison_measures_memory_steps_and_text(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(6, blocks=12))
    per_token = engine.engine_core.executor.kv_cache_spec(1).bytes_per_token
    with contest(engine, WORKLOAD) as entrants:
        assert list(entrants.contenders) == [WIDE, TIGHT, PAGED] and not entrants.notes
        pieces = {n: (c.num_pieces, c.piece_tokens, c.num_bytes // per_token) for n, c in entrants.contenders.items()}
        assert pieces[PAGED] == (13, 4, 52) and pieces[TIGHT] == (2, 20, 40), (
            "as many slots of 20 as fit into 52 places"
        )
        assert pieces[WIDE][1:] == (256, 256 * pieces[WIDE][0])
        runs = compare(entrants, WORKLOAD, rounds=1)
        table = comparison_table(entrants, runs)
    for name, run in runs.items():
        assert run.num_tokens == sum(params.max_tokens for params in WORKLOAD.params)
        assert len(run.running) == len(run.reserved) == len(run.used) >= run.num_steps - 1
        assert all(used <= reserved for used, reserved in zip(run.used, run.reserved, strict=True))
        if name != PAGED:
            piece = pieces[name][1] * per_token
            assert run.reserved == [count * piece for count in run.running] and run.num_preemptions == 0
    assert max(runs[PAGED].running) == max(runs[WIDE].running) == pieces[WIDE][0] > 2 == max(runs[TIGHT].running)
    assert runs[TIGHT].num_steps > runs[PAGED].num_steps
    assert runs[PAGED].waste < runs[TIGHT].waste < runs[WIDE].waste
    assert len({tuple(run.token_ids) for run in runs.values()}) == 1
    assert [column.header for column in table.columns] == ["", WIDE, TIGHT, PAGED]


def test_an_m2_that_cannot_be_is_left_out_with_the_reason(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m2_continuous_batching.slot_cache.available_memory", lambda device: 1)
    with contest(make_engine(**setting(6, blocks=12)), WORKLOAD) as entrants:
        assert list(entrants.contenders) == [PAGED]
        assert [note.split(":")[0] for note in entrants.notes] == [f"{WIDE} is left out", f"{TIGHT} is left out"]
        runs = compare(entrants, WORKLOAD, rounds=1)
    assert what_it_shows(runs) == []


def test_a_request_that_fails_ends_the_comparison(make_engine: MakeEngine) -> None:
    too_long = Workload([ids(10)], [greedy(30)])
    with pytest.raises(EngineError, match="failed"), contest(make_engine(**setting(6, blocks=3)), too_long):
        pass


def a_run(**changes: Any) -> Run:
    fields: dict[str, Any] = {
        "seconds": 2.0, "num_steps": 10, "num_preemptions": 0, "running": [2, 4], "reserved": [2048, 4096],
        "used": [1024, 2048], "token_ids": [(1, 2), (3,)],
    }  # fmt: skip
    return Run(**fields | changes)


def test_what_it_shows_is_said_with_the_numbers() -> None:
    assert (a_run().num_tokens, a_run().tokens_per_second, a_run().waste) == (3, 1.5, 0.5)
    wide, tight = a_run(reserved=[8192, 16384]), a_run(num_steps=15, running=[1, 2])
    memory, steps, same, speed = what_it_shows({WIDE: wide, TIGHT: tight, PAGED: a_run()})
    assert memory == "For 4 requests in flight m2 reserves 16.0 KiB, m3 for 4 never more than 4.0 KiB."
    assert steps == (
        "On the same bytes m2 has 1.5 requests in flight on average, m3 3.0; m2 takes 1.50 times as many steps."
    )
    assert "token for token, all 2 of them" in same and "any other program changes it" in speed
    said = what_it_shows({TIGHT: a_run(token_ids=[(1, 2), (4,)]), PAGED: a_run()})
    assert "both take the same steps" in said[0] and said[1].startswith("1 of 2 answers are not the same")
