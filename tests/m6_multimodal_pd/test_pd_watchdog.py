"""A step that takes too long ends its process, with all stacks written; a step that ends in time does not."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from m6_multimodal_pd.disaggregation.runtime import watchdog
from m6_multimodal_pd.disaggregation.runtime.processes import reason_of

PATIENCE_S = 60.0
"""A process that is waited for ends within seconds on any machine, or never."""
PROGRAM = """
import runpy
import sys
import threading
import time

Watchdog = runpy.run_path(sys.argv[1])["Watchdog"]  # the module alone: its package takes seconds to load

def hangs_in_a_kernel():
    time.sleep(1000)

def hangs_with_the_lock():
    10 ** (10**9)

def has_steps():
    for _ in range(15):
        with watchdog:
            time.sleep(0.05)
    try:
        with watchdog:
            raise ValueError
    except ValueError:
        time.sleep(0.7)

def has_one_step():
    with watchdog:
        pass

watchdog = Watchdog(float(sys.argv[3]))
threading.Thread(target=time.sleep, args=[9.0], name="another", daemon=True).start()
if sys.argv[2].startswith("hangs"):
    with watchdog:
        vars()[sys.argv[2]]()
vars()[sys.argv[2]]()
print("done")
"""


def run(what: str, limit_s: float = 0.2, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program whose steps may take `limit_s`."""
    command = [sys.executable, "-c", PROGRAM, watchdog.__file__, what, str(limit_s)]
    return subprocess.run(command, text=True, timeout=PATIENCE_S, check=False, **options)


@pytest.mark.parametrize("what", ["hangs_in_a_kernel", "hangs_with_the_lock"])
def test_a_process_that_hangs_in_a_step_writes_all_stacks_and_ends(what: str) -> None:
    """In C code that holds the interpreter's lock, too: no Python thread runs then."""
    ended = run(what, capture_output=True)
    assert ended.returncode == -signal.SIGALRM and ended.stdout == ""
    assert f"in {what}" in ended.stderr and ended.stderr.count("most recent call first") == 2, "of all threads"
    assert reason_of(ended.returncode) == "a step did not end, and its watchdog ended the process"


def test_only_a_single_step_is_limited() -> None:
    """All steps together may take longer, and so may the time behind them, also where the last one has failed."""
    ended = run("has_steps", limit_s=0.5, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("limit_s", [1e9, 1e300])
def test_the_limit_may_be_as_long_as_one_likes(limit_s: float) -> None:
    assert run("has_one_step", limit_s, capture_output=True).stdout == "done\n"


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """A pipe that takes no byte more, and that no process reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for size in (65536, 1):
        try:
            while True:
                os.write(writer, bytes(size))
        except BlockingIOError:
            pass
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


@pytest.mark.exhaustive
def test_a_process_without_a_place_for_the_stacks_ends_all_the_same(full_pipe: int) -> None:
    """The process that read its errors may be gone, or be stopped."""
    for stderr in (full_pipe, broken := broken_pipe()):
        assert run("hangs_in_a_kernel", stderr=stderr).returncode == -signal.SIGALRM
    os.close(broken)
    closed = run("hangs_in_a_kernel", preexec_fn=lambda: os.close(2))
    assert closed.returncode == -signal.SIGALRM


@pytest.mark.parametrize(
    "inherited",
    [
        lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]),
    ],
    ids=["ignores", "blocks"],
)
def test_a_process_whose_parent_has_no_use_for_the_alarm_ends_all_the_same(inherited: Callable[[], object]) -> None:
    ended = run("hangs_in_a_kernel", capture_output=True, preexec_fn=inherited)
    assert ended.returncode == -signal.SIGALRM and "in hangs_in_a_kernel" in ended.stderr


def broken_pipe() -> int:
    """The end of a pipe whose other end is closed."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_every_other_end_has_another_reason() -> None:
    assert reason_of(-9) == "its process was killed by signal 9"
    assert [reason_of(status) for status in (0, 1)] == [f"its process ended, status {status}" for status in (0, 1)]
