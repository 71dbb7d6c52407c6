"""Clients that go away: at every moment, also behind a proxy, and nothing of them is left."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from tests.m7_serving.servers import Server, chat, serving

LONG = {"max_tokens": 800, "ignore_eos": True}
pytestmark = pytest.mark.exhaustive  # by default: `test_server_disconnect.py` and `test_async_llm.py`


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--max-num-seqs", "4") as started:
        yield started
        assert started.stop() == (0, "")


def request_of(body: dict[str, Any], path: str = "/v1/chat/completions") -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def leave(
    port: int, body: dict[str, Any], *, after_bytes: int = 0, after_s: float = 0.0, sent: float = 1.0
) -> None:
    """Send a request, or a part of it; read so many bytes, or wait, and close the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = request_of(body)
    writer.write(request[: int(len(request) * sent)])
    with suppress(asyncio.IncompleteReadError):
        await reader.readexactly(after_bytes)
    await asyncio.sleep(after_s)
    writer.transport.abort() if after_bytes % 2 else writer.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "moment",
    [
        {"sent": 0.5},
        {"after_s": 0.0},
        {"after_s": 0.005},
        {"after_s": 0.1},
        {"after_bytes": 1000},
        {"after_bytes": 5001},
    ],
    ids=["body", "at once", "tokenizing", "running", "reading", "resetting"],
)
def test_a_client_that_goes_away_leaves_nothing(server: Server, stream: bool, n: int, moment: dict[str, Any]) -> None:
    if "after_bytes" in moment and not stream:
        moment = {"after_s": moment["after_bytes"] / 20_000}
    before = server.metrics()
    asyncio.run(leave(server.port, chat(stream=stream, n=n, **LONG), **moment))
    assert server.is_idle()
    after = server.metrics()
    assert after["sglang:generation_tokens_total"] == before["sglang:generation_tokens_total"], "it was not finished"


def test_waiting_clients_that_go_away_never_run(server: Server) -> None:
    """Four requests fill the batch; those behind them leave the queue, and the four do not notice."""

    async def ask() -> list[bytes]:
        body = request_of(chat(max_tokens=300, ignore_eos=True))
        running = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
        for _, writer in running:
            writer.write(body.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nConnection: close\r\n"))
        await asyncio.sleep(0.05)
        await asyncio.gather(*(leave(server.port, chat(**LONG), after_s=0.02) for _ in range(20)))
        found = [await reader.read() for reader, _ in running]
        for _, writer in running:
            writer.close()
            await writer.wait_closed()
        return found

    answers = asyncio.run(ask())
    assert all(json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 300 for answer in answers)
    assert server.is_idle()


def test_a_client_behind_a_proxy_goes_away(server: Server) -> None:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    async def ask() -> None:
        proxy = await asyncio.start_server(pass_on, "127.0.0.1", 0)
        async with proxy:
            port = proxy.sockets[0].getsockname()[1]
            for stream in (True, False):
                await leave(port, chat(stream=stream, **LONG), after_s=0.2)
            await asyncio.sleep(0.1)

    asyncio.run(ask())
    assert server.is_idle()


def test_clients_that_go_away_at_300_random_moments_leave_nothing(server: Server) -> None:
    random = Random(3)

    async def one() -> None:
        await asyncio.sleep(random.random() * 0.5)
        stream = random.random() < 0.6
        body = chat("red " * random.randint(1, 200), stream=stream, n=random.choice([1, 1, 2, 4]), **LONG)
        moment: dict[str, Any] = {"after_s": random.expovariate(10)}
        sent = random.choice([0.4, 1.0, 1.0, 1.0])
        if stream and sent == 1.0 and random.random() < 0.5:
            moment = {"after_bytes": random.randint(1, 9000)}
        await leave(server.port, body, sent=sent, **moment)

    async def ask() -> None:
        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(30)))

    asyncio.run(ask())
    assert server.is_idle()
    assert len(server.engines()) == 1
