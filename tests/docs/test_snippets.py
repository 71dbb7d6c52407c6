"""What a reader copies runs as printed: commands and Python of the pages, and examples of the public docstrings.

Python runs in this process, each snippet in a new namespace and a new folder. A command runs in a copy of the checkout,
with `python` as a reader's environment has it, and with one line of input. `NOT_RUN` is the list of what does not run,
with the reasons; whatever is not on it does, also a snippet that is added later. Pseudo-code is on that list, too, and
not marked in its page: there it is highlighted as Python, by GitHub and by the site.
"""

import ast
import asyncio
import inspect
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from notebooks.shapes import Shape, picture
from tests.contracts.part import all_parts
from tests.docs.snippets import PAGES, ROOT, Snippet, commands, examples, fenced, public_files
from tests.support.demos import words

NOT_RUN = {
    r"m1_single_request\.md: while not done\(ids\):": "pseudo-code",
    r".*: pip install .*": "needs the network; `.ci/run` installs the extras",
    r".*: (mkdocs serve|jupyter lab notebooks|ruff .*|mypy|lint-imports|\.ci/run)": "a part of `.ci/run`",
    r".*: pytest(?! -m gpu| --part).*": "this suite, or a part of it",
    r".*(--device cuda|torch\.cuda|pytest -m gpu|benchmarks\.device$).*": "needs a GPU, some a model of the hub",
    r".*: (python|torchrun .*) -m \w+\.demo .*--model Qwen/.*": "needs a model of the hub",
    r".*: python -m docs\.(house|record_steps).*": "a test compares the files with what it would write",
    r".*: python -m training\.tiny_.*": "trains for 80 minutes and more",
    r".*: python -m training\.evaluate.*": "asks thousands of questions: takes minutes",
    r".*: python -m tests\.(foreign|faults|kills\.\w+).*": "takes an hour, or installs programs of others",
    r".*: python -m benchmarks (m\d\w*|busy|quantized|experts|tiles|kv_types|limits|against.*)": "measures for minutes",
    r".*: python -m benchmarks peers --llama-cpp .*": "needs other engines",
    r".*: python -m m3_paged_attention\.demo --threads 2": "two threads wait for each other beside the other tests",
}
"""What does not run: page and first line, as a regular expression -> the reason."""
SERVED = r".*: (python -m m7_serving|curl .*)"
BY_HAND = r".*: python -m m6_multimodal_pd\.pd \w+ .*"
"""Commands that run together, each in a terminal of its own: they have tests of their own."""
UNDER_TORCHRUN = r".*: from m8_parallel import LLMEngine, ParallelConfig.*"
"""Python that is a program of several ranks."""
PRINTED = {'fill="red"': "red circle", '"content": "What is a KV cache?"': "keys and values"}
"""A piece of a Python snippet -> a part of what the snippet prints."""
TYPED = "What is a KV cache?\n"
LIMIT_S = 180.0

TEXTS = {str(path.relative_to(ROOT)).removeprefix("docs/"): path.read_text(encoding="utf-8") for path in PAGES}
SOURCES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in public_files()}
PYTHON = [
    *(snippet for page, text in TEXTS.items() for snippet in fenced(page, text, "python")),
    *(snippet for page, source in SOURCES.items() for snippet in examples(page, source)),
]
COMMANDS = list({each.code: each for page, text in TEXTS.items() for each in commands(page, text)}.values())
"""Each command once, wherever it is printed."""


def without(patterns: Iterable[str], snippets: list[Snippet]) -> list[Snippet]:
    """Return the snippets that no pattern matches."""
    listed = re.compile("|".join(patterns))
    return [snippet for snippet in snippets if not listed.fullmatch(snippet.name)]


def params(snippets: list[Snippet]) -> list[Any]:
    """Return a parameter set for each snippet."""
    return [pytest.param(snippet, id=snippet.name) for snippet in snippets]


def test_every_form_of_a_snippet_is_found() -> None:
    text = (
        "To `pip install x && python -m\nrun it`, or `python`:\n\n- one\n\n  ```bash\n  # a comment\n  a b \\\n    c"
        '  # d\n\n  e && f\n  ```\n\n```text\nno\n```\n``` python\nx = 1\n```\n```python\n--8<-- "file"\n```\n'
    )
    found = [*fenced("p", text, "python"), *commands("p", text)]
    assert [(snippet.line, snippet.code, snippet.name) for snippet in found] == [
        (18, "x = 1\n", "p: x = 1"),
        (8, "a b c", "p: a b c"),
        (11, "e", "p: e"),
        (11, "f", "p: f"),
        (1, "pip install x", "p: pip install x"),
        (1, "python -m run it", "p: python -m run it"),
    ]
    source = 'x = 1\n"""A.\n\n    from a import b\n\n    b()\n\nText.\n\n    a table\n"""\n'
    source += 'class A:\n    """B:\n\n        with b: ...\n    """\n'
    assert [(snippet.line, snippet.code) for snippet in examples("p", source)] == [
        (4, "from a import b\n\nb()\n"),
        (15, "with b: ...\n"),
    ]


@pytest.mark.parametrize("pattern", [*NOT_RUN, SERVED, BY_HAND, UNDER_TORCHRUN])
def test_every_exception_is_that_of_a_snippet(pattern: str) -> None:
    assert any(re.fullmatch(pattern, snippet.name) for snippet in [*PYTHON, *COMMANDS])


@pytest.mark.parametrize("piece", PRINTED)
def test_every_output_is_that_of_a_snippet(piece: str) -> None:
    assert any(piece in snippet.code for snippet in PYTHON)


def make_files(snippet: Snippet, folder: Path) -> None:
    """Make the files that a reader has before running a snippet."""
    for name in re.findall(r"\w+\.png\b", snippet.code):
        picture(Shape("big", "red", "circle", "center")).save(folder / name)
    if (solved := re.search(r"--part (\S+)=(my_\w+\.py):(\w+)", snippet.code)) is not None:
        part = next(each for each in all_parts().values() if solved[1] in (each.name, each.target))
        module, _, name = part.target.partition(":")
        (folder / solved[2]).write_text(f"from {module} import {name} as {solved[3]}\n")
    if "mine.py:" in snippet.code:  # the block before it, and the line that the text adds
        above = TEXTS[snippet.page].partition("mine.py:")[0]
        *_, block = fenced(snippet.page, above, "python")
        (folder / "mine.py").write_text("\n".join([block.code, *re.findall(r"`(PARTS = [^`]+)`", above)]))
    if 'read_trace("trace.jsonl"' in snippet.code:
        from m3_paged_attention.demo import main

        assert main(["--prompt", TYPED, "--trace", "off", "--trace-file", str(folder / "trace.jsonl")]) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("snippet", params(without([*NOT_RUN, UNDER_TORCHRUN], PYTHON)))
def test_python_runs(
    snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_files(snippet, tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    code = "\n" * (snippet.line - 1) + snippet.code  # a traceback has the line of the page
    waits = eval(compile(code, snippet.page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), scope)
    if inspect.iscoroutine(waits):
        asyncio.run(waits)
    if "engine" in scope:
        scope["engine"].close()
    out = words(capsys.readouterr().out)
    for piece, expected in PRINTED.items():
        assert expected in out or piece not in snippet.code


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout() -> Iterator[Path]:
    """A copy of the checkout."""
    ignored = [Path(line).name for line in (ROOT / ".gitignore").read_text().split()]
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "stepwise"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", *ignored))
        (copy / ".curlrc").write_text("fail\n")  # an error of the server is one of curl
        yield copy


@contextmanager
def started(command: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a command as in a terminal; kill what is left of it at the end."""
    env = os.environ | {"COLUMNS": "100", "CURL_HOME": str(folder)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    for name in ("TRITON_INTERPRET", "XDG_RUNTIME_DIR", "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    shell = ["bash", "-euo", "pipefail", "-c", command]
    with subprocess.Popen(shell, cwd=folder, env=env, text=True, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def output(process: subprocess.Popen[str]) -> str:
    """Wait for the end of a command without an error; return what it has printed."""
    out, _ = process.communicate(TYPED, timeout=LIMIT_S)
    assert process.returncode == 0 and "Traceback" not in out, out
    return words(out)


def free_port() -> str:
    """Return a port that is free: the one that is printed may be in use."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("snippet", params(without([*NOT_RUN, SERVED, BY_HAND], COMMANDS)))
def test_a_command_runs(snippet: Snippet, checkout: Path) -> None:
    make_files(snippet, checkout)
    less = " --rounds 1 --requests 8" if "benchmarks run" in snippet.code else ""  # ten take a minute, and more
    less += " --requests 200" if "benchmarks day" in snippet.code else ""
    with started(snippet.code + less, checkout) as process:
        output(process)


@pytest.mark.exhaustive
@pytest.mark.parametrize("snippet", params([each for each in PYTHON if re.fullmatch(UNDER_TORCHRUN, each.name)]))
def test_programs_of_ranks_run_as_their_pages_say(snippet: Snippet, checkout: Path) -> None:
    (command,) = re.findall(r"torchrun .* program\.py", TEXTS[snippet.page])
    (checkout / "program.py").write_text(snippet.code)
    with started(command, checkout) as process:
        assert "A rank" in output(process)


@pytest.mark.exhaustive
def test_a_server_answers_what_the_pages_send_to_it(checkout: Path) -> None:
    port = free_port()
    with started(f"python -m m7_serving --port {port}", checkout) as server:
        assert server.stdout is not None and server.stdout.readline().startswith("serving at ")
        for snippet in COMMANDS:
            if snippet.code.startswith("curl "):
                with started(snippet.code.replace("8000", port), checkout) as client:
                    output(client)
        server.send_signal(signal.SIGINT)
        output(server)


@pytest.mark.exhaustive
def test_a_group_is_started_by_hand(checkout: Path) -> None:
    by_hand = [snippet for snippet in without(NOT_RUN, COMMANDS) if re.fullmatch(BY_HAND, snippet.name)]
    port = free_port()
    with ExitStack() as stack:
        keys, *others = (snippet.code.replace("5600", port) for snippet in by_hand)
        output(stack.enter_context(started(keys, checkout)))
        router, *engines = others
        with started(router, checkout) as process:
            assert process.stdout is not None and process.stdout.readline().startswith("2 engines load the model")
            joined = [stack.enter_context(started(engine, checkout)) for engine in engines]
            assert "keys and values" in output(process)
        for engine in joined:
            output(engine)
