"""The demo: the tour, a prompt, a chat; right numbers in its sentences, and no traceback in any way out."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

from m1_single_request import EngineError, LLMEngine, SamplingParams, demo
from m1_single_request.demo_tour import costs, prompt_of, show_answer
from m1_single_request.model_runner import ModelInputs, ModelRunner
from m1_single_request.outputs import RequestMetrics
from tests.m1_single_request.engines import MakeEngine, failing_runner, greedy, scripted
from tests.support.demos import events_of, words

ROOT = Path(__file__).parents[2]
TALK = "What is a KV cache?\n/reset\n/nonsense\n\nWhat is prefill?\n"


def start(*flags: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start the demo in a process of its own."""
    env = os.environ | {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    return subprocess.Popen([sys.executable, "-m", "m1_single_request.demo", *flags], cwd=ROOT, env=env, **options)


def is_asleep(pid: int) -> bool:
    """Return whether the main thread of a process waits, for a line of input for example."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("S")


# --- the tour ---------------------------------------------------------------------------------------------------------


def test_the_tour_explains_every_station_and_its_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert demo.main([]) == 0
    out, err = capsys.readouterr()
    assert err == "" and max(map(len, out.splitlines())) <= 80
    for part in ("is ready on", "Prefill of", "Decode of", "The model's favourites", "falls on", "holds ' so'"):
        assert part in words(out), part
    for part in ("question What is a KV cache?", "stop ' so each'", "(TTFT)", "GB/s", "waits for memory"):
        assert part in words(out), part
    assert out.count("Prefill of") == 4, "the costs are measured without a trace"
    in_full, in_a_line = (re.findall(pattern, out, re.MULTILINE) for pattern in (r"^step (\d+)$", r"^step +(\d+)  "))
    assert len(in_full) == 2 * 4 and not set(in_full) & set(in_a_line), "no step is announced twice"


def test_its_trace_is_that_of_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--trace", "summary", "--max-tokens", "1"]) == 0
    out = capsys.readouterr().out
    assert "step    1  prefill" in out and "Prefill of" not in out


def test_a_model_without_a_chat_template_gets_the_text_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    tokenizer = engine.engine_core.input_processor.tokenizer
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert prompt_of(engine, "one") == engine.chat_prompt(messages[:1])
    assert prompt_of(engine, "one", messages) == engine.chat_prompt([*messages, messages[0]])
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert prompt_of(engine, "one") == tokenizer.encode("one")
    assert prompt_of(engine, "one", messages) == tokenizer.encode("one\ntwo\none")


def metrics(step: float, first: float = 0.004) -> RequestMetrics:
    """A request of 11 output tokens, which took so many seconds each after the first."""
    return RequestMetrics(0.0, first, first + 10 * step, num_prompt_tokens=5, cached_tokens=0, num_output_tokens=11)


def told(*steps: float, cpu_share: float = 1.0, flops: float = 200e9, bandwidth: float = 20e9) -> str:
    """The costs of a request of 15 tokens with KV: a step reads 20 million bytes and does 10 million operations."""
    started: Any = SimpleNamespace(weight_bytes=19_985_000, kv_bytes_per_token=1000, num_parameters=5_000_000)
    return "\n".join(costs(started, [*map(metrics, steps)], cpu_share, flops, bandwidth))


def test_the_costs_are_those_of_this_run_beside_the_recorded_ones() -> None:
    out = told(0.0030, 0.0030, 0.0035)
    assert "(TTFT) took 4.0 ms [5.2], each later one (TPOT) 3.00 ms [3.46]." in out
    assert "19.1 MiB [16.1 MiB]. This machine reads 20.0 GB/s [27.9]: reading alone takes 1.00 ms [0.60]." in out
    assert "0.50 [0.50] operations per byte. This machine does 200 GFLOP/s [113]: 10.0 [4.1] in the time" in out
    assert "So decode waits for memory" in out and "The rest of a step is Python" in out and "disturbed" not in out
    assert "The rest of a step" not in told(0.0015, 0.0015, 0.0016), "reading is most of the step"


@pytest.mark.parametrize(
    "run",
    [
        told(0.003, 0.003, 0.005),
        told(0.003, 0.003, 0.003, cpu_share=0.5),
        told(0.003, 0.003, 0.003, flops=15e9),
        told(0.003, 0.003, 0.003, bandwidth=5e9),
    ],
    ids=["repeats differ", "other programs", "slow matrix product", "slow read"],
)
def test_a_disturbed_run_leads_to_the_recorded_numbers(run: str) -> None:
    assert "This run was disturbed" in run and "The numbers in brackets show it: decode waits for memory" in run


def test_the_recorded_numbers_are_those_of_the_benchmark() -> None:
    path = ROOT / "benchmarks/results/m1_single_request.json"
    results = json.loads(path.read_text(encoding="utf-8"))["parts"]
    roof, first = results["roofline"], results["first_token"][0]
    decode = next(point for point in roof["points"] if point["kind"] == "decode")
    assert decode["tokens"] == first["tokens"] == 16
    numbers = [
        f"{first['ttft'] * 1e3:.1f}", f"{decode['seconds'] * 1e3:.2f}", f"{decode['bytes'] / 2**20:.1f} MiB",
        f"{roof['bandwidth'] / 1e9:.1f}", f"{decode['bytes'] / roof['bandwidth'] * 1e3:.2f}",
        f"{decode['intensity']:.2f}", f"{roof['flops'] / 1e9:.0f}", f"{roof['ridge']:.1f}",
    ]  # fmt: skip
    assert re.findall(r"\[(.*?)\]", told(1.0, 1.0, 1.0)) == numbers


# --- a prompt ---------------------------------------------------------------------------------------------------------


def test_a_prompt_is_answered_with_the_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    flags = "--max-tokens 5 --temperature 0.5 --top-k 9 --seed 3 --stop never --stop ever --trace summary".split()
    flags += "--device cpu --dtype bfloat16 --max-model-len 64".split()
    assert demo.main(["--prompt", "What is a KV cache?", "--trace-file", str(trace), *flags]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "answer" in out and "5 tokens" in out
    assert "step    1  prefill" in out and "step    2  decode" in out
    events = events_of(trace)
    assert (events[0]["event"], events[0]["dtype"], events[0]["max_model_len"]) == ("engine_started", "bfloat16", 64)
    added = next(event for event in events if event["event"] == "request_added")
    assert (added["max_tokens"], added["seed"]) == (5, 3)
    sampled = next(event for event in events if event["event"] == "sampled")
    assert sampled["settings"] == "temperature 0.5, top_k 9"


def test_off_prints_the_answer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--prompt", "What is a KV cache?", "--trace", "off", "--max-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "step" not in out and "answer" in out and "3 tokens" in out


def test_markup_in_an_answer_is_only_text(make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    text = "[bold]x[/bold] [/red]"
    token_ids = make_engine().engine_core.input_processor.tokenizer.encode(text)
    engine = make_engine({"sampler": scripted(token_ids)})
    show_answer(Console(highlight=False), engine.generate("a", greedy(len(token_ids))), question="[/x]")
    out = capsys.readouterr().out
    assert text in out and "[/x]" in out


def test_a_failed_answer_is_an_error(make_engine: MakeEngine) -> None:
    engine = make_engine({"model_runner": failing_runner(RuntimeError("it broke"), rid="req-0", position=0)})
    with pytest.raises(EngineError, match="it broke"):
        show_answer(Console(), engine.generate("a", greedy(3)))


# --- a chat -----------------------------------------------------------------------------------------------------------


def converse(
    engine: LLMEngine, lines: list[Any], monkeypatch: pytest.MonkeyPatch, params: SamplingParams | None = None
) -> list[list[dict[str, str]]]:
    """Hold a conversation; return the history that each answer was given."""
    coming, histories, chat_prompt = iter([*lines, EOFError()]), [], engine.chat_prompt

    def read(prompt: str = "") -> str:
        line = next(coming)
        if isinstance(line, BaseException):
            raise line
        return line

    def remember(messages: Any) -> list[int]:
        histories.append([dict(message) for message in messages])
        return chat_prompt(messages)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(engine, "chat_prompt", remember)
    demo.Conversation(engine, params or greedy(3), Console(highlight=False)).chat()
    return histories


@pytest.mark.parametrize("ending", ["", "/quit\nnever read\n"], ids=["end of input", "/quit"])
def test_a_chat_ends_with_its_input_or_with_quit(
    ending: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(TALK + ending))
    assert demo.main(["--chat", "--max-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("model  >") == 2 and "forgotten" in out
    assert out.count("there is /reset and /quit") == 2, "at the start, and for an unknown command"


def test_a_conversation_has_a_history_until_it_is_reset(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    histories = converse(engine, ["one", "two", "/reset", "three", "/quit", "never"], monkeypatch)
    roles = [[message["role"] for message in history] for history in histories]
    assert roles == [["user"], ["user", "assistant", "user"], ["user"]]
    assert [history[-1]["content"] for history in histories] == ["one", "two", "three"]
    first = engine.generate(engine.engine_core.input_processor.apply_chat_template(histories[0]), greedy(3))
    assert histories[1][1]["content"] == first.text


def test_commands_get_the_rest_of_the_line(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/wave  to all \n/wave\n/nonsense\n/quit\n"))
    talk = demo.Conversation(make_engine(), greedy(2), Console())
    talk.commands["/wave"] = lambda rest: f"waved {rest!r} [bold]"
    talk.chat()
    out = capsys.readouterr().out
    assert "waved 'to all' [bold]" in out and "waved '' [bold]" in out and "model  >" not in out
    assert "there is /reset, /wave and /quit" in out


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
    assert len(converse(engine, ["one", "two"], monkeypatch)) == 2
    assert "interrupted" in capsys.readouterr().out
    assert engine.stats().num_finished == {"abort": 1, "length": 1}


def test_a_failed_answer_is_reported_and_forgotten(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = failing_runner(RuntimeError("it [broke]"), rid="req-0", position=0)
    engine = make_engine({"model_runner": broken}, max_model_len=24)
    histories = converse(engine, ["fails", "one", "x " * 50, "two"], monkeypatch)
    assert [[message["content"] for message in history][::2] for history in histories] == [
        ["fails"], ["one"], ["one", "x " * 49 + "x"], ["one", "two"]
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "EngineError: req-0 failed: it [broke]" in out and "PromptTooLongError" in out


# --- ways out ---------------------------------------------------------------------------------------------------------


def test_ctrl_c_while_an_answer_is_made_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: LLMEngine, *args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLMEngine, "stream", interrupted)
    assert demo.main(["--prompt", "a", "--trace", "off"]) == 130


def test_an_error_of_the_system_is_named_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: LLMEngine, *args: Any, **options: Any) -> Any:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(LLMEngine, "stream", fails)
    assert demo.main(["--prompt", "a", "--trace", "off"]) == 1
    assert capsys.readouterr().err == "ConnectionError: no route to the hub\n"


@pytest.mark.exhaustive
def test_ctrl_c_leaves_a_chat_without_a_traceback() -> None:
    ours, theirs = pty.openpty()
    process = start("--chat", "--max-tokens", "4", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # Linux: the other side is closed
        while piece := os.read(ours, 4096):
            seen += piece
            if b"you    >" in piece:
                while not is_asleep(process.pid):  # between the prompt and the read Python would not notice the signal
                    time.sleep(0.01)
                process.send_signal(signal.SIGINT)
    os.close(ours)
    assert process.wait(timeout=60) == 130
    assert b"you    >" in seen and b"Traceback" not in seen


@pytest.mark.exhaustive
def test_a_closed_pipe_ends_the_tour() -> None:
    with start(stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read().count(b"\n") <= 1
    assert process.returncode == 1
