"""Engines as processes: the same answers, whoever dies on the way, and nothing left of them afterwards.

What is killed here is a real process, at a moment when it surely has requests: it was stopped before they came, or its
tokens are on their way. The group is started once for all tests that leave it as good as it was.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m6_multimodal_pd import ConfigError, EngineConfig, LLMEngine, ModelLoadError
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.runtime import child as child_module, processes
from m6_multimodal_pd.disaggregation.runtime.links import Lost
from m6_multimodal_pd.disaggregation.runtime.messages import Fault
from m6_multimodal_pd.disaggregation.runtime.processes import RESTART_WINDOW_S, ProcessLinks, RestartLimit, reason_of
from m6_multimodal_pd.errors import EngineLostError
from m6_multimodal_pd.wiring import PARTS
from tests.m6_multimodal_pd.engines import greedy
from tests.m6_multimodal_pd.pd_engines import check_alike
from tests.m6_multimodal_pd.processes import (
    LIMIT_S,
    Callers,
    configs,
    eventually,
    group_of,
    has_both,
    is_alive,
    left_of,
    links_of,
    num_sockets,
    own_engines,
    pid_of,
    segments,
)
from tests.m6_multimodal_pd.seeing import asking

SILENT_S = 3.0
ASKED: list[tuple[Any, Any]] = [
    (asking(1), greedy(150)),
    (asking("a", 2), greedy(120, logprobs=2)),
    (asking("v", 3), greedy(100, temperature=0.9, seed=4)),
    (asking(4, "b"), greedy(80, n=2, temperature=1.0, seed=5)),
    (asking("a", 5), greedy(60, prompt_logprobs=1)),
]
"""Conversations, and what is asked of each: long answers, so that there is time to kill somebody."""


@pytest.fixture
def make_group(seeing_directory: Path) -> Iterator[Callable[..., Any]]:
    """`make_group(max_restarts=..., ...)`: a group, closed here if its test has failed to do so."""
    made: list[Any] = []

    def make(model: Path = seeing_directory, **settings: Any) -> Any:
        made.append(group_of(model, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def names_of(engine: Any) -> set[str]:
    """The engines that have joined."""
    return set(engine.engine_core.router.members)


@pytest.fixture(scope="module")
def expected(seeing_directory: Path) -> dict[str, Any]:
    """What one engine alone says."""
    with LLMEngine(**configs(seeing_directory)) as engine:
        return Callers(engine, ASKED).answers()


@pytest.fixture(scope="module")
def group(seeing_directory: Path) -> Iterator[Any]:
    """A prefill and a decode engine, for all tests that leave them, or others in their place."""
    with group_of(seeing_directory, max_restarts=100, heartbeat_timeout_s=SILENT_S) as engine:
        yield engine
    assert not own_engines()


def check_is_whole(engine: Any) -> None:
    """Both engines are there, nothing is held on either, and all of it can be forgotten."""
    assert has_both(engine)
    assert engine.flush_cache()
    left = left_of(engine)
    assert eventually(lambda: not segments(links_of(engine)._group))
    assert not any(left[kind] for kind in ("tokens", "requests", "rooms", "processes"))


# --- answers ----------------------------------------------------------------------------------------------------------


def test_processes_answer_as_one_engine_does(group: Any, expected: dict[str, Any]) -> None:
    answers = Callers(group, ASKED).answers()
    check_alike(answers, expected)
    assert answers["4"].prompt_logprobs and answers["1"].outputs[0].logprobs and len(answers["3"].outputs) == 2
    check_is_whole(group)


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.exhaustive
def test_an_engine_without_requests_sleeps_and_wakes_at_once(group: Any, expected: dict[str, Any]) -> None:
    check_is_whole(group)
    pids = [pid_of(group, "prefill"), pid_of(group, "decode")]
    links = links_of(group)
    for _ in range(4):  # the last heartbeats
        before = list(map(cpu_seconds, pids))
        if not (heard := list(links.receive(2.0))):
            break
    assert not heard, "nobody may read for hours what it says"
    assert [after - since for after, since in zip(map(cpu_seconds, pids), before, strict=True)] < [0.1, 0.1]
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        assert group.generate(group.chat_prompt(ASKED[0][0]), greedy(1)).token_ids == expected["0"].token_ids[:1]
        seconds.append(time.monotonic() - began)
    assert min(seconds) < 0.3, "it does not sleep to the end of its second"


# --- one that dies ----------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("role", "number"), [("prefill", signal.SIGKILL), ("decode", signal.SIGKILL), ("decode", signal.SIGSTOP)]
)
def test_where_a_process_is_killed_or_stopped_another_one_goes_on_without_a_token_lost(
    group: Any, expected: dict[str, Any], role: str, number: int
) -> None:
    check_is_whole(group)
    pid, names = pid_of(group, role), names_of(group)
    if role == "prefill":
        os.kill(pid, signal.SIGSTOP)  # so that all of them surely wait for it
    callers = Callers(group, ASKED)
    callers.step()
    callers.step_until(lambda: role == "prefill" or callers.num_tokens() > 20)
    assert callers.num_tokens() < 200, "there is more to come"
    os.kill(pid, number)
    check_alike(callers.answers(), expected)
    assert not is_alive(pid)
    assert len(names - names_of(group)) == len(names_of(group) - names) == 1, "another one, under another name"
    check_is_whole(group)


@pytest.mark.exhaustive
def test_an_engine_whose_step_takes_too_long_is_ended_by_its_watchdog(make_group: Callable[..., Any]) -> None:
    engine = make_group(step_timeout_s=0.0001, max_restarts=0)
    children = list(links_of(engine).children.values())
    assert isinstance(engine.generate([5, 6, 7], greedy(3)).error, EngineLostError)
    assert any("a step did not end" in reason_of(child.process.poll() or 0) for child in children)


@pytest.mark.exhaustive
def test_where_nobody_is_left_all_callers_are_told_and_nothing_is_left(make_group: Callable[..., Any]) -> None:
    descriptors = num_sockets()
    engine = make_group(max_restarts=0)
    links = links_of(engine)
    prefill, decode = links.children.values()
    callers = Callers(engine, ASKED)
    callers.step_until(lambda: callers.num_tokens() > 5)
    decode.process.send_signal(signal.SIGTERM)
    answers = callers.answers().values()
    assert decode.process.wait(LIMIT_S) == 0, "told to end, it ends in good order"
    assert [type(answer.error) for answer in answers] == [EngineLostError] * len(ASKED)
    assert engine.generate([5, 6, 7], greedy(3)).finish_reason == "error"
    assert is_alive(prefill.process.pid)
    host, _, port = links.socket.address.removeprefix("tcp://").rpartition(":")
    engine.close()
    assert prefill.process.returncode == 0
    assert not links.children and not segments(links._group)
    assert num_sockets() == descriptors
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
    assert engine.stats().num_finished == {"error": len(ASKED) + 1}


# --- one that does not start ------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_an_engine_that_is_not_built_says_why(
    make_group: Callable[..., Any], seeing_directory: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(seeing_directory, tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])  # what the parent reads of it is fine
    before = own_engines()
    with pytest.raises(ModelLoadError, match=r"safetensors.*\(on (prefill|decode)-0\)"):
        make_group(model)
    assert own_engines() == before


def while_it_starts(monkeypatch: pytest.MonkeyPatch, act: Callable[[ProcessLinks], None]) -> None:
    """Do something when the parent listens for the third time for who has joined."""
    times = iter(range(1000))
    receive = ProcessLinks.receive

    def listening(links: ProcessLinks, timeout_s: float) -> Any:
        if next(times) == 2:
            act(links)
        return receive(links, timeout_s)

    monkeypatch.setattr(ProcessLinks, "receive", listening)


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (signal.SIGKILL, EngineLostError, "decode-0.*killed by signal 9"),
        pytest.param(
            signal.SIGSTOP,
            EngineLostError,
            "decode-0.*was stopped for 0.5 s while it started",
            marks=pytest.mark.exhaustive,
        ),
        (signal.SIGINT, KeyboardInterrupt, "^$"),
    ],
    ids=["killed", "stopped", "Ctrl-C"],
)
def test_what_ends_a_start_is_noticed_at_once_and_leaves_no_engine(
    make_group: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, number: int, error: type, message: str
) -> None:
    """And not only after `start_timeout_s`. Ctrl-C reaches the parent."""

    def act(links: ProcessLinks) -> None:
        os.kill(os.getpid() if number == signal.SIGINT else links.children["decode-0"].process.pid, number)

    while_it_starts(monkeypatch, act)
    before = own_engines()
    with pytest.raises(error, match=message):
        make_group(heartbeat_timeout_s=0.5, start_timeout_s=LIMIT_S)
    assert own_engines() == before


@contextmanager
def started_prefill(model: Path, **settings: Any) -> Iterator[ProcessLinks]:
    """Links to one prefill engine, which has just been started."""
    config = EngineConfig(model=configs(model)["model_config"], disaggregation=DisaggregationConfig(**settings))
    with closing(ProcessLinks(config, is_traced=False)) as links:
        links.start("prefill-0", "prefill")
        yield links


def test_an_engine_runs_the_packages_of_its_parent_whatever_the_working_directory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m6_multimodal_pd.py").write_text("raise RuntimeError('not this one')")
    started: list[Any] = []
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *command, **how: started.append((command, how)) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        processes.Child(None, DisaggregationConfig(), ".")  # type: ignore[arg-type]
    monkeypatch.undo()
    ((command,), how) = started[0]
    found = "import importlib.util; print(importlib.util.find_spec('m6_multimodal_pd').origin)"
    looked = [*command[: command.index("-m")], "-c", found]
    done = subprocess.run(looked, cwd=tmp_path, env=how["env"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == sys.modules["m6_multimodal_pd"].__file__


@pytest.mark.exhaustive
def test_one_that_was_started_anew_and_does_not_join_is_given_up(seeing_directory: Path) -> None:
    with started_prefill(seeing_directory, start_timeout_s=0.1, max_restarts=1) as links:
        lost: list[Lost] = []
        assert links.coming("prefill")
        assert eventually(lambda: lost.extend(links.lost()) or not links.coming("prefill"), 15.0)
        assert [one.name for one in lost] == ["prefill-0", "prefill-0_1"]
        assert all("did not start within start_timeout_s=0.1" in one.why for one in lost)


def test_one_that_has_no_room_is_started_anew_as_often_as_one_that_died(
    seeing_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first one was started: the path of its model may be relative. The second restart waits a second."""
    folder, late_s = os.getcwd(), 0.0
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late_s))
    with started_prefill(seeing_directory, max_restarts=2) as links:
        monkeypatch.chdir(tmp_path)
        for name, others in (("prefill-0", ["prefill-0_1"]), ("prefill-0_1", ["prefill-0_2"]), ("prefill-0_2", [])):
            links.refuse(name, "it has no room")
            assert list(links.lost()) == [Lost(name, "it has no room", Fault("ConfigError", "it has no room"))]
            assert links.coming("prefill") == bool(others)
            if name == "prefill-0_1":
                assert not links.lost() and not links.children
                late_s += 1.0
                assert not links.lost()
            assert list(links.children) == others
            assert all(os.readlink(f"/proc/{each.process.pid}/cwd") == folder for each in links.children.values())


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of restarts, in hours."""
    now = [0.0]
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now[0] * RESTART_WINDOW_S))
    return now


def test_an_engine_may_die_now_and_then_for_months_and_not_too_often_within_an_hour(hours: list[float]) -> None:
    limit, restarts = RestartLimit(2), []
    for hours[0] in (0.0, 0.6, 1.0, 1.6, 9.0, 9.9):
        restarts.append(limit.next("prefill-0"))
    assert [restart[0] for restart in restarts if restart] == [1, 2, 3, 4, 5, 6], "every name is a new one"
    hours[0] = 9.999
    assert limit.next("prefill-0") is None
    assert limit.next("decode-0") == (1, 0.0), "each has its own"
    assert RestartLimit(0).next("prefill-0") is None


def test_each_restart_of_an_hour_waits_longer_than_the_one_before(hours: list[float]) -> None:
    limit = RestartLimit(20)
    delays = [restart[1] for _ in range(10) if (restart := limit.next("both-0"))]
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_parts_of_one_s_own_stay_in_this_process(seeing_directory: Path) -> None:
    class Own(PARTS["stop_checker"]):  # type: ignore[misc]
        pass

    with pytest.raises(ConfigError, match=r"stop_checker.*in_process"):
        LLMEngine(
            **configs(seeing_directory), parts={"stop_checker": Own}, disaggregation_config=DisaggregationConfig()
        )


# --- a parent that ends -----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_ends_when_its_standard_input_does_though_its_router_is_there(group: Any, role: str) -> None:
    """It has nothing to do and sleeps in its socket, which is as it was."""
    check_is_whole(group)
    (child,) = [child for child in links_of(group).children.values() if child.order.role == role]
    child.process.stdin.close()
    assert child.process.wait(LIMIT_S) == 0, "in good order, and not by force"
    check_is_whole(group)


def test_an_engine_that_does_not_end_without_its_parent_ends_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread watches while a step, or what builds the engine, takes for ever."""

    class Ended(BaseException):
        """Instead of the process."""

    def end(status: int) -> None:
        raise Ended(status)

    ours, theirs = os.pipe()
    os.write(theirs, b"more than the order")
    os.close(theirs)
    removed: list[str] = []
    monkeypatch.setattr(child_module, "STDIN", ours)
    monkeypatch.setattr(child_module, "PATIENCE_S", 0.0)
    monkeypatch.setattr(child_module, "remove_leftovers", removed.append)
    monkeypatch.setattr(os, "_exit", end)
    process = object.__new__(child_module.Process)
    process.order, process.is_stopping = SimpleNamespace(owner="own"), False  # type: ignore[assignment]
    try:
        with pytest.raises(Ended, match="1"):
            process.end_with_parent()
    finally:
        os.close(ours)
    assert process.is_stopping and removed == ["own"]


class Program:
    """`user_program.py`, with its engines at work, or idle, once it is `ready`."""

    def __init__(self, model: Path, work: str) -> None:
        command = [sys.executable, "-m", "tests.m6_multimodal_pd.user_program", str(model), work]
        self.pids: list[int] = []
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
        )

    def ready(self) -> "Program":
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.pids = said["pids"]
        self.group: str = said["group"]
        return self

    def is_gone(self) -> bool:
        """No engine of it runs, and nothing of it is left in memory."""
        return not any(map(is_alive, self.pids)) and not segments(self.group)

    def end(self) -> None:
        self.process.kill()
        for pid in filter(is_alive, self.pids):  # a test has failed
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def programs(seeing_directory: Path) -> Iterator[list[Program]]:
    """Two, which start side by side: most of the time goes into imports."""
    started = [Program(seeing_directory, work) for work in ("busy", "idle")]
    try:
        yield [program.ready() for program in started]
    finally:
        for program in started:
            program.end()


@pytest.mark.exhaustive
def test_ctrl_c_ends_the_program_as_ever_and_no_engine_outlives_it(programs: list[Program]) -> None:
    program = programs[0]
    for pid in program.pids:
        os.kill(pid, signal.SIGINT)  # a terminal's reaches them where they share its group
    os.killpg(program.process.pid, signal.SIGINT)
    _, said = program.process.communicate(timeout=LIMIT_S)
    assert program.process.returncode == -signal.SIGINT
    assert said.count("Traceback") == 1 and said.rstrip().endswith("KeyboardInterrupt"), said
    assert program.is_gone(), "when the program has ended, they have"


@pytest.mark.exhaustive
def test_engines_end_with_a_program_that_was_killed(programs: list[Program]) -> None:
    """Also if they have nothing to say, and so would not miss it."""
    program = programs[1]
    assert all(map(is_alive, program.pids))
    program.process.kill()
    assert eventually(program.is_gone, 15.0)
