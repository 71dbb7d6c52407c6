"""A rank that dies or is stopped ends the job: a typed error on every survivor, and no process is left."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from m8_parallel.watch import BEAT_S, LOST_BEATS
from tests.m8_parallel.groups import TORCHRUN, Group
from tests.m8_parallel.test_engine import Models

ERROR_S, END_S = 20.0, 60.0


def until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Wait for a condition. Fails after `limit_s`."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what} within {limit_s:g} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs, or is stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def lose(
    group: Group,
    model: str,
    rank: int,
    number: int,
    after_s: float,
    *,
    idle: bool = False,
    times: dict[str, float] | None = None,
) -> dict[int, str]:
    """Send a signal to a rank, busy or idle; return the errors of the survivors. `times` gets the seconds until the
    last of them, and until the job has ended."""
    folder, times = group.folder, {} if times is None else times
    group.begin({"case": "busy", "model": model, "folder": str(folder), "idle": idle})
    pids: dict[int, int] = {}
    try:
        until(lambda: (folder / "ready").exists() or group.process.poll() is not None, END_S, group.said())
        assert group.process.poll() is None, group.said()
        pids = {each: int((folder / f"pid-{each}").read_text("utf-8")) for each in range(group.size)}
        time.sleep(after_s)
        os.kill(pids[rank], number)
        began = time.monotonic()
        survivors = [each for each in pids if each != rank]
        until(lambda: all((folder / f"lost-{each}").exists() for each in survivors), ERROR_S, group.said())
        times["error"] = time.monotonic() - began
        with suppress(subprocess.TimeoutExpired):
            group.process.wait(END_S)
        assert group.process.poll() not in (None, 0)
        times["end"] = time.monotonic() - began
        until(lambda: not any(map(is_alive, pids.values())), 5, "processes are left")
        return {each: (folder / f"lost-{each}").read_text("utf-8") for each in survivors}
    finally:
        for pid in pids.values():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def check_lost(size: int, models: Models, tmp_path: Path, rank: int, number: int, after_s: float, idle: bool) -> None:
    group = Group(size, tmp_path / "group")
    try:
        errors = lose(group, models("qwen3"), rank, number, after_s, idle=idle).values()
        assert all(error.startswith("RankLostError: ") for error in errors), errors
        if number == signal.SIGSTOP:  # the first that notices ends the stopped one, which the others notice
            assert any(f"rank {rank} gives no sign" in each or "has ended" in each for each in errors), errors
    finally:
        group.close()


def test_a_rank_that_is_killed_ends_the_job_with_an_error_on_the_others(models: Models, tmp_path: Path) -> None:
    check_lost(2, models, tmp_path, 1, signal.SIGKILL, 0.3, False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "rank", "how", "idle"),
    [
        (2, 0, "SIGKILL", False),
        (2, 0, "SIGSTOP", True),
        (2, 1, "SIGSTOP", False),
        (2, 1, "SIGKILL", True),
        (4, 2, "SIGSTOP", False),
        (4, 2, "SIGKILL", True),
    ],
)
def test_so_it_is_for_every_rank_killed_or_stopped(
    models: Models, tmp_path: Path, size: int, rank: int, how: str, idle: bool
) -> None:
    """All combinations at random: `python -m tests.kills.ranks`."""
    check_lost(size, models, tmp_path, rank, signal.Signals[how], Random(size + rank).uniform(0, 1.5), idle)


@pytest.mark.exhaustive
def test_a_job_whose_ranks_were_all_stopped_for_a_while_goes_on(models: Models, tmp_path: Path) -> None:
    group, pids = Group(2, tmp_path / "group"), list[int]()
    folder = group.folder
    try:
        group.begin({"case": "busy", "model": models("qwen3"), "folder": str(folder), "idle": True})
        until(lambda: (folder / "ready").exists(), END_S, group.said())
        pids = [int((folder / f"pid-{rank}").read_text("utf-8")) for rank in range(2)]
        for number, pause_s in ((signal.SIGSTOP, LOST_BEATS * BEAT_S + 2), (signal.SIGCONT, 3.0)):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(pause_s)
        assert all(map(is_alive, pids)), group.said()
        assert not list(folder.glob("lost-*"))
    finally:
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        group.close()


@pytest.mark.exhaustive
def test_torchrun_starts_a_job_again(models: Models, tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    command = [
        *TORCHRUN,
        "2",
        "--max-restarts",
        "1",
        "-m",
        "tests.m8_parallel.restarting",
        models("qwen3"),
        str(output),
    ]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    found = json.loads(output.read_text("utf-8"))
    assert found["attempt"] == "1" and len(found["tokens"]) == 12
