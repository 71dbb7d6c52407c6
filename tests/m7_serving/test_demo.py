"""The demo of m7: the tour, answers with the parameters of the flags, a chat, and one clear line for what cannot be."""

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
from rich.console import Console

from m6_multimodal_pd import LLMEngine, SamplingParams
from m7_serving import demo, demo_tour
from tests.support.demos import words
from tests.support.traces import chrome_entries

IN_PROCESS = "--both 1 --transport in_process --threads 1".split()
QUESTION = "What is a KV cache?"


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """The demo's number of threads stays in its test."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_tour_has_six_parts_and_tells_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*IN_PROCESS, "--max-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    said = words(out)
    parts = (
        "1. A client and its stream",
        "finish",
        "2. 12 clients at once",
        "3. A client that goes away",
        "the client read 10 chunks of an answer of 800 tokens",
        "4. A picture over HTTP",
        "5. Requests that are rejected",
        "temperature",
        "tool_choice",
        "temprature",
        "gpt-4",
        "6. The end",
        "the last client has read 64 of 64 tokens",
    )
    places = [said.index(part) for part in parts]
    assert places == sorted(places)
    third = said[places[3] : places[5]]
    assert "abort" in third and err == ""


def test_the_flags_of_a_request_reach_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {
        "max_tokens": 20,
        "temperature": 1.5,
        "top_k": 9,
        "top_p": 0.9,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "stop": ["zz"],
        "seed": 7,
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if name != "stop"]
    trace = ["--trace", "off", "--chrome-trace", str(tmp_path / "trace.json")]
    assert demo.main([*IN_PROCESS, "--prompt", QUESTION, *trace, "--stop", "zz", *flags]) == 0
    with LLMEngine() as engine:
        output = engine.generate([{"role": "user", "content": QUESTION}], SamplingParams(**given))
    assert capsys.readouterr().out == f"{output.outputs[0].text}\n"
    assert {"request_routed", "finish"} <= {entry["name"] for entry in chrome_entries(tmp_path / "trace.json")}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--temperature 3", "temperature: Input should be"),
        ("--max-tokens 0", "max_tokens=0"),
        ("--model /nowhere/at/all", "/nowhere/at/all does not exist"),
        ("--shutdown-timeout -1", "shutdown_timeout_s=-1"),
    ],
)
def test_a_wrong_value_is_one_clear_line(flags: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([*IN_PROCESS, "--prompt", "a", "--trace", "off", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert named in err and len(err.strip().splitlines()) == 1 and out == ""


def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "openai", None)
    assert demo.main(["--prompt", "a"]) == 2
    assert "openai" in capsys.readouterr().err


def test_a_chat_keeps_its_history_until_it_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that fails is no part of it; an empty line asks nothing."""
    sent, console = [], Console(file=io.StringIO())
    lines = iter(["one", "", "fails", "two", "/reset", "three"])
    monkeypatch.setattr(demo_tour, "read_line", lambda: next(lines, "/quit"))

    async def create(*, messages: list[dict[str, str]], **_: Any) -> AsyncIterator[Any]:
        sent.append([message["content"] for message in messages])
        if messages[-1]["content"] == "fails":
            raise openai.APIConnectionError(request=httpx.Request("POST", "http://nowhere"))

        async def chunks() -> AsyncIterator[Any]:
            yield SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content="yes"))])

        return chunks()

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    asyncio.run(demo_tour.Chat(client, "model", SamplingParams(), console).run(None))
    assert sent == [["one"], ["one", "yes", "fails"], ["one", "yes", "two"], ["three"]]
    assert "Connection error" in console.file.getvalue()  # type: ignore[attr-defined]
