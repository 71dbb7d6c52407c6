"""Engines as processes of this host: started, watched, ended, and nothing left of them.

Each engine gets its order on its standard input and a name of its own in everything that it makes; so when it has died,
however it died, what it left can be found and removed. An engine that dies is started anew, under a new name, unless
that was done too often of late; it joins when it is ready, and gets new requests. New in this milestone. vLLM:
`CoreEngineProcManager`; SGLang: `launch_subprocesses` in `entrypoints/engine.py`.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import torch

from m1_single_request.errors import ConfigError
from m1_single_request.held_interrupt import HeldInterrupt
from m6_multimodal_pd.disaggregation.runtime.config_json import to_json
from m6_multimodal_pd.disaggregation.runtime.credentials import CurveKeys
from m6_multimodal_pd.disaggregation.runtime.dropped import when_dropped
from m6_multimodal_pd.disaggregation.runtime.inbox import handed_out
from m6_multimodal_pd.disaggregation.runtime.jobs import fault_of
from m6_multimodal_pd.disaggregation.runtime.links import Lost
from m6_multimodal_pd.disaggregation.runtime.messages import (
    Call,
    Failed,
    Fault,
    Joined,
    Order,
    Role,
    ToEngine,
    ToRouter,
)
from m6_multimodal_pd.disaggregation.runtime.shared_memory import remove_leftovers
from m6_multimodal_pd.disaggregation.runtime.sockets import RouterSocket
from m6_multimodal_pd.disaggregation.runtime.watchdog import STUCK
from m6_multimodal_pd.disaggregation.runtime.wire import Codec
from m6_multimodal_pd.errors import EngineLostError, PeerLostError

END_TIMEOUT_S = 10.0
"""So long an engine may take to end before it is killed."""

GRACE_S = 1.0
"""So long one may take that is given up."""
REAP_TIMEOUT_S = 1.0
"""So long the system may take to end all processes that were killed because the group was dropped."""
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
        """When its process was first seen to be stopped while it started, in monotonic seconds."""
        command = [sys.executable, "-m", "m6_multimodal_pd.disaggregation.runtime.child"]
        # a process group of its own: a Ctrl-C in the terminal is the parent's alone, from the first moment on
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which is noticed like any other end
            self.process.stdin.write(msgspec.json.encode(order) + b"\n")
            self.process.stdin.flush()

    def ended(self) -> str | None:
        """How it has ended; None while it runs."""
        status = self.process.poll()
        if status is None and (
            self.fault is not None or (self.dropped is not None and time.monotonic() > self.kill_at)
        ):
            self.process.kill()
            status = self.process.wait()
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
        """Give it up. It may be on its way out; if it is not, it is killed."""
        if self.dropped is None:
            self.dropped, self.kill_at = why, time.monotonic() + GRACE_S
            self._let_go()

    def _let_go(self) -> None:
        """Without a parent it ends by itself, if it can; one that was stopped goes on for that."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        with suppress(OSError):
            self.process.stdin.close()

    def end(self, timeout_s: float) -> None:
        """Let go of it; kill it if it does not go by itself. Nothing of it is left."""
        self._let_go()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        remove_leftovers(self.order.owner)

    def reap(self, timeout_s: float) -> None:
        """Remove what is left of a killed process."""
        self._let_go()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        remove_leftovers(self.order.owner)


class ProcessLinks:
    """The `Links` to engines that this process has started."""

    def __init__(self, config: Any, *, is_traced: bool, on_refused: Any = lambda reason: None) -> None:
        """`config`: of each engine, and of the group."""
        self.config, self.is_traced = config, is_traced
        self.restarts = RestartLimit(config.disaggregation.max_restarts)
        self.start_timeout_s: float = config.disaggregation.start_timeout_s
        self.heartbeat_timeout_s: float = config.disaggregation.heartbeat_timeout_s
        self._group = secrets.token_hex(6)
        self._secret = secrets.token_bytes(32)
        router_keys, self._engine_keys = CurveKeys.generate()
        self.socket: RouterSocket[Any] = RouterSocket(
            codec=Codec(ToRouter, config.disaggregation.max_message_bytes),
            secret=self._secret,
            keys=router_keys,
            on_refused=on_refused,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
        )
        self._router_key = router_keys.public
        self.children: dict[str, Child] = {}
        when_dropped(self, _kill, self.children, self.restarts)
        self._lost: deque[Lost] = deque()
        self._num_started = 0

    def start(self, name: str, role: Role) -> None:
        """Start an engine; it joins when it is ready."""
        self._num_started += 1
        (trusted,) = self._engine_keys.trusted
        order = Order(
            name=name,
            role=role,
            address=self.socket.address,
            secret=self._secret.hex(),
            public_key=self._engine_keys.public,
            secret_key=self._engine_keys.secret,
            trusted_key=trusted,
            owner=f"{self._group}x{self._num_started}",
            is_traced=self.is_traced,
            num_threads=torch.get_num_threads(),
            config=to_json(self.config),
        )
        with HeldInterrupt():  # a process that has started is in `children`, so that it is ended
            self.children[name] = Child(order, deadline=time.monotonic() + self.start_timeout_s)

    def coming(self, role: str) -> bool:
        """Whether an engine of this role runs, or is being started."""
        return any(child.order.role == role for child in self.children.values())

    def send(self, name: str, message: ToEngine) -> None:
        self.socket.send(name, message)

    def receive(self, timeout_s: float) -> Iterator[tuple[str, ToRouter]]:
        """What has come; what an engine that cannot be built says about that is kept for `lost`."""
        for name, message in self.socket.arrivals(timeout_s):
            if isinstance(message, Joined) and name in self.children:
                self.children[name].joined = True
            if not isinstance(message, Failed):
                yield name, message
            elif name in self.children:
                self.children[name].fault = message.fault

    def lost(self) -> Iterator[Lost]:
        """Processes that have ended; each is started anew, also one that had no room: there may be some later."""
        now = time.monotonic()
        for name, child in list(self.children.items()):
            if not child.joined:
                self._drop_if_late(child, now)
            why = child.ended()
            if why is None:
                continue
            child.end(0.0)
            self.socket.forget(name)
            self._lost.append(Lost(name, why, child.fault))
            del self.children[name]
            self._start_anew(name, child.order.role)
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
        if now > child.deadline:
            child.drop(f"it did not start within start_timeout_s={self.start_timeout_s:g}")
        if not is_stopped(child.process.pid):
            child.stopped_at = None
        elif child.stopped_at is None:
            child.stopped_at = now
        elif now > child.stopped_at + self.heartbeat_timeout_s:
            child.drop(f"its process was stopped for {self.heartbeat_timeout_s:g} s while it started")

    def _start_anew(self, name: str, role: Role) -> None:
        first = name.partition("_")[0]
        again = self.restarts.next(first)
        if again is not None:
            with suppress(OSError):  # the machine has no room for another process: there is one engine less
                self.start(f"{first}_{again}", role)

    def close(self) -> None:
        """Tell all to end, and wait; kill those that do not."""
        for name in list(self.children):
            with suppress(PeerLostError):
                self.socket.send(name, Call(0, "shutdown"))
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
        child.reap(max(deadline - time.monotonic(), 0.0))


class RestartLimit:
    """How often each engine may be started anew: so often within RESTART_WINDOW_S, not in all the time that a group
    runs. systemd: `StartLimitBurst` within `StartLimitIntervalSec`."""

    def __init__(self, at_most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.at_most, self.clock = at_most, clock
        self._num_ever: Counter[str] = Counter()
        self._times: dict[str, deque[float]] = defaultdict(deque)  # within the window, oldest first

    def next(self, name: str) -> int | None:
        """The number of this restart, counted from the first ever; None if there were too many of late."""
        now, times = self.clock(), self._times[name]
        while times and now - times[0] >= RESTART_WINDOW_S:
            times.popleft()
        if len(times) >= self.at_most:
            return None
        times.append(now)
        self._num_ever[name] += 1
        return self._num_ever[name]


def started(config: Any, names: list[str], *, is_traced: bool) -> ProcessLinks:
    """A process for each engine. Raises `EngineLostError` if one cannot be started."""
    links = ProcessLinks(config, is_traced=is_traced)
    try:
        for name in names:
            role: Any = name.partition("-")[0]
            links.start(name, role)
    except OSError as error:
        links.close()
        raise EngineLostError(f"a process cannot be started: {error}") from error
    except BaseException:
        links.close()
        raise
    return links
