"""`pytest --part NAME=FILE.py:CLASS`: grade a learner's own part, and run an engine with it.

    pytest --part prefix_cache=my_radix.py:MyRadixCache
    pytest --part m4_radix_cache.mem_cache.eviction:EvictionHeap=mine.py:MyHeap

It runs the contract of this part and nothing else, and then asks an engine that has it the prompts of the equivalence
suite. A part without a role is put in its place before any test is found. A part that passes both is recorded
(`python -m notebooks.progress`).
"""

import os
import sys
import threading
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import pytest

from notebooks.progress import record
from tests.contracts.part import (
    CONTRACTS,
    LIMIT_S,
    Part,
    all_parts,
    explained,
    found,
    loaded,
    refusal,
    sentence,
    substitute,
    time_limit,
)

ENGINE_LIMIT_S = 60.0
GRACE_S = 5.0
"""After its limit a behaviour has this time to end; then the process ends."""
CHOSEN = pytest.StashKey[tuple[Part, Any]]()
SEEN = pytest.StashKey[set[str]]()
PASSED = pytest.StashKey[set[str]]()
ENGINE_TEST = "test_the_engine_answers_as_before"


def pytest_addoption(parser: pytest.Parser) -> None:
    explanation = "grade your own part; `--part help` names all"
    parser.addoption("--part", action="append", metavar="NAME=FILE.py:CLASS", help=explanation)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """One process is enough for one part."""
    if config.getoption("--part"):
        config.option.numprocesses, config.option.dist, config.option.tx = 0, "no", []


def pytest_configure(config: pytest.Config) -> None:
    """Load the solution, put it in its place, and choose its contract."""
    if not (named := config.getoption("--part")):
        return
    try:
        if len(named) > 1:
            raise LookupError("--part is given twice: one part is graded at a time")
        part, solution = chosen_by(named[0])
    except LookupError as error:
        raise pytest.UsageError(str(error.args[0])) from error
    if not part.role:
        substitute(part.target, solution)
    config.stash[CHOSEN] = part, solution
    config.option.reportchars, config.option.verbose = "", -1
    files = [CONTRACTS / f"{part.name}.py", CONTRACTS / "in_engine.py"]
    config.args = [str(file) for file in files if file.is_file()]


def chosen_by(named: str) -> tuple[Part, Any]:
    """Return the part that `NAME=FILE.py:CLASS` names, and the solution. Raises `LookupError`."""
    name, _, where = (piece.strip() for piece in named.partition("="))
    parts = all_parts()
    part = parts.get(name) or next((each for each in parts.values() if each.target == name), None)
    if part is None and ":" in name and not name.endswith(".py"):
        found(name)
        part = Part(name, target=name, lesson="", starter="Mine", variant="m6_multimodal_pd-pieces-64")
    if part is None:
        close = get_close_matches(name.replace(" ", "_"), parts, 1)
        guess = f": did you mean {close[0]}?" if close else f"; there are {', '.join(parts)}"
        raise LookupError(f"--part NAME=FILE.py:CLASS: there is no part {name!r}{guess}")
    solution = loaded(where, f"--part {part.name}=my_file.py:{part.starter}")
    if problem := refusal(part, solution, where.rpartition(":")[2]):
        raise LookupError(problem)
    return part, solution


@pytest.fixture(scope="session")
def chosen(pytestconfig: pytest.Config) -> tuple[Part, Any]:
    """The part, and the solution that is graded."""
    return pytestconfig.stash[CHOSEN]


@pytest.fixture
def part(chosen: tuple[Part, Any]) -> Any:
    """The solution that is graded."""
    return chosen[1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Stop what does not end. The engine runs a part only if its contract is kept."""
    if CHOSEN not in item.config.stash:
        return (yield)
    is_engine = item.path.stem == "in_engine"
    if is_engine and item.session.testsfailed:
        pytest.skip("first the contract")
    limit_s = ENGINE_LIMIT_S if is_engine else LIMIT_S
    last = threading.Timer(limit_s + GRACE_S, end_process, (item,))
    last.daemon = True
    last.start()
    try:
        with time_limit(limit_s):
            return (yield)
    finally:
        last.cancel()


def end_process(item: pytest.Item) -> None:
    """End a behaviour that cannot be stopped: a loop that catches every exception, for example."""
    item.config.pluginmanager.getplugin("capturemanager").suspend_global_capture()
    behaviour = sentence(item.function)  # type: ignore[attr-defined]
    text = f"\n{behaviour}\nstopped: it does not end, and catches what should stop it. The whole run ends here.\n"
    sys.stderr.write(text)
    sys.stderr.flush()
    os._exit(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Of a behaviour that is missing say what is missing, not where the contract noticed it."""
    report = yield
    if CHOSEN not in item.config.stash:
        return report
    if report.skipped and item.path.stem != "in_engine":  # a contract skips nothing: the solution did
        report.outcome = "failed"
    if call.excinfo is not None and report.failed:
        part, solution = item.config.stash[CHOSEN]
        text = explained(part, item.function, solution, call.excinfo.value)  # type: ignore[attr-defined]
        first, _, rest = text.partition("\n")
        seen = item.config.stash.setdefault(SEEN, set())
        report.longrepr = f"{first}\n(the same)" if rest in seen else text
        seen.add(rest)
        report.sections = []
        if call.duration >= LIMIT_S:  # whatever it made of the exception that stopped it
            item.session.shouldfail = "a behaviour does not end: the others were not run"
    if report.when == "call" and report.passed:
        item.config.stash.setdefault(PASSED, set()).add(item.function.__name__)  # type: ignore[attr-defined]
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Record a part that is solved (`python -m notebooks.progress`)."""
    if CHOSEN in session.config.stash:
        part, _ = session.config.stash[CHOSEN]
        if exitstatus == 0 and is_solved(part, session.config.stash.get(PASSED, set())):
            record("parts", part.name)


def is_solved(part: Part, passed: set[str]) -> bool:
    """Whether all behaviours passed, and the engine, if one runs this part. What has no contract is no part."""
    if part.name not in all_parts():
        return False
    return passed >= {*part.behaviours, *([ENGINE_TEST] if part.variant else [])}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Count the behaviours."""
    if CHOSEN in config.stash:
        part, _ = config.stash[CHOSEN]
        terminalreporter.write_line(verdict(part, config.stash.get(PASSED, set())))


def verdict(part: Part, passed: set[str]) -> str:
    """Return the last line: how far a solution is. `passed`: functions of the contract, and of the engine."""
    behaviours = set(part.behaviours) if part.name in all_parts() else set()
    kept = len(behaviours & passed)
    line = f"{part.name}: {kept} of {len(behaviours)} behaviours"
    if kept < len(behaviours):
        return f"{line}; read the first failure first"
    if ENGINE_TEST in passed:
        return f"{line}, and an engine runs with it"
    return f"{line}; no engine of the suite runs this part" if not part.variant else f"{line}; the engine does not"
