"""A step that does not end is noticed and told, and one that ends is not; an engine then gives itself up."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from m6_multimodal_pd.disaggregation.runtime import watchdog
from m6_multimodal_pd.disaggregation.runtime.watchdog import STUCK, Watchdog

PATIENCE_S = 20.0
"""So long a test waits for what must come; on any machine it comes sooner."""


class Stuck:
    """Notes how often a watchdog has fired."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.was_called = threading.Event()

    def __call__(self) -> None:
        self.times.append(time.monotonic())
        self.was_called.set()


@pytest.fixture
def stuck() -> Stuck:
    return Stuck()


@pytest.fixture
def watchdogs() -> Iterator[list[Watchdog]]:
    """Those of a test; none of them outlives it."""
    made: list[Watchdog] = []
    yield made
    for own in made:
        own.close()
        assert not own._thread.is_alive()


def hangs_here(released: threading.Event) -> None:
    """What the stacks must name."""
    assert released.wait(PATIENCE_S)


def test_a_step_that_does_not_end_is_told_once_with_all_stacks(
    watchdogs: list[Watchdog], stuck: Stuck, capfd: pytest.CaptureFixture[str]
) -> None:
    watchdogs.append(Watchdog(0.05, stuck))
    began = time.monotonic()
    watchdogs[0].begin()
    hangs_here(stuck.was_called)
    assert stuck.times[0] - began >= 0.05
    told = capfd.readouterr().err
    assert "a step did not end within 0.05 s; all stacks:" in told
    assert "in hangs_here" in told and "in _watch" in told, "of all threads"
    watchdogs[0]._thread.join(PATIENCE_S)
    assert len(stuck.times) == 1 and not watchdogs[0]._thread.is_alive()


def test_the_stacks_are_written_before_anybody_is_told(
    watchdogs: list[Watchdog], stuck: Stuck, capfd: pytest.CaptureFixture[str]
) -> None:
    """For `on_stuck` may end the process at once."""
    told: list[str] = []

    def look() -> None:
        told.append(capfd.readouterr().err)
        stuck()

    watchdogs.append(Watchdog(0.05, look))
    watchdogs[0].begin()
    hangs_here(stuck.was_called)
    assert "in hangs_here" in told[0]


def test_steps_that_end_are_not_told(watchdogs: list[Watchdog], stuck: Stuck, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they take much longer than one may."""
    clock = Clock(monkeypatch)
    watchdogs.append(Watchdog(0.02, stuck))
    for _ in range(20):
        watchdogs[0].begin()
        clock.now += 0.019
        clock.wait_for_looks(1)
        watchdogs[0].end()
        clock.now += 0.019
    assert clock.num_looks >= 20 and not stuck.times


def test_between_two_steps_there_is_all_the_time(
    watchdogs: list[Watchdog], stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdogs.append(Watchdog(0.02, stuck))
    clock = Clock(monkeypatch)
    watchdogs[0].begin()
    watchdogs[0].end()
    clock.now += 1000
    clock.wait_for_looks(3, watchdogs[0])
    assert not stuck.times
    watchdogs[0].begin()
    clock.now += 1
    assert stuck.was_called.wait(PATIENCE_S), "the next one is watched"


def test_a_step_may_take_as_long_as_it_is_given(
    watchdogs: list[Watchdog], stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    watchdogs.append(Watchdog(0.02, stuck))
    watchdogs[0].begin()
    clock.now += 0.02
    clock.wait_for_looks(2)
    assert not stuck.times
    clock.now += 0.001
    assert stuck.was_called.wait(PATIENCE_S)


def test_a_process_without_a_place_for_the_stacks_gives_itself_up_all_the_same(
    watchdogs: list[Watchdog], stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever read its errors may be gone."""

    class Broken:
        def write(self, text: str) -> int:
            raise BrokenPipeError("nobody reads this")

        def flush(self) -> None:
            raise BrokenPipeError("nobody reads this")

        def fileno(self) -> int:
            raise OSError("no file")

    for stream in (Broken(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        watchdogs.append(Watchdog(0.02, stuck))
        watchdogs[-1].begin()
        assert stuck.was_called.wait(PATIENCE_S)
        stuck.was_called.clear()


def test_close_ends_the_thread_at_once(stuck: Stuck) -> None:
    own = Watchdog(1000.0, stuck)
    assert own._thread.is_alive() and own._thread.daemon
    own.begin()
    began = time.monotonic()
    own.close()
    assert not own._thread.is_alive() and time.monotonic() - began < PATIENCE_S
    own.close()
    assert not stuck.times


PROGRAM = """
import runpy
import sys
import time

Watchdog = runpy.run_path(sys.argv[2])["Watchdog"]  # the module alone: its package takes seconds to load

def hangs_in_a_kernel():
    time.sleep(1000)

watchdog = Watchdog(0.1)
if sys.argv[1] == "hangs":
    watchdog.begin()
    hangs_in_a_kernel()
watchdog.begin()
watchdog.end()
watchdog.close()
print("done")
"""


@pytest.mark.parametrize(("how", "status"), [("hangs", STUCK), ("ends", 0)])
def test_a_process_that_hangs_ends_with_a_status_of_its_own(how: str, status: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, watchdog.__file__], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == status
    assert ("in hangs_in_a_kernel" in ended.stderr) == (how == "hangs")
    assert (ended.stdout == "done\n") == (how == "ends")


def test_the_status_is_told_from_all_others() -> None:
    assert STUCK == 70, "the status that sysexits.h has for an error of the program itself"


class Clock:
    """The watchdog's time, which passes only when a test says so; and how often the watchdog has looked at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.num_looks = 0
        self._looked = threading.Condition()
        monkeypatch.setattr("m6_multimodal_pd.disaggregation.runtime.watchdog.time", self)

    def monotonic(self) -> float:
        if threading.current_thread().name == "watchdog":
            with self._looked:
                self.num_looks += 1
                self._looked.notify_all()
        return self.now

    def wait_for_looks(self, count: int, idle: Any = None) -> None:
        """Let the watchdog look so often; with `idle`, so long that it must have: it looks at no clock then."""
        if idle is not None:
            for _ in range(count):
                assert not idle._stopped.wait(idle.step_timeout_s / 2)
            return
        with self._looked:
            due = self.num_looks + count
            assert self._looked.wait_for(lambda: self.num_looks >= due, PATIENCE_S)
