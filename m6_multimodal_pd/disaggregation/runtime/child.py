"""An engine as a process: `python -m m6_multimodal_pd.disaggregation.runtime.child`.

A group writes the order to the standard input; the command line of `pd.py` makes one itself. From there on there is one
way: the process connects to its router, builds its engine, reports that it is ready, and works until it is asked to end
or its router is gone. A parent holds the other end of the standard input, which closes when the parent dies. While
there is nothing to compute the process sleeps in the socket, and wakes with the first message. SGLang:
`run_scheduler_process`.
"""

import os
import signal
import sys
import threading
import time
from contextlib import closing, nullcontext, suppress
from functools import partial
from typing import Any

import msgspec
import torch

from m1_single_request.errors import ConfigError
from m6_multimodal_pd.config import EngineConfig
from m6_multimodal_pd.disaggregation.engine import Engine
from m6_multimodal_pd.disaggregation.runtime.config_json import from_json
from m6_multimodal_pd.disaggregation.runtime.jobs import fault_of
from m6_multimodal_pd.disaggregation.runtime.messages import (
    WITHOUT_LIMIT,
    Call,
    Failed,
    Heartbeat,
    LengthFixed,
    Order,
    Refused,
    ToEngine,
)
from m6_multimodal_pd.disaggregation.runtime.shared_memory import SharedMemorySegments, remove_leftovers
from m6_multimodal_pd.disaggregation.runtime.sockets import EngineSocket
from m6_multimodal_pd.disaggregation.runtime.watchdog import Watchdog
from m6_multimodal_pd.errors import PeerLostError
from m6_multimodal_pd.wire import Codec

STDIN = 0
HEARTBEAT_S = 1.0
COPY_POLL_S = 0.001
"""Longest wait for messages while KV is being copied, whose end nothing announces."""
WELCOME_TIMEOUT_S = 30.0
PATIENCE_S = 5.0
"""Seconds that a process without a parent may take to end before it ends itself by force."""


def main() -> int:
    """Execute the order of a parent; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the parent's
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):  # the parent was interrupted before it had written the order
        return 0
    process = Process(msgspec.json.decode(line, type=Order))
    threading.Thread(target=process.end_with_parent, name="parent", daemon=True).start()
    process.run(signal.SIGTERM)
    return 0 if process.error is None else 1


class Process:
    """An engine, its socket and its event loop."""

    def __init__(self, order: Order) -> None:
        """Connect to the router. Raises `ConfigError` for an address that cannot be used."""
        self.order = order
        self.is_stopping = False
        self.error: Exception | None = None
        """Why the engine cannot be built, or has not joined."""
        self.config: Any = from_json(EngineConfig, order.config)
        group = self.config.disaggregation
        codec: Codec[Any] = Codec(ToEngine, group.max_message_bytes)
        self.socket = EngineSocket(
            order.address, name=order.name, codec=codec, keys=order.keys, heartbeat_timeout_s=group.heartbeat_timeout_s
        )

    def stop(self) -> None:
        """End with the next turn of the loop."""
        self.is_stopping = True

    def end_with_parent(self) -> None:
        """Wait for the parent's end of the standard input to close; then end, by force if need be."""
        with suppress(OSError):
            while os.read(STDIN, 4096):
                pass
        self.stop()
        time.sleep(PATIENCE_S)
        remove_leftovers(self.order.owner)
        os._exit(1)

    def run(self, *signals: int) -> None:
        """Build the engine and work, until one of the `signals` arrives or the router ends it. Sets `error` if the
        engine never worked."""
        for number in signals:
            signal.signal(number, lambda *_: self.stop())
        try:
            with closing(self.socket), suppress(PeerLostError):  # without a router no request waits for an answer
                self._await_welcome()
                if self.socket.joined and (engine := self._build()) is not None:
                    self._work(engine)
        finally:
            remove_leftovers(self.order.owner)

    def _await_welcome(self) -> None:
        """Wait until the router admits this engine; set `error` if it does not."""
        deadline = time.monotonic() + WELCOME_TIMEOUT_S
        while not (self.socket.joined or self.is_stopping) and time.monotonic() < deadline:
            self._receive(0.1)
        if not self.socket.joined:
            self.error = ConfigError(f"{self.order.name}: no router at {self.order.address}, or the name is taken")

    def _build(self) -> Engine | None:
        """Return an engine that is ready. None if it cannot be built (the router receives the error), or has to end."""
        from m4_radix_cache.tiers import WatchedLoader
        from m6_multimodal_pd.wiring import PARTS, PreparedEngine

        torch.set_num_threads(self.order.num_threads)
        try:
            engine = Engine(
                role=self.order.role,
                config=self.config,
                parts=PARTS,
                prepare=partial(PreparedEngine, load=WatchedLoader(PARTS["model_loader"], self.config.cache)),
                segments=SharedMemorySegments(self.order.owner),
                send=self.socket.send,
                is_traced=self.order.is_traced,
            )
            self.socket.send(engine.fitted)
            if (length := self._await_length()) is None:
                return None
            engine.start(length)
        except PeerLostError:
            raise
        except Exception as error:  # an engine of a group that works already is started anew all the same
            self.error = error
            self.socket.send(Failed(fault_of(error)))
            return None
        return engine

    def _await_length(self) -> int | None:
        """Return the length of the group's requests, which the router fixes when all engines have reported theirs;
        None if this engine has to end."""
        while not self.is_stopping:
            for message in self._receive(HEARTBEAT_S):
                if isinstance(message, LengthFixed):
                    return message.max_model_len
        return None

    def _receive(self, timeout_s: float) -> list[ToEngine]:
        """Return the messages that have arrived. Stop if one of them ends this engine, or the router is gone."""
        messages: list[ToEngine] = self.socket.receive(timeout_s)
        for message in messages:
            if isinstance(message, Refused):
                where = f"the router at {self.order.address}"
                self.error = ConfigError(f"{self.order.name} has ended: {where} does not take it, {message.why}")
                self.stop()
            elif isinstance(message, Call) and message.verb == "shutdown":
                self.stop()
        if self.socket.was_cut():
            self.stop()
        return messages

    def _work(self, engine: Engine) -> None:
        """Join, and run the event loop. An engine without requests sends no heartbeat: its router may not read for
        hours."""
        watchdog = Watchdog(self.config.disaggregation.step_timeout_s)
        next_heartbeat, is_busy = 0.0, True
        with closing(engine):
            self.socket.send(engine.joined)
            while True:
                idle_s = COPY_POLL_S if engine.side.in_flight else HEARTBEAT_S
                messages = self._receive(0.0 if is_busy else idle_s)
                if self.is_stopping:
                    return
                has_limit = not any(isinstance(each, Call) and each.verb in WITHOUT_LIMIT for each in messages)
                with watchdog if has_limit else nullcontext():
                    is_busy = engine.tick(messages) or bool(messages)
                if engine.side.rooms and time.monotonic() >= next_heartbeat:
                    self.socket.send(Heartbeat())
                    next_heartbeat = time.monotonic() + HEARTBEAT_S


if __name__ == "__main__":
    exit_status = main()
    sys.stderr.flush()
    os._exit(exit_status)  # everything is closed; Python would take a second to release its modules
