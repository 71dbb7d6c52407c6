"""An engine that joins a group and never answers, as one whose step does not end: its program sleeps, ZeroMQ's thread
does not. As a program it is a process that can be killed or stopped, and loads nothing but ZeroMQ.

Its order comes on the standard input, a line of JSON; when that closes it ends.
"""

import json
import sys
from typing import Any

import zmq


class SilentEngine:
    """Connects, and sends what it was given."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.ROUTING_ID, order["identity"].encode())
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, order["public"].encode())
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, order["secret"].encode())
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, order["trusted"].encode())
        self.socket.connect(order["address"])  # again and again, until somebody listens there
        for frames in order["messages"]:
            self.socket.send_multipart([bytes.fromhex(frame) for frame in frames])

    def close(self) -> None:
        """The connection is closed; as often as it is asked to."""
        self.socket.close()
        self.context.term()


if __name__ == "__main__":
    engine = SilentEngine(json.loads(sys.stdin.readline()))
    sys.stdin.read()
    engine.close()
