"""The demo: the tour on a terminal and in a file, m1's and m2's flags, and no traceback in any way out."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from m1_single_request.errors import EngineError
from m2_continuous_batching import demo_tour as m2_demo_tour
from m2_continuous_batching.demo_tour import Run
from m3_paged_attention import DEFAULT_MODEL, CacheConfig, SamplingParams, TraceConfig, demo, demo_tour
from m3_paged_attention.demo_tour import conclusions, several, tour
from tests.m3_paged_attention.engines import greedy
from tests.support.demos import events_of, words


@pytest.fixture
def without_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part of the tour is left out."""
    monkeypatch.setattr(demo_tour, "show_comparison", lambda *args: None)


# --- the tour ---------------------------------------------------------------------------------------------------------


def test_the_tour_maps_explains_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    trace = tmp_path / "trace.jsonl"
    assert demo.main(["--num-prompts", "8", "--trace-file", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out and max(map(len, out.splitlines())) <= 80
    for part in (
        "The burst of m2's demo, with 3 answers to 'Hello world!'",
        "The KV memory is 36 blocks of 8 tokens",
        "For m2 this memory is 0.07 slots.",
        "A prompt is stored once for several answers (fork)",
        "one gets a block of its own (copy on write)",
        "Most requests in flight",
        "The memory is full (preemption)",
        "A preempted request runs again",
        "req-1/1 shares blocks",
        "it gets a copy, block",
        "is preempted",
        "The code of zebra is 4821.",
        "As many slots of m2 take",
        "Preemptions: 1.",
        "m2 takes 1.",
        "token for token",
        "1 CPU thread",
    ):
        assert part in words(out), part
    num_slots, num_tokens = map(int, re.findall(r"m2 has (\d+) slots of (\d+) tokens", words(out))[0])
    assert num_slots == (36 + 1) * 8 // num_tokens, "as many as fit into the memory, with block 0"
    grids = re.findall(r"^ +1  ((?:[A-Z][\d ] |[a-z][\d ] |\.  ){24})", out, re.MULTILINE)
    assert len(grids) == 5, "a map for each highlight"
    assert "A  A  a  B3 B3 b3 E  E" in grids[0], "three of the first blocks have three holders"
    assert any(admit["num_output_tokens"] for admit in events_of(trace, "admit")), "a request came back"
    assert len(events_of(trace, "finish")) == 10, "the comparison runs without a trace"


def test_the_memory_is_that_of_the_flags(
    without_comparison: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    flags = "--block-size 16 --num-blocks 18 --preemption swap --n 4 --max-num-seqs 6 --max-tokens 24 --trace-file"
    assert demo.main([*flags.split(), str(trace)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "with 4 answers to" in words(out) and "18 blocks of 16 tokens" in words(out)
    (sized,) = events_of(trace, "kv_sized")
    assert (sized["block_size"], sized["num_blocks"], sized["num_host_blocks"]) == (16, 18, 18)
    assert max(len(event["rids"]) for event in events_of(trace, "batch")) == 6
    assert {event["mode"] for event in events_of(trace, "preempted")} <= {"swap"}


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
def test_the_tour_alone_has_little_memory(
    flags: str, block_size: int, num_blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[CacheConfig] = []

    def engine(*, cache_config: CacheConfig, **configs: Any) -> Any:
        sizes.append(cache_config)
        raise EngineError("enough")

    monkeypatch.setattr(demo, "LLMEngine", engine)
    monkeypatch.setattr(demo_tour, "LLMEngine", engine)
    assert demo.main(flags.split()) == 2
    assert [(each.block_size, each.num_blocks) for each in sizes] == [(block_size, num_blocks)]


def test_random_weights_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--load-format", "dummy", "--max-tokens", "4", "--num-prompts", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "Nothing is compared: m2 needs the files of a model" in words(out)


# --- a prompt, a chat, wrong values -----------------------------------------------------------------------------------


def test_the_model_that_ships_runs_on_one_thread_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    own = ["--model", str(DEFAULT_MODEL)]
    for flags in ([], ["--threads", "2"], own, [*own, "--threads", "3"]):
        assert demo.main(["--prompt", "a", "--trace", "off", "--max-tokens", "1", *flags]) == 0
    assert threads == [1, 2, 3], "another model has torch's own number"


def test_several_answers_to_a_prompt_are_all_shown(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "Explain.", "--n", "3", "--temperature", "1", "--max-tokens", "5", "--trace", "summary"]
    assert demo.main(flags) == 0
    out, err = capsys.readouterr()
    assert err == "" and "step    1  prefill" in out
    assert re.findall(r"^answer (\d)  ", out, re.MULTILINE) == ["0", "1", "2"] and out.count("length, 5 tokens") == 3


def test_a_live_map_is_drawn_after_every_step_and_leaves_nothing_behind(
    without_comparison: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(m2_demo_tour.time, "sleep", waited.append)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=90, height=50, _environ={"TERM": "xterm"})
    configs = {"cache_config": CacheConfig(block_size=8, num_blocks=40), "trace_config": TraceConfig()}
    tour(configs, greedy(12, n=3), terminal, num_prompts=1)
    out = terminal.file.getvalue()  # type: ignore[attr-defined]
    live, after = out[: out.index("A prompt is stored once")], out[out.index("A prompt is stored once") :]
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", live)
    drawn = list(dict.fromkeys(int(number) for number in re.findall(r"step (\d+): ", plain)))
    assert drawn == list(range(1, len(drawn) + 1)) and len(waited) == len(drawn)
    assert "\x1b[2K" in live[live.rindex("step ") :], "the last frame is erased"
    assert "\x1b[?25l" in live and live.rindex("\x1b[?25h") > live.rindex("\x1b[?25l"), "the cursor is shown again"
    assert "\x1b[?25l" not in after


def test_several_answers_differ() -> None:
    drawn, single = SamplingParams(temperature=0.5, n=2), SamplingParams()
    assert several(SamplingParams(n=3)) == SamplingParams(n=3, temperature=1.0, top_p=0.95, seed=6)
    assert several(drawn) is drawn and several(single) is single, "drawn answers keep their own settings"


# --- the comparison ---------------------------------------------------------------------------------------------------


def test_the_differences_are_put_in_words() -> None:
    m3, m2 = Run(2.0, [1.0], [(1, 2)], [0] * 10), Run(6.0, [1.0], [(1, 2)], [0] * 15)
    steps, speed = conclusions(m2, m3)
    assert steps.startswith("m2 takes 1.50 times as many steps as m3") and "m3 makes 3.0 times as many" in speed
    assert conclusions(m3, m3)[0].startswith("m2 needs no more steps than m3 here.")
