"""A server under load: many connections, slow readers, floods, large bodies; and memory that stays as it is."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.m7_serving.servers import Server, chat, serving
from tests.m7_serving.test_disconnect import request_of

pytestmark = pytest.mark.exhaustive
LONG = chat(max_tokens=400, ignore_eos=True, stream=True, stream_options={"include_usage": True})
KEY = "secret"
AUTHORIZED = b"Authorization: Bearer secret\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--body-timeout", "2", "--max-total-tokens", "32768", STEPWISE_API_KEY=KEY) as started:
        yield started
        assert started.stop() == (0, "")


def post(body: dict[str, Any], *, key: bytes = AUTHORIZED, path: str = "/v1/chat/completions") -> bytes:
    head, rest = request_of(body, path).split(b"\r\n", 1)
    return head + b"\r\n" + key + rest


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of a response with a length."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


async def ask(port: int, request: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await read_answer(reader)
    finally:
        writer.close()


async def stream(port: int) -> bytes:
    """The whole of a stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        writer.write(post(LONG))
        return await reader.readuntil(b"data: [DONE]\n\n")
    finally:
        writer.close()


@asynccontextmanager
async def beside_a_stream(server: Server) -> AsyncIterator[None]:
    """A stream runs again and again meanwhile, and always has all of its tokens."""
    stops = asyncio.Event()

    async def run() -> int:
        number = 0
        while not stops.is_set() or not number:
            found = await stream(server.port)
            assert b'"completion_tokens":400' in found
            number += 1
        return number

    running = asyncio.create_task(run())
    yield
    stops.set()
    assert await running
    assert server.is_idle()


def memory_mib(pid: int) -> float:
    line = next(each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def test_five_hundred_connections(server: Server) -> None:
    """They are kept, requests on some of them are answered beside a stream, and those beyond the limit get an error."""

    async def act() -> None:
        opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(500)]
        async with beside_a_stream(server):
            for _, writer in opened[::3]:
                writer.write(post(chat(max_tokens=2)))
            assert {(await read_answer(reader))[0] for reader, _ in opened[::3]} == {200}
        more = [await ask(server.port, post(chat(max_tokens=2))) for _ in range(2)]
        assert [status for status, _ in more] == [200, 200]
        opened += [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
        assert (await read_answer(opened[-1][0]))[0] == 503
        for _, writer in opened:
            writer.close()

    asyncio.run(act())


def test_slow_readers_delay_nobody_and_cost_no_memory(server: Server) -> None:
    """A hundred clients that do not read, some of them more than fits into the buffers of the system: the others get
    their streams, and the server keeps one output of each."""

    async def act() -> None:
        opened = []
        for number in range(100):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            large = {"max_tokens": 1500, "logprobs": True, "top_logprobs": 20} if number < 10 else {"max_tokens": 200}
            writer.write(post(chat(**large, ignore_eos=True, stream=True)))
            opened.append((reader, writer))
        before = memory_mib(server.process.pid)
        for _ in range(3):
            assert b'"completion_tokens":400' in await stream(server.port)
        assert memory_mib(server.process.pid) - before < 100
        for _, writer in opened:
            writer.transport.abort()
        assert server.is_idle()

    asyncio.run(act())


def test_ten_thousand_requests_leave_no_memory_behind() -> None:
    """Its own server has so little KV memory that the first thousand requests touch all of it."""
    with serving("--max-total-tokens", "1024", STEPWISE_API_KEY=KEY) as server:
        check_memory(server)
        assert server.stop() == (0, "")


def check_memory(server: Server) -> None:
    async def clients(number: int) -> None:
        async def client() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for _ in range(number // 20):
                writer.write(post({"prompt": [5, 6, 7, 8], "max_tokens": 1}, path="/v1/completions"))
                assert (await read_answer(reader))[0] == 200
            writer.close()

        await asyncio.gather(*(client() for _ in range(20)))

    (engine,) = server.engines()
    pids = server.process.pid, engine
    asyncio.run(clients(1000))
    before = [memory_mib(pid) for pid in pids]
    asyncio.run(clients(9000))
    assert server.is_idle()
    grown = [memory_mib(pid) - mib for pid, mib in zip(pids, before, strict=True)]
    assert max(grown) < 8, grown


def test_floods_disturb_no_other_request(server: Server) -> None:
    """Half a body from a hundred clients, large bodies, and two thousand wrong keys."""

    async def half() -> int:
        request = post(LONG)
        return (await ask(server.port, request[: len(request) - 20]))[0]

    async def large() -> int:
        return (await ask(server.port, post(chat("x" * 10_000_000))))[0]

    async def wrong(number: int) -> int:
        key = f"Authorization: Bearer {number}\r\n".encode()
        return (await ask(server.port, post(chat(), key=key)))[0]

    async def act() -> None:
        async with beside_a_stream(server):
            assert set(await asyncio.gather(*(half() for _ in range(100)))) == {408}
            assert set(await asyncio.gather(*(large() for _ in range(5)))) == {400}
            for first in range(0, 2000, 100):
                found = await asyncio.gather(*(wrong(number) for number in range(first, first + 100)))
                assert set(found) == {401}

    asyncio.run(act())


def test_counters_are_the_sums_of_the_usages_and_gauges_fall_to_zero(server: Server) -> None:
    async def act() -> list[dict[str, Any]]:
        bodies = [chat(f"What is {number}?", max_tokens=number % 9 + 1, n=number % 3 + 1) for number in range(60)]
        answers = await asyncio.gather(*(ask(server.port, post(body)) for body in bodies))
        return [json.loads(body)["usage"] for _, body in answers]

    before = server.metrics()
    usages = asyncio.run(act())
    assert server.is_idle()
    after = server.metrics()
    for name, total in (
        ("prompt_tokens_total", sum(usage["prompt_tokens"] for usage in usages)),
        ("generation_tokens_total", sum(usage["completion_tokens"] for usage in usages)),
        ("cached_tokens_total", sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)),
        ("num_requests_total", len(usages)),
    ):
        assert after[f"sglang:{name}"] - before[f"sglang:{name}"] == total
    gauges = ("num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage")
    assert [after[f"sglang:{name}"] for name in gauges] == [0, 0, 0, 0]
