"""The demo, run as a reader runs it: every way in, every way out, and no traceback in any of them.

Starting a process takes seconds, so only what needs one gets one; both start before the first test waits.
"""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

from m1_single_request import DEFAULT_MODEL, EngineError, LLMEngine, SamplingParams, demo
from m1_single_request.model_runner import ModelInputs, ModelRunner
from tests.m1_single_request.engines import MakeEngine, failing_runner, greedy, scripted

ROOT = Path(__file__).parents[2]
TALK = "What is a KV cache?\n/reset\n/nonsense\n\nWhat is prefill?\n"


def start(*flags: str) -> subprocess.Popen[str]:
    """Start the demo in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "m1_single_request.demo", *flags],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "120", "PYTHONIOENCODING": "utf-8"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All processes of this module, running."""
    started = {"tour": start(), "chat": start("--chat", "--max-tokens", "4")}
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], text: str, times: int) -> str:
    """What a process says until it has said `text` so many times."""
    assert process.stdout is not None and process.stderr is not None
    seen = ""
    while seen.count(text) < times:
        letter = process.stdout.read(1)
        assert letter, f"it ended early: {seen}\n{process.stderr.read()}"
        seen += letter
    return seen


def interrupted(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Press Ctrl-C until it ends: one that comes just before a process waits for input is seen with the next."""
    for _ in range(12):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
            break
    _, err = process.communicate(timeout=10)
    return process.returncode, err


def check_tour(out: str) -> None:
    """It explains every station and what it cost."""
    said = " ".join(out.split())  # the console breaks lines where it likes
    for words in ("is ready on", "Prefill of", "Decode of", "The model's favourites", "falls on", "held back"):
        assert words in said, words
    for row in ("time to first token", "time per output token", "KV cache at the end", "waits for memory", "GB/s"):
        assert row in said, row


@pytest.mark.exhaustive
def test_the_tour_explains_every_station_and_what_it_cost(processes: dict[str, subprocess.Popen[str]]) -> None:
    out, err = processes["tour"].communicate(timeout=120)
    assert (processes["tour"].returncode, err) == (0, "")
    check_tour(out)


@pytest.mark.exhaustive
def test_ctrl_c_leaves_a_chat_without_a_traceback(processes: dict[str, subprocess.Popen[str]]) -> None:
    process = processes["chat"]
    assert process.stdin is not None
    process.stdin.write(TALK)
    process.stdin.flush()
    out = read_until(process, "you    >", times=6)  # it has read all five lines and waits for more
    assert out.count("model  >") == 2
    assert "forgotten" in out and "there is /reset and /quit" in out
    assert interrupted(process) == (130, "")


# --- the same program in this process ---------------------------------------------------------------------------------


def test_the_tour_explains_here_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert demo.main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    check_tour(out)


def test_a_prompt_is_answered_with_the_flags_that_were_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    flags = "--max-tokens 5 --temperature 0.5 --top-k 9 --seed 3 --trace summary".split()
    flags += "--device cpu --dtype bfloat16 --max-model-len 64".split()
    assert demo.main(["--prompt", "What is a KV cache?", "--trace-file", str(trace), *flags]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "answer" in out and "5 tokens" in out
    assert "step    1  prefill" in out and "step    2  decode" in out
    events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
    assert events[0]["event"] == "engine_started" and events[0]["dtype"] == "bfloat16"
    assert events[0]["max_model_len"] == 64
    added = next(event for event in events if event["event"] == "request_added")
    assert (added["max_tokens"], added["seed"]) == (5, 3)
    sampled = next(event for event in events if event["event"] == "sampled")
    assert sampled["settings"] == "temperature 0.5, top_k 9"


@pytest.mark.parametrize("ending", ["", "/quit\nnever read\n"], ids=["end of input", "/quit"])
def test_a_chat_ends_with_its_input_or_when_told(
    ending: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(TALK + ending))
    assert demo.main(["--chat", "--max-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("model  >") == 2


def test_ctrl_c_while_an_answer_is_made_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: LLMEngine, *args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLMEngine, "generate", interrupted)
    assert demo.main(["--prompt", "a", "--trace", "off"]) == 130


def test_a_wrong_model_path_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--model", "/nowhere/at/all"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip().splitlines() == [
        "ModelLoadError: /nowhere/at/all does not exist: give a model directory, or a hub id such as Qwen/Qwen3-0.6B"
    ]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-tokens", "0"], "max_tokens=0"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--top-p", "0"], "top_p=0.0"),
        (["--top-k", "0"], "top_k=0"),
        (["--min-p", "2"], "min_p=2.0"),
        (["--repetition-penalty", "0"], "repetition_penalty=0.0"),
        (["--device", "toaster"], "device='toaster'"),
        (["--max-model-len", "1"], "max_model_len=1"),
        (["--max-model-len", "9000"], "9000"),
        (["--stop", ""], "stop="),
        (["--trace-file", "/nowhere/at/all/trace.jsonl"], "/nowhere/at/all/trace.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_value_is_one_clear_line(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--prompt", "a", "--trace", "off", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1 and named in err


@pytest.mark.parametrize(
    "flags",
    [
        ["--nonsense"],
        ["--max-tokens", "many"],
        ["--trace", "loud"],
        ["--dtype", "float8"],
        ["--prompt", "a", "--chat"],
        ["stray"],
    ],
    ids=" ".join,
)
def test_a_bad_flag_is_refused_with_the_usage(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(flags)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_every_flag_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for flag in ("prompt", "chat", "model", "device", "dtype", "trace", "trace-file", "max-tokens", "temperature"):
        assert f"--{flag} " in out or f"--{flag}\n" in out, flag


@pytest.mark.parametrize("prompt", ["", "a " * 5000], ids=["empty", "too long"])
def test_a_prompt_that_cannot_run_is_one_clear_line(prompt: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--prompt", prompt, "--raw", "--trace", "off"]) == 2
    err = capsys.readouterr().err
    assert len(err.strip().splitlines()) == 1
    assert "empty" in err or "max_model_len" in err


def test_a_later_milestone_s_commands_are_done_and_named(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/wave  to all \n/wave\n/nonsense\n/quit\n"))
    demo.chat(make_engine(), greedy(2), Console(), {"/wave": lambda rest: f"waved {rest!r} [bold]"})
    out = capsys.readouterr().out
    assert "waved 'to all' [bold]" in out and "waved '' [bold]" in out and "model  >" not in out
    assert "there is /reset, /wave and /quit" in out


def test_off_says_only_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--prompt", "What is a KV cache?", "--trace", "off", "--max-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "step" not in out and "answer" in out and "3 tokens" in out


def test_markup_in_an_answer_is_only_text(make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    text = "[bold]x[/bold] [/red]"
    token_ids = make_engine().engine_core.input_processor.tokenizer.encode(text)
    engine = make_engine({"sampler": scripted(token_ids)})
    demo.show_answer(Console(highlight=False), engine.generate("a", greedy(len(token_ids))), question="[/x]")
    out = capsys.readouterr().out
    assert text in out and "[/x]" in out


# --- the conversation -------------------------------------------------------------------------------------------------


def converse(
    engine: LLMEngine, lines: list[Any], monkeypatch: pytest.MonkeyPatch, params: SamplingParams | None = None
) -> list[list[dict[str, str]]]:
    """Hold a conversation in this process; returns the history that each answer was given."""
    said = iter(lines)
    histories = []
    chat_prompt = engine.chat_prompt

    def read(prompt: str = "") -> str:
        line = next(said, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    def remember(messages: Any, **options: Any) -> list[int]:
        histories.append([dict(message) for message in messages])
        return chat_prompt(messages, **options)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(engine, "chat_prompt", remember)
    demo.chat(engine, params or greedy(3), Console(highlight=False))
    return histories


def test_a_conversation_has_a_history_until_it_is_reset(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    histories = converse(engine, ["one", "two", "/reset", "three", "/quit", "never"], monkeypatch)
    roles = [[message["role"] for message in history] for history in histories]
    assert roles == [["user"], ["user", "assistant", "user"], ["user"]]
    assert [history[-1]["content"] for history in histories] == ["one", "two", "three"]
    first = engine.generate(engine.engine_core.input_processor.apply_chat_template(histories[0]), greedy(3))
    assert histories[1][1]["content"] == first.text


def test_an_interrupted_answer_ends_and_the_conversation_goes_on(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    length = len(make_engine().chat_prompt([{"role": "user", "content": "one"}]))

    class InterruptedRunner(ModelRunner):
        def execute_model(self, inputs: ModelInputs) -> dict[str, Tensor]:
            if inputs.request_id == "req-0" and inputs.num_computed_tokens == length:
                signal.raise_signal(signal.SIGINT)
            return super().execute_model(inputs)

    engine = make_engine({"model_runner": InterruptedRunner})
    histories = converse(engine, ["one", "two"], monkeypatch)
    assert len(histories) == 2
    assert "interrupted" in capsys.readouterr().out
    assert engine.stats().num_finished == {"abort": 1, "length": 1}


def test_a_failed_answer_is_reported_and_forgotten(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine({"model_runner": failing_runner(RuntimeError("it [broke]"), rid="req-0", position=0)})
    histories = converse(engine, ["one", "two"], monkeypatch)
    assert [len(history) for history in histories] == [1, 1]
    assert "RuntimeError: it [broke]" in capsys.readouterr().out


def test_a_conversation_that_grew_too_long_says_so(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine(max_model_len=24)
    histories = converse(engine, ["one", "x " * 50, "two"], monkeypatch)
    assert "PromptTooLongError" in capsys.readouterr().out
    assert [message["content"] for message in histories[2]][::2] == ["one", "two"]


def test_a_failed_answer_of_the_tour_is_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine({"model_runner": failing_runner(RuntimeError("it broke"), rid="req-0", position=0)})
    with pytest.raises(EngineError, match="it broke"):
        demo.show_answer(Console(), engine.generate("a", greedy(3)))


def test_the_demo_runs_the_embedded_checkpoint() -> None:
    assert demo.make_parser().parse_args([]).model is None
    assert LLMEngine.default_model == DEFAULT_MODEL
