"""Admission to the router's socket: a thread that checks keys and limits connections that have not been admitted.

ZeroMQ sends the public key of every peer to an authenticator (ZAP, ZeroMQ's RFC 27), and every connection to a monitor.
One thread answers both, so that an engine is admitted while the user's program does something else, and a stranger that
opens connections without a handshake cannot use up the file descriptors of the process. pyzmq's own
`ThreadAuthenticator` checks keys in the same way; it has no limit for such connections. New in this milestone.
"""

import logging
import os
import socket
import threading
from contextlib import suppress

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

HANDSHAKE_TIMEOUT_S = 5.0
"""ZeroMQ closes a connection whose handshake takes longer."""
MAX_UNADMITTED = 64
"""Maximum number of open connections that have not been admitted. One more closes the oldest."""
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
        self._zap.bind("inproc://zeromq.zap.01")  # the address that libzmq sends keys to
        self._monitor = router.get_monitor_socket(EVENTS)
        self._monitor.linger = 0
        self.start()

    def admit(self, descriptor: int) -> None:
        """Count the connection with this descriptor no more: an engine has sent its hello over it."""
        connection = self._unadmitted.pop(descriptor, None)
        if connection is not None:
            connection.close()

    def run(self) -> None:
        """Answer ZeroMQ until the router's socket is closed."""
        try:
            with suppress(zmq.ContextTerminated):
                while not self._monitor.closed:
                    zmq.zmq_poll([(self._zap, zmq.POLLIN), (self._monitor, zmq.POLLIN)], -1)
                    self._answer()
        finally:  # to end the context waits for these sockets, without a limit
            for descriptor in list(self._unadmitted):
                self.admit(descriptor)
            self._monitor.close()
            self._zap.close()

    def _answer(self) -> None:
        """Note all events, then check one key. A connection is noted before its key is checked, so before its hello."""
        is_asked = self._zap.poll(0)
        while not self._monitor.closed and self._monitor.poll(0):
            self._note_event()
        if is_asked:
            self._check_key()

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
        self.admit(event["value"])  # the connection is closed; its descriptor may be that of another one now
        if event["event"] == zmq.EVENT_ACCEPTED:
            self._count(event["value"], event["endpoint"].decode())
            descriptors = list(self._unadmitted)  # another thread may admit one meanwhile
            if len(descriptors) > MAX_UNADMITTED:
                self._shut(descriptors[0])

    def _count(self, descriptor: int, endpoint: str) -> None:
        """Count a connection that was accepted at `endpoint`, unless it is closed since."""
        with suppress(OSError):
            connection = self._unadmitted[descriptor] = socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM)
            if not is_of(connection, endpoint):
                self.admit(descriptor)

    def _shut(self, descriptor: int) -> None:
        """Shut a connection down; ZeroMQ closes it then."""
        LOG.info("refused: more than %d connections without an engine", MAX_UNADMITTED)
        with suppress(OSError, KeyError):  # closed, or admitted since
            self._unadmitted[descriptor].shutdown(socket.SHUT_RDWR)
        self.admit(descriptor)


def is_of(connection: socket.socket, endpoint: str) -> bool:
    """Return whether the local address of a connection is that of `endpoint`. It is not if ZeroMQ has closed the
    descriptor since, and the program has opened another connection with it."""
    try:
        name = connection.getsockname()
    except OSError:  # a file that is no socket
        return False
    place = f":{name[1]}" if isinstance(name, tuple) else os.fsdecode(name).lstrip("\0")
    return bool(place) and endpoint.endswith(place)
