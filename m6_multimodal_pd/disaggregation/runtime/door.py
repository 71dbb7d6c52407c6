"""Admission to the router's socket: a thread that checks keys and limits connections that have not been admitted.

ZeroMQ asks for every peer whether its public key is trusted (ZAP, ZeroMQ's RFC 27), and reports every connection to a
monitor. Both are answered in a thread, so that an engine is admitted while the user's program does something else, and
a stranger that opens connections without a handshake cannot use up the file descriptors of the process. pyzmq's own
`ThreadAuthenticator` checks keys in the same way; it has no limit for such connections. New in this milestone.
"""

import logging
import socket
import threading
from contextlib import suppress

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

HANDSHAKE_TIMEOUT_S = 5.0
"""ZeroMQ closes a connection whose handshake takes longer."""
MAX_UNADMITTED = 64
"""Connections that may be open without an engine behind them. The oldest is closed for one more."""
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED

LOG = logging.getLogger(__name__)


class Doorkeeper(threading.Thread):
    """Admits peers to `router`, a bound or unbound ROUTER socket, until that is closed."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", router: "zmq.Socket[bytes]", trusted: str) -> None:
        """`trusted`: the public key of the engines."""
        super().__init__(name="doorkeeper", daemon=True)
        self.context = context
        self._trusted = z85.decode(trusted)
        self._unadmitted: dict[int, socket.socket] = {}  # by the descriptor that ZeroMQ has, oldest first
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind("inproc://zeromq.zap.01")  # where libzmq asks
        self._monitor = router.get_monitor_socket(EVENTS)
        self._monitor.linger = 0
        self.start()

    def admit(self, descriptor: int) -> None:
        """Stop to count the connection with this descriptor: an engine has sent its hello over it."""
        connection = self._unadmitted.pop(descriptor, None)
        if connection is not None:
            connection.close()

    def run(self) -> None:
        """Answer ZeroMQ until the router's socket is closed."""
        with suppress(zmq.ContextTerminated):
            while not self._monitor.closed:
                for ready, _ in zmq.zmq_poll([(self._zap, zmq.POLLIN), (self._monitor, zmq.POLLIN)], -1):
                    self._check_key() if ready is self._zap else self._note_event()
        for descriptor in list(self._unadmitted):
            self.admit(descriptor)
        self._monitor.close()
        self._zap.close()

    def _check_key(self) -> None:
        version, number, _, place, _, mechanism, *keys = self._zap.recv_multipart()
        is_trusted = mechanism == b"CURVE" and keys == [self._trusted]
        status = [b"200", b"OK"] if is_trusted else [b"400", b"unknown key"]
        self._zap.send_multipart([version, number, *status, b"", b""])
        if not is_trusted:
            LOG.info("refused: a peer at %r with an unknown key", place)

    def _note_event(self) -> None:
        event = recv_monitor_message(self._monitor)
        if event["event"] == zmq.EVENT_MONITOR_STOPPED:
            self._monitor.close()
            return
        self.admit(event["value"])  # closed, or its descriptor is that of another connection now
        if event["event"] == zmq.EVENT_ACCEPTED:
            with suppress(OSError):  # closed since
                self._unadmitted[event["value"]] = socket.fromfd(event["value"], socket.AF_INET, socket.SOCK_STREAM)
            descriptors = list(self._unadmitted)  # another thread may admit one meanwhile
            if len(descriptors) > MAX_UNADMITTED:
                self._shut(descriptors[0])

    def _shut(self, descriptor: int) -> None:
        """Close a connection: ZeroMQ gives it up."""
        LOG.info("refused: more than %d connections without an engine", MAX_UNADMITTED)
        with suppress(OSError, KeyError):  # closed, or admitted since
            self._unadmitted[descriptor].shutdown(socket.SHUT_RDWR)
        self.admit(descriptor)
