"""Start and stop: the port, the signals, running requests, and an engine that ends."""

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from m1_single_request.errors import ModelLoadError
from m6_multimodal_pd.errors import EngineLostError
from m7_serving.config import ServerConfig
from m7_serving.server.run import bound_socket, serve
from tests.m7_serving.fake_llm import FakeLLM, at_once, never
from tests.m7_serving.running import COMPLETION, answer_of, asynchronous, check_error, events_of, request, until

BODY = json.dumps(COMPLETION).encode()


class Serving:
    """A call of `serve`, and clients for it."""

    def __init__(self, llm: FakeLLM, **settings: Any) -> None:
        self.llm, self.url = llm, ""
        self.config = ServerConfig(port=0, **settings)
        self.call = asyncio.create_task(serve(self.start, self.config, self.ready))  # type: ignore[arg-type]

    async def start(self) -> FakeLLM:
        return self.llm

    def ready(self, url: str) -> None:
        self.url = url

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.left = time.monotonic()
        os.kill(os.getpid(), number)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))


@asynccontextmanager
async def serving(llm: FakeLLM | None = None, **settings: Any) -> AsyncIterator[Serving]:
    """Serve until the call returns."""
    found = Serving(llm or FakeLLM(), **settings)
    await until(lambda: found.url or found.call.done())
    yield found
    await found.call
    assert found.llm.is_closed
    port = int(found.url.rpartition(":")[2])
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@asynchronous
async def test_a_signal_ends_an_idle_server(number: int) -> None:
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/health")).status_code == 200  # and the connection stays open
        server.signal(number)
        assert await server.call
        assert time.monotonic() - server.left < 2


@asynchronous
async def test_running_requests_may_finish() -> None:
    is_open = asyncio.Event()
    llm = FakeLLM()
    llm.next = is_open.wait
    async with serving(llm, shutdown_timeout_s=20) as server, httpx.AsyncClient(base_url=server.url) as client:
        stream = asyncio.create_task(client.post("/v1/completions", json={**COMPLETION, "stream": True}))
        whole = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await until(lambda: len(llm.widths) == 2)
        server.signal()
        await until(lambda: server.call.done() or is_draining(server), 5)
        late = await client.post("/v1/completions", json=COMPLETION)
        error = check_error(late.status_code, late.json(), 503)
        assert error["message"] == "the server is shutting down" and late.headers["connection"] == "close"
        assert late.headers["retry-after"] == "1"
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/metrics")).status_code == 200
        assert not stream.done() and not server.call.done()
        is_open.set()
        assert "".join(each["choices"][0]["text"] for each in events_of((await stream).text)) == "abc"
        assert (await whole).json()["choices"][0]["text"] == "abc"
        assert await server.call


def is_draining(server: Serving) -> bool:
    return time.monotonic() - server.left > 0.2


@asynchronous
async def test_requests_that_do_not_finish_in_time_end_with_an_error() -> None:
    llm = FakeLLM()
    llm.next = never
    async with serving(llm, shutdown_timeout_s=0.3) as server, httpx.AsyncClient(base_url=server.url) as client:
        stream = asyncio.create_task(client.post("/v1/completions", json={**COMPLETION, "stream": True}))
        whole = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await until(lambda: len(llm.widths) == 2)
        server.signal()
        assert await server.call
        assert 0.3 <= time.monotonic() - server.left < 3
        *_, failed = events_of((await stream).text)
        check_error(503, failed, 503)
        check_error((await whole).status_code, (await whole).json(), 503)
        assert llm.num_unfinished == 0


@pytest.mark.parametrize("timeout_s", [0.0, 60.0])
@asynchronous
async def test_without_a_timeout_or_with_a_second_signal_nothing_is_waited_for(timeout_s: float) -> None:
    llm = FakeLLM()
    llm.first = never
    async with serving(llm, shutdown_timeout_s=timeout_s) as server:
        reader, writer = await server.connect()
        writer.write(request(BODY))
        await until(lambda: llm.widths)
        server.signal()
        if timeout_s:
            await until(lambda: is_draining(server))
            server.signal(signal.SIGINT)
        assert await server.call and time.monotonic() - server.left < 3
        check_error(*(await answer_of(reader))[::2], 503)
        writer.close()


@asynchronous
async def test_a_request_whose_body_comes_after_the_signal_is_rejected() -> None:
    llm = FakeLLM()
    llm.first = never
    async with serving(llm, shutdown_timeout_s=20) as server:
        _, writer = await server.connect()
        writer.write(request(BODY))
        await until(lambda: llm.widths)
        slow_reader, slow = await server.connect()
        slow.write(request(b"", "/v1/completions", f"Content-Length: {len(BODY)}", length=False))
        await until(lambda: llm.widths)
        server.signal()
        await until(lambda: is_draining(server))
        slow.write(BODY)
        status, headers, body = await answer_of(slow_reader)
        error = check_error(status, body, 503)
        assert error["message"] == "the server is shutting down" and headers["connection"] == "close"
        llm.first = at_once
        writer.close()  # ends the running request
        assert await server.call
        slow.close()


@asynchronous
async def test_clients_that_send_or_read_nothing_do_not_hold_the_server() -> None:
    llm = FakeLLM(num_tokens=10**9)
    llm.padding = "x" * 200_000
    async with serving(llm, shutdown_timeout_s=0.1) as server:
        opened = [await server.connect() for _ in range(4)]
        opened[1][1].write(b"POST /v1/comp")
        opened[2][1].write(request(b"", "/v1/completions", "Content-Length: 100", length=False))
        opened[3][1].write(request(json.dumps({**COMPLETION, "stream": True, "max_tokens": 10**9}).encode()))
        opened[3][1].transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: llm.widths)
        server.signal()
        assert await server.call and time.monotonic() - server.left < 4
        for _, writer in opened:
            writer.transport.abort()


@asynchronous
async def test_a_port_in_use_is_an_error_before_the_model_is_loaded() -> None:
    async def start() -> Any:
        raise AssertionError("it was loaded")

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1, port {port}: Address already in use"):
            await serve(start, ServerConfig(port=port), print)


@asynchronous
async def test_of_two_servers_that_load_for_one_port_one_is_told(tmp_path: Path) -> None:
    other: list[socket.socket] = []

    async def start() -> FakeLLM:
        other.append(bound_socket(config))
        other[0].listen()
        return FakeLLM()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        config = ServerConfig(port=free.getsockname()[1], operator_socket=str(tmp_path / "a.sock"))
    with pytest.raises(OSError, match=f"cannot listen at 127.0.0.1, port {config.port}: Address already in use"):
        await serve(start, config, print)  # type: ignore[arg-type]
    other[0].close()


@asynchronous
async def test_nothing_listens_until_the_model_is_loaded() -> None:
    loaded = asyncio.Event()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    llm = FakeLLM()

    async def start() -> Any:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        loaded.set()
        return llm

    urls: list[str] = []
    call = asyncio.create_task(serve(start, ServerConfig(port=port), urls.append))
    await until(lambda: urls)
    assert loaded.is_set() and urls == [f"http://127.0.0.1:{port}"]
    os.kill(os.getpid(), signal.SIGTERM)
    assert await call


@asynchronous
async def test_a_signal_ends_the_loading_of_a_model() -> None:
    cancelled = asyncio.Event()

    async def start() -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await never()
        finally:
            cancelled.set()

    assert await serve(start, ServerConfig(port=0), print)
    assert cancelled.is_set()


@asynchronous
async def test_an_error_of_loading_is_raised() -> None:
    async def start() -> Any:
        raise ModelLoadError("no such model")

    with pytest.raises(ModelLoadError):
        await serve(start, ServerConfig(port=0), print)


@asynchronous
async def test_the_server_ends_with_its_engine(caplog: pytest.LogCaptureFixture) -> None:
    llm = FakeLLM()
    async with serving(llm, shutdown_timeout_s=60) as server:
        llm.end_error = EngineLostError("the engine is gone")
        assert not await server.call
        assert "no engine is left: the engine is gone" in caplog.text


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, False),
        ({"host": "localhost"}, False),
        ({"host": "::1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_key": ["key"]}, False),
    ],
)
@asynchronous
async def test_an_open_server_is_warned_of(
    settings: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def start() -> Any:
        raise ModelLoadError("enough")

    with pytest.raises(ModelLoadError):
        await serve(start, ServerConfig(port=0, **settings), print)
    assert ("without an API key" in caplog.text) == warns
