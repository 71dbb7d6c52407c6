"""Start and stop of the server: the port, the engine, uvicorn, and the signals.

    bind the port -> load the model -> listen -> signal: drain -> end the engine -> close what is left

The port is bound first, so that one that is in use fails at once, but nothing listens until the model is loaded. On
SIGTERM or SIGINT new requests are rejected and unused connections closed, running requests may finish within the
timeout, and the rest ends with the engine; a second signal ends the waiting. uvicorn itself cancels what
has not finished, without an answer. New in this milestone. vLLM: `serve_http`, `--shutdown-timeout`; SGLang:
`launch_server`.
"""

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from fastapi import FastAPI

from m7_serving.async_llm import AsyncLLM
from m7_serving.config import ServerConfig
from m7_serving.server.app import make_app
from m7_serving.server.http_protocol import HttpProtocol
from m7_serving.server.operators import default_path, make_operators_app, unix_socket

SIGNALS = (signal.SIGTERM, signal.SIGINT)
TICK_S = 0.05
LAST_ANSWERS_S = 1.0
"""Time for the answers to the requests that ended with the engine."""
logger = logging.getLogger(__name__)


@contextmanager
def received_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT inside of the `with` block, in the running event loop."""
    loop, received = asyncio.get_running_loop(), list[int]()
    for number in SIGNALS:
        loop.add_signal_handler(number, received.append, number)
    try:
        yield received
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


class Server(uvicorn.Server):
    """uvicorn's server. It changes `capture_signals`: signals are handled here."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals as they are."""
        yield


async def serve(start: Callable[[], Awaitable[AsyncLLM]], config: ServerConfig, ready: Callable[[str], None]) -> bool:
    """Serve the engine that `start` builds until a signal comes; return False if the engine has ended before.

    `ready` is called with the server's URL once it answers. Raises `OSError` if the port cannot be used, and the errors
    of `start`.
    """
    if config.is_open_to_others:
        logger.warning("the server listens at %s without an API key: whoever reaches it may use it", config.host)
    with ExitStack() as stack:
        sock = stack.enter_context(closing(bound_socket(config)))
        path = Path(config.operator_socket or default_path(sock.getsockname()[1]))
        sockets = sock, stack.enter_context(unix_socket(path))
        signals = stack.enter_context(received_signals())
        starting = asyncio.ensure_future(start())
        await _until(lambda: starting.done() or bool(signals))
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return True
        async with starting.result() as llm:
            with named_errors(config):  # two servers may bind one port, and one may listen
                sock.listen()
            return await _serve(llm, sockets, config, ready, signals)


async def _serve(
    llm: AsyncLLM,
    sockets: tuple[socket.socket, socket.socket],
    config: ServerConfig,
    ready: Callable[[str], None],
    signals: list[int],
) -> bool:
    """Serve a loaded engine, at the public socket and at that for operators; return as `serve`."""
    app = make_app(llm, config)
    gc.collect()  # and keep what is there out of later collections: each would stop all streams for 0.1 s
    gc.freeze()
    servers = [Server(uvicorn_config(each, config)) for each in (app, make_operators_app(llm))]
    tasks = [asyncio.create_task(server.serve([sock])) for server, sock in zip(servers, sockets, strict=True)]
    are_done: Callable[[], bool] = lambda: any(task.done() for task in tasks)  # noqa: E731
    try:
        await _until(lambda: all(server.started for server in servers) or are_done())
        if not are_done():
            ready(url_of(config, sockets[0]))
        await _until(lambda: bool(signals) or llm.end_error is not None or are_done())
        end_error = llm.end_error
        if end_error is not None:
            logger.error("the server ends, because no engine is left: %s", end_error)
        await _drain(app, llm, servers[0], config, signals)
    finally:
        await llm.close()
        for server in servers:
            await _close(server)
        await asyncio.gather(*tasks)
    return end_error is None


def bound_socket(config: ServerConfig) -> socket.socket:
    """Return a socket at the address of the configuration. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only if it is named
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also while connections of an earlier server linger
    with ExitStack() as stack, named_errors(config):
        stack.enter_context(sock)
        sock.bind((config.host, config.port))
        stack.pop_all()
    return sock


@contextmanager
def named_errors(config: ServerConfig) -> Iterator[None]:
    """Add the address to an `OSError` of the block."""
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot listen at {config.host}, port {config.port}: {error.strerror}") from None


def url_of(config: ServerConfig, sock: socket.socket) -> str:
    """Return the URL of the server at a socket."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{sock.getsockname()[1]}"


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's configuration. Errors of requests are logged by `error_shape.py`, not a second time."""
    configured = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(HttpProtocol, limits=config)),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=config.access_log,
        server_header=False,
        timeout_keep_alive=cast(int, config.keep_alive_timeout_s),
        h11_max_incomplete_event_size=config.max_header_bytes,
    )
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    return configured


async def _drain(app: FastAPI, llm: AsyncLLM, server: Server, config: ServerConfig, signals: list[int]) -> None:
    """Reject new requests, and wait for the running ones and until their clients have read the answers: until the
    timeout, the second signal or the engine's end."""
    app.state.is_draining = True
    llm.resume()  # what waits since a pause can end as well
    for connection in list(server.server_state.connections):
        connection.shutdown()
    is_done: Callable[[], bool] = lambda: not (llm.num_unfinished or server.server_state.connections)  # noqa: E731
    await _until(lambda: is_done() or len(signals) > 1 or llm.end_error is not None, config.shutdown_timeout_s)


async def _close(server: Server) -> None:
    """Send the last answers, close all connections, and let uvicorn end."""
    await _until(lambda: not server.server_state.tasks, LAST_ANSWERS_S)
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    server.should_exit = True


async def _until(condition: Callable[[], bool], timeout_s: float = float("inf")) -> None:
    """Wait until `condition` holds, or until the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(TICK_S)
