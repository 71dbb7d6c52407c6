"""A server on a free port of this machine, in the event loop of the test, and clients for it."""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
from uvicorn.loops.auto import auto_loop_factory

from m7_serving.config import ServerConfig
from m7_serving.server.app import make_app
from m7_serving.server.run import Server, bound_socket, uvicorn_config
from tests.m7_serving.fake_llm import FakeLLM

LIMIT_S = 30.0
SOON_S = 0.2
"""Within this time a request ends whose client has left."""
MODEL = "tiny-qwen3-vl"
COMPLETION = {"model": MODEL, "prompt": [1, 2, 3, 4]}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own, of the server's kind, for a limited time."""

    @functools.wraps(test)
    def run(*arguments: Any, **keywords: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(LIMIT_S):
                await test(*arguments, **keywords)

        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            runner.run(limited())

    return run


class Running:
    """A server that answers."""

    def __init__(self, llm: FakeLLM, server: Server, app: Any, port: int) -> None:
        self.llm, self.server, self.app, self.port = llm, server, app, port
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S)

    async def post(self, body: Any = COMPLETION, path: str = "/v1/completions", **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.client.get(path, **options)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def send(self, data: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Send bytes; return status, headers and body of the first answer."""
        reader, writer = await self.connect()
        try:
            writer.write(data)
            return await answer_of(reader)
        finally:
            writer.close()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Read an answer with a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers["content-length"]))
    return int(status.split()[1]), headers, json.loads(body)


def request(body: bytes, path: str = "/v1/completions", *lines: str, length: bool = True) -> bytes:
    """Return a request as bytes."""
    sized = [f"Content-Length: {len(body)}"] if length else []
    head = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", *sized, *lines, "", ""]
    return "\r\n".join(head).encode() + body


@asynccontextmanager
async def running(llm: FakeLLM | None = None, **settings: Any) -> AsyncIterator[Running]:
    """Serve until the end of the context."""
    llm, config = llm or FakeLLM(), ServerConfig(port=0, **settings)
    app: Any = make_app(llm, config)  # type: ignore[arg-type]
    with bound_socket(config) as sock:
        server = Server(uvicorn_config(app, config))
        server.config.load()  # as `serve` does it, without its pauses of 0.1 s
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([sock])
        found = Running(llm, server, app, sock.getsockname()[1])
        try:
            yield found
        finally:
            await found.client.aclose()
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            await until(lambda: not server.server_state.connections and not server.server_state.tasks)
            server.servers[0].close()


async def until(condition: Callable[[], Any], timeout_s: float = LIMIT_S) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def check_error(status: int, body: Any, expected: int) -> dict[str, Any]:
    """Check that a body is an error in the form of OpenAI's API, of a bounded size; return it."""
    assert status == expected, body
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert len(json.dumps(body)) < 4000
    for trace in ("Traceback", "pydantic", ".py", "<class", "site-packages"):
        assert trace not in error["message"]
    return error


def events_of(text: str) -> list[Any]:
    """Return the payloads of a stream; the last event must be `[DONE]`."""
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]
