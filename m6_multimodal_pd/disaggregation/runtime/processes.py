"""Processes of engines on this host: started, watched and ended by the router, without leftovers.

Each engine reads its order from its standard input, and has an owner's name for its shared memory, by which the
leftovers of a dead engine are found and removed. An engine that dies is started again, under a new name: at once, and
the next times after 1, 2, 4 ... 60 seconds, unless that was done too often within an hour. It joins when it is ready,
and gets new requests. New in this milestone. vLLM: `CoreEngineProcManager`; SGLang: `launch_subprocesses` in
`entrypoints/engine.py`.
"""

import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from m1_single_request.errors import ConfigError
from m1_single_request.held_interrupt import HeldInterrupt
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig, Role, on_own_device
from m6_multimodal_pd.disaggregation.runtime.config_json import to_json
from m6_multimodal_pd.disaggregation.runtime.credentials import GroupKeys
from m6_multimodal_pd.disaggregation.runtime.jobs import fault_of
from m6_multimodal_pd.disaggregation.runtime.links import Lost
from m6_multimodal_pd.disaggregation.runtime.messages import Failed, Fault, Joined, Order, ToRouter
from m6_multimodal_pd.disaggregation.runtime.shared_memory import remove_leftovers
from m6_multimodal_pd.disaggregation.runtime.socket_links import SocketLinks
from m6_multimodal_pd.disaggregation.runtime.sockets import LOOPBACK
from m6_multimodal_pd.dropped import when_dropped
from m6_multimodal_pd.errors import EngineLostError

PACKAGES = str(Path(__file__).resolve().parents[3])
"""The folder of the milestones' packages."""
END_TIMEOUT_S = 10.0
"""Seconds that an engine may take to end before it is killed, and the system to end a killed one."""
GRACE_S = 1.0
"""Seconds that an engine may take to end after it was given up."""
REAP_TIMEOUT_S = 1.0
"""Seconds that the system may take to end all processes that were killed because the group was dropped."""
RESTART_WINDOW_S = 3600.0
"""`max_restarts` counts within this time."""
LONGEST_DELAY_S = 60.0
"""Longest delay of a restart."""


class Child:
    """The process of one engine."""

    def __init__(self, order: Order, group: DisaggregationConfig, folder: str) -> None:
        """Start the process in a folder, for the relative paths of its configuration."""
        self.order, self.group = order, group
        self.deadline = time.monotonic() + group.start_timeout_s
        self.joined = False
        self.given_up: Lost | None = None
        self.kill_at = math.inf
        self.stopped_at = math.inf
        """When its process was first found to be stopped while it started, in monotonic seconds."""
        # `-P`: it runs the packages of its parent, and nothing that happens to be in the working directory
        command = [sys.executable, "-P", "-m", "m6_multimodal_pd.disaggregation.runtime.child"]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [PACKAGES, os.environ.get("PYTHONPATH")]))}
        # a process group of its own: a Ctrl-C in the terminal is the parent's alone, from the first moment on
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env, cwd=folder, process_group=0
        )
        assert self.process.stdin is not None
        self.stdin = self.process.stdin
        with suppress(BrokenPipeError):  # it has ended already, which `ended` finds like any other end
            self.stdin.write(msgspec.json.encode(order) + b"\n")
            self.stdin.flush()

    def ended(self) -> Lost | None:
        """Return the reason for which the process has ended; None while it runs. Kills it if its grace is over."""
        if time.monotonic() >= self.kill_at:
            self.end(0.0)
        status = self.process.poll()
        return None if status is None else self.given_up or Lost(self.order.name, reason_of(status))

    def drop(self, why: str, fault: Fault | None = None) -> None:
        """Give the process up: it is killed after GRACE_S, or with the next look at it if there is a `fault`."""
        if self.given_up is None or fault is not None:
            self.given_up = Lost(self.order.name, why, fault)
            self.kill_at = time.monotonic() + (GRACE_S if fault is None else 0.0)
            self._let_go()

    def drop_if_late(self) -> None:
        """Drop an engine that has not joined in time, or whose process is stopped (SIGSTOP) before it has a connection
        with heartbeats."""
        now, limit_s = time.monotonic(), self.group.heartbeat_timeout_s
        self.stopped_at = min(self.stopped_at, now) if is_stopped(self.process.pid) else math.inf
        if now > self.deadline:
            self.drop(f"it did not start within start_timeout_s={self.group.start_timeout_s:g}")
        if now > self.stopped_at + limit_s:
            self.drop(f"its process was stopped for {limit_s:g} s while it started")

    def _let_go(self) -> None:
        """Close the standard input: the process ends by itself then, if it can. A stopped process goes on for that."""
        self.process.send_signal(signal.SIGCONT)
        with suppress(OSError):
            self.stdin.close()

    def end(self, timeout_s: float, kill_timeout_s: float = END_TIMEOUT_S) -> None:
        """Wait until the process has ended, kill it after `timeout_s`, and remove its leftovers."""
        self._let_go()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(kill_timeout_s)
        remove_leftovers(self.order.owner)


class ProcessLinks(SocketLinks):
    """The `Links` to engines that this process starts: a child process for each, watched from start to end."""

    def __init__(self, config: Any, *, is_traced: bool) -> None:
        """`config`: of each engine, and of the group."""
        keys = GroupKeys.generate()
        super().__init__(LOOPBACK, keys.router, config.disaggregation)
        self.config, self.is_traced = config, is_traced
        self.restarts = RestartLimit(config.disaggregation.max_restarts)
        self._group, self._folder = secrets.token_hex(6), os.getcwd()
        self._engine_keys = keys.engines
        self.children: dict[str, Child] = {}
        self.due: dict[str, tuple[Role, float]] = {}
        """Engines to be started again: role, and the time in monotonic seconds."""
        when_dropped(self, _kill, self.children, self.restarts)

    def start(self, name: str, role: Role) -> None:
        """Start an engine; it joins when it is ready. Raises `EngineLostError` if there can be no other process, and
        `ConfigError` if this machine lacks the engine's device."""
        order = Order(
            name=name,
            role=role,
            address=self.socket.address,
            keys=self._engine_keys,
            owner=f"{self._group}x{secrets.token_hex(6)}",
            is_traced=self.is_traced,
            num_threads=torch.get_num_threads(),
            config=to_json(on_own_device(self.config, name)),
        )
        try:
            with HeldInterrupt():  # a process that has started is in `children`, so that it is ended
                self.children[name] = Child(order, self.config.disaggregation, self._folder)
        except OSError as error:
            raise EngineLostError(f"a process cannot be started: {error}") from error

    def coming(self, role: str) -> bool:
        """Return whether a process of this role runs; one that dies is started anew."""
        return role in [due for due, _ in self.due.values()] + [child.order.role for child in self.children.values()]

    def receive(self, timeout_s: float) -> list[tuple[str, ToRouter]]:
        """Return messages; drop an engine that cannot be built, with its error."""
        received = super().receive(timeout_s)
        for name, message in received:
            child = self.children.get(name)
            if child is not None and isinstance(message, Joined):
                child.joined = True
            elif child is not None and isinstance(message, Failed):
                child.drop(message.fault.text, message.fault)
        return received

    def lost(self) -> list[Lost]:
        """Return the engines whose process has ended; drop those that cannot be reached. Each is started anew, also one
        that had no memory: there may be some later."""
        found = []
        for name, child in list(self.children.items()):
            if not child.joined:
                child.drop_if_late()
            if (lost := child.ended()) is not None:
                found.append(lost)
                self._replace(name, child)
        for unreachable in super().lost():
            self.drop(unreachable.name, unreachable.why)
        for name, (role, at) in list(self.due.items()):
            if time.monotonic() >= at and self.restarts.at_most:  # 0 once the group was dropped
                del self.due[name]
                with suppress(EngineLostError):  # no room for another process: there is one engine less
                    self.start(name, role)
        return found

    def drop(self, name: str, why: str) -> None:
        if name in self.children:
            self.children[name].drop(why)

    def refuse(self, name: str, why: str) -> None:
        """End an engine that does not fit; `lost` returns it with the reason."""
        if name in self.children:
            self.children[name].drop(why, fault_of(ConfigError(why)))

    def _replace(self, name: str, child: Child) -> None:
        """Remove the leftovers of an ended process; let another one start in its place, unless that was done too
        often."""
        child.end(0.0)
        self.socket.forget(name)
        del self.children[name]
        first = name.partition("_")[0]
        if (again := self.restarts.next(first)) is not None:
            number, delay_s = again
            self.due[f"{first}_{number}"] = child.order.role, time.monotonic() + delay_s

    def close(self) -> None:
        """Ask all engines to end, and wait; kill those that do not. May be called twice."""
        super().close()
        deadline = time.monotonic() + END_TIMEOUT_S
        for name, child in list(self.children.items()):
            # an engine that has not joined, or was given up, has no work to end
            may_end = child.joined and child.given_up is None
            child.end(max(deadline - time.monotonic(), 0.1) if may_end else 0.0)
            del self.children[name]


def reason_of(status: int) -> str:
    """Return the end of a process in words, from its exit status as `subprocess` has it."""
    if status == -signal.SIGALRM:
        return "a step did not end, and its watchdog ended the process"
    return f"its process was killed by signal {-status}" if status < 0 else f"its process ended, status {status}"


def is_stopped(pid: int) -> bool:
    """Return whether a child process is stopped by a signal. False on a system that does not report it (macOS)."""
    with suppress(ChildProcessError, AttributeError):  # it has ended; the system has no waitid
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _kill(children: dict[str, Child], restarts: "RestartLimit") -> None:
    """Kill the engines of a dropped group."""
    restarts.at_most = 0  # at interpreter exit a daemon thread may go on with the group
    for child in list(children.values()):
        child.process.kill()
    deadline = time.monotonic() + REAP_TIMEOUT_S
    for child in list(children.values()):
        child.end(max(deadline - time.monotonic(), 0.0), kill_timeout_s=0.0)


class RestartLimit:
    """Limit for the restarts of each engine within RESTART_WINDOW_S, and the delay of each: none for the first, then 1,
    2, 4 ... seconds. systemd: `StartLimitBurst` within `StartLimitIntervalSec`; `RestartSteps`."""

    def __init__(self, at_most: int) -> None:
        self.at_most = at_most
        self._times: dict[str, list[float]] = defaultdict(list)  # of all restarts of an engine, in monotonic seconds

    def next(self, name: str) -> tuple[int, float] | None:
        """Return the number of this restart, counted from the first ever, and its delay in seconds; None if there were
        too many of late."""
        now, times = time.monotonic(), self._times[name]
        of_late = sum(now - each < RESTART_WINDOW_S for each in times)
        if of_late >= self.at_most:
            return None
        times.append(now)
        return len(times), min(2.0 ** (of_late - 1), LONGEST_DELAY_S) if of_late else 0.0
