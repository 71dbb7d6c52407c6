"""Engines as processes of this host: started, watched, ended, without leftovers.

Each engine gets its order on its standard input and an owner's name for everything that it makes; so leftovers of a
dead engine are found and removed. An engine that dies is started anew, under a new name, unless that was done too often
of late; it joins when it is ready, and gets new requests. New in this milestone. vLLM: `CoreEngineProcManager`; SGLang:
`launch_subprocesses` in `entrypoints/engine.py`.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import torch

from m1_single_request.errors import ConfigError
from m1_single_request.held_interrupt import HeldInterrupt
from m6_multimodal_pd.disaggregation.runtime.config_json import to_json
from m6_multimodal_pd.disaggregation.runtime.credentials import GroupKeys
from m6_multimodal_pd.disaggregation.runtime.dropped import when_dropped
from m6_multimodal_pd.disaggregation.runtime.inbox import handed_out
from m6_multimodal_pd.disaggregation.runtime.jobs import fault_of
from m6_multimodal_pd.disaggregation.runtime.links import Lost
from m6_multimodal_pd.disaggregation.runtime.messages import Failed, Fault, Joined, Order, Role, ToRouter
from m6_multimodal_pd.disaggregation.runtime.shared_memory import remove_leftovers
from m6_multimodal_pd.disaggregation.runtime.socket_links import SocketLinks
from m6_multimodal_pd.disaggregation.runtime.sockets import LOOPBACK
from m6_multimodal_pd.disaggregation.runtime.watchdog import STUCK
from m6_multimodal_pd.errors import EngineLostError

END_TIMEOUT_S = 10.0
"""Seconds that an engine may take to end before it is killed, and the system to end a killed one."""
GRACE_S = 1.0
"""Seconds that an engine may take to end after it was given up."""
REAP_TIMEOUT_S = 1.0
"""Seconds that the system may take to end all processes that were killed because the group was dropped."""
RESTART_WINDOW_S = 3600.0
"""`max_restarts` counts within this time."""


class Child:
    """One engine's process."""

    def __init__(self, order: Order, deadline: float) -> None:
        """`deadline`: when it must have joined, in monotonic seconds."""
        self.order, self.deadline = order, deadline
        self.joined = False
        self.fault: Fault | None = None
        """Why it cannot be built, or does not fit."""
        self.dropped: str | None = None
        """Why it was given up."""
        self.kill_at = 0.0
        self.stopped_at: float | None = None
        """When its process was first found to be stopped while it started, in monotonic seconds."""
        command = [sys.executable, "-m", "m6_multimodal_pd.disaggregation.runtime.child"]
        # a process group of its own: a Ctrl-C in the terminal is the parent's alone, from the first moment on
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which is noticed like any other end
            self.process.stdin.write(msgspec.json.encode(order) + b"\n")
            self.process.stdin.flush()

    def ended(self) -> str | None:
        """Return how the process has ended; None while it runs. Kills it if it is not to run any more."""
        if self.fault is not None or (self.dropped is not None and time.monotonic() > self.kill_at):
            self.end(0.0)
        status = self.process.poll()
        if status is None:
            return None
        if self.dropped is not None:
            return self.dropped
        if self.fault is not None:
            return self.fault.text
        if status == STUCK:
            return "a step did not end, and it gave itself up"
        return f"its process was killed by signal {-status}" if status < 0 else f"its process ended, status {status}"

    def drop(self, why: str) -> None:
        """Give the process up. It may be about to end; if it is not, it is killed."""
        if self.dropped is None:
            self.dropped, self.kill_at = why, time.monotonic() + GRACE_S
            self._let_go()

    def _let_go(self) -> None:
        """Close its standard input: then it ends by itself, if it can. A stopped process goes on for that."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        with suppress(OSError):
            self.process.stdin.close()

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
    """The `Links` to engines that this process has started."""

    def __init__(self, config: Any, *, is_traced: bool) -> None:
        """`config`: of each engine, and of the group."""
        keys = GroupKeys.generate()
        super().__init__(LOOPBACK, keys.router, config.disaggregation)
        self.config, self.is_traced = config, is_traced
        self.restarts = RestartLimit(config.disaggregation.max_restarts)
        self._group = secrets.token_hex(6)
        self._engine_keys = keys.engines
        self._num_started = 0
        self.children: dict[str, Child] = {}
        when_dropped(self, _kill, self.children, self.restarts)

    def start(self, name: str, role: Role) -> None:
        """Start an engine; it joins when it is ready. Raises `EngineLostError` if there can be no other process."""
        self._num_started += 1
        order = Order(
            name=name,
            role=role,
            address=self.socket.address,
            keys=self._engine_keys,
            owner=f"{self._group}x{self._num_started}",
            is_traced=self.is_traced,
            num_threads=torch.get_num_threads(),
            config=to_json(self.config),
        )
        deadline = time.monotonic() + self.config.disaggregation.start_timeout_s
        try:
            with HeldInterrupt():  # a process that has started is in `children`, so that it is ended
                self.children[name] = Child(order, deadline)
        except OSError as error:
            raise EngineLostError(f"a process cannot be started: {error}") from error

    def coming(self, role: str) -> bool:
        return any(child.order.role == role for child in self.children.values())

    def receive(self, timeout_s: float) -> Iterator[tuple[str, ToRouter]]:
        """Yield messages; the error of an engine that cannot be built is kept for `lost`."""
        for name, message in self.socket.receive(timeout_s):
            if isinstance(message, Joined) and name in self.children:
                self.children[name].joined = True
            if not isinstance(message, Failed):
                yield name, message
            elif name in self.children:
                self.children[name].fault = message.fault

    def lost(self) -> Iterator[Lost]:
        """Yield engines whose process has ended or whose connection is closed. Each process is started anew, also one
        that had no room: there may be some later."""
        for name, child in list(self.children.items()):
            if not child.joined:
                self._drop_if_late(child, time.monotonic())
            why = child.ended()
            if why is None:
                continue
            child.end(0.0)
            self.socket.forget(name)
            self._lost.append(Lost(name, why, child.fault))
            del self.children[name]
            self._start_anew(name, child.order.role)
        self._probe([name for name, child in self.children.items() if child.joined and child.dropped is None])
        return handed_out(self._lost)

    def drop(self, name: str, why: str) -> None:
        if name in self.children:
            self.children[name].drop(why)

    def refuse(self, name: str, why: str) -> None:
        if name in self.children:
            self.children[name].fault = fault_of(ConfigError(why))

    def _drop_if_late(self, child: Child, now: float) -> None:
        """Drop an engine that has not joined in time, or whose process is stopped (SIGSTOP): it has no connection yet
        that could be silent."""
        group = self.config.disaggregation
        if now > child.deadline:
            child.drop(f"it did not start within start_timeout_s={group.start_timeout_s:g}")
        if not is_stopped(child.process.pid):
            child.stopped_at = None
        elif child.stopped_at is None:
            child.stopped_at = now
        elif now > child.stopped_at + group.heartbeat_timeout_s:
            child.drop(f"its process was stopped for {group.heartbeat_timeout_s:g} s while it started")

    def _start_anew(self, name: str, role: Role) -> None:
        first = name.partition("_")[0]
        again = self.restarts.next(first)
        if again is not None:
            with suppress(EngineLostError):  # the machine has no room for another process: there is one engine less
                self.start(f"{first}_{again}", role)

    def close(self) -> None:
        """Ask all engines to end, and wait; kill those that do not."""
        self.shut_down()
        deadline = time.monotonic() + END_TIMEOUT_S
        for name, child in list(self.children.items()):
            # one that has not joined, or was given up, has nothing to bring to an end
            may_end = child.joined and child.dropped is None
            child.end(max(deadline - time.monotonic(), 0.1) if may_end else 0.0)
            del self.children[name]
        self.socket.close()


def is_stopped(pid: int) -> bool:
    """Return whether a child process is stopped by a signal. False on a system that does not report it (macOS)."""
    if not hasattr(os, "waitid"):
        return False
    with suppress(ChildProcessError):  # it has ended
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _kill(children: dict[str, Child], restarts: "RestartLimit") -> None:
    """End the engines of a dropped group, whatever they do."""
    restarts.at_most = 0  # at interpreter exit a daemon thread may go on with the group
    for child in list(children.values()):
        child.process.kill()
    deadline = time.monotonic() + REAP_TIMEOUT_S
    for child in list(children.values()):
        child.end(max(deadline - time.monotonic(), 0.0), kill_timeout_s=0.0)


class RestartLimit:
    """How often each engine may be started anew within RESTART_WINDOW_S. systemd: `StartLimitBurst` within
    `StartLimitIntervalSec`."""

    def __init__(self, at_most: int) -> None:
        self.at_most = at_most
        self._num_ever: Counter[str] = Counter()
        self._times: dict[str, deque[float]] = defaultdict(deque)  # within the window, oldest first

    def next(self, name: str) -> int | None:
        """Return the number of this restart, counted from the first ever; None if there were too many of late."""
        now, times = time.monotonic(), self._times[name]
        while times and now - times[0] >= RESTART_WINDOW_S:
            times.popleft()
        if len(times) >= self.at_most:
            return None
        times.append(now)
        self._num_ever[name] += 1
        return self._num_ever[name]
