"""An engine as a process, with its order on stdin: `python -m m6_multimodal_pd.disaggregation.runtime.child`.

It connects to its router, builds its engine, says that it is ready, and works until it is told to end, or its parent is
gone: the parent holds the other end of the standard input, which closes with it however it dies. While there is nothing
to compute the process sleeps in the socket, and wakes with the first message. SGLang: `run_scheduler_process`.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import msgspec

from m6_multimodal_pd.config import EngineConfig
from m6_multimodal_pd.disaggregation.engine import Engine
from m6_multimodal_pd.disaggregation.runtime.config_json import from_json
from m6_multimodal_pd.disaggregation.runtime.credentials import CurveKeys
from m6_multimodal_pd.disaggregation.runtime.jobs import fault_of
from m6_multimodal_pd.disaggregation.runtime.messages import Call, Failed, LengthFixed, Order, Refused, ToEngine
from m6_multimodal_pd.disaggregation.runtime.shared_memory import SharedMemorySegments, remove_leftovers
from m6_multimodal_pd.disaggregation.runtime.sockets import EngineSocket
from m6_multimodal_pd.disaggregation.runtime.watchdog import Watchdog
from m6_multimodal_pd.disaggregation.runtime.wire import Codec
from m6_multimodal_pd.errors import PeerLostError

STDIN = 0
HEARTBEAT_S = 1.0
WELCOME_TIMEOUT_S = 30.0
PATIENCE_S = 5.0
"""So long a process that was told to end may take before it ends itself."""


def main() -> int:
    """Work through an order; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the parent's
    line = read_line()
    if not line.endswith(b"\n"):  # the parent was interrupted before it had written the order
        return 0
    order = msgspec.json.decode(line, type=Order)
    process = Process(order)
    signal.signal(signal.SIGTERM, lambda *_: process.stop())
    threading.Thread(target=process.outlive_nobody, name="parent", daemon=True).start()
    try:
        return process.run()
    finally:
        remove_leftovers(order.owner)


def read_line() -> bytes:
    """The first line of the standard input, and nothing behind it; by the descriptor, for no buffer has an owner when
    the process ends."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(STDIN, 1)
        if not byte:
            break
        line += byte
    return line


class Process:
    """The engine's loop."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.is_stopping = False
        self.refused: str | None = None
        """Why the router does not take it."""
        config = from_json(EngineConfig, order.config)
        self.config: Any = config
        keys = CurveKeys(public=order.public_key, secret=order.secret_key, trusted=frozenset({order.trusted_key}))
        self.socket: EngineSocket[Any] = EngineSocket(
            order.address,
            name=order.name,
            codec=Codec(ToEngine, config.disaggregation.max_message_bytes),
            secret=bytes.fromhex(order.secret),
            keys=keys,
            heartbeat_timeout_s=config.disaggregation.heartbeat_timeout_s,
        )

    def stop(self) -> None:
        """End with the next turn of the loop."""
        self.is_stopping = True

    def outlive_nobody(self) -> None:
        """Wait for the parent's end of the standard input to close; then end, by force if need be."""
        with suppress(OSError):
            while os.read(STDIN, 4096):
                pass
        self.stop()
        time.sleep(PATIENCE_S)
        remove_leftovers(self.order.owner)
        os._exit(1)

    def run(self) -> int:
        """Build the engine and work. Returns the exit status."""
        from m6_multimodal_pd.wiring import PARTS, prepare

        if self.order.num_threads:
            import torch

            torch.set_num_threads(self.order.num_threads)
        if not self._is_welcome():
            return 1
        try:
            engine = Engine(
                role=self.order.role,
                config=self.config,
                parts=PARTS,
                prepare=prepare,
                segments=SharedMemorySegments(self.order.owner),
                send=self.socket.send,
                is_traced=self.order.is_traced,
            )
            self.socket.send(engine.fitted)
            length = self._await_length()
            if length is None:
                self.socket.close()
                return 0 if self.refused is None else 1
            engine.start(length)
        except PeerLostError:  # the router is gone
            self.socket.close()
            return 0
        except Exception as error:  # an engine of a group that works already is started anew all the same
            self.socket.send(Failed(fault_of(error)))
            self.socket.close()
            return 1
        watchdog = Watchdog(self.config.disaggregation.step_timeout_s)
        try:
            self.socket.send(engine.joined)
            self._work(engine, watchdog)
            return 0 if self.refused is None else 1
        except PeerLostError:  # the router is gone, and with it everybody who waits for an answer
            return 0
        finally:
            watchdog.close()
            engine.close()
            self.socket.close()

    def _is_welcome(self) -> bool:
        deadline = time.monotonic() + WELCOME_TIMEOUT_S
        while not self.socket.joined and not self.is_stopping and time.monotonic() < deadline:
            self.socket.receive(0.1)
        return self.socket.joined

    def _await_length(self) -> int | None:
        """The length of the group's requests, which the router fixes when all engines have said what they have room
        for; None if it does not come."""
        while not self.is_stopping and not self.socket.was_cut():
            for message in self.socket.receive(HEARTBEAT_S):
                if isinstance(message, LengthFixed):
                    return message.max_model_len
                if isinstance(message, Refused):
                    self.refused = message.why
                    return None
                if isinstance(message, Call) and message.verb == "shutdown":
                    return None
        return None

    def _work(self, engine: Engine, watchdog: Watchdog) -> None:
        """Nobody may read for hours what an engine without requests says: then one heartbeat must do."""
        next_heartbeat = 0.0
        is_busy = had_rooms = True
        while not self.is_stopping:
            now = time.monotonic()
            if now >= next_heartbeat:
                has_rooms = bool(engine.side.rooms)
                if has_rooms or had_rooms:
                    self.socket.send(engine.heartbeat())
                had_rooms, next_heartbeat = has_rooms, now + HEARTBEAT_S
            messages = self.socket.receive(0.0 if is_busy else next_heartbeat - now)
            if self.socket.was_cut():  # the router is gone, and with it everybody who waits for an answer
                return
            if refused := [message.why for message in messages if isinstance(message, Refused)]:
                self.refused = refused[0]
                return
            verbs = {message.verb for message in messages if isinstance(message, Call)}
            if "update_weights" not in verbs:  # loading takes what it takes
                watchdog.begin()
            if "shutdown" in verbs:
                self.stop()
            is_busy = engine.tick(messages) or bool(messages)
            watchdog.end()


if __name__ == "__main__":
    exit_status = main()
    sys.stderr.flush()
    os._exit(exit_status)  # everything is put away; Python would take a second to forget its modules
