"""A client that leaves ends its request at once, in every phase; and a race of both ends is no error."""

import asyncio
import json
import logging
import random
import time
from contextlib import suppress
from typing import Any

import pytest

from tests.m7_serving.fake_llm import FakeLLM, at_once, never
from tests.m7_serving.running import CHAT, COMPLETION, SOON_S, asynchronous, request, running, until

PHASES = ("admission", "first", "next")
BODIES = {
    "whole": COMPLETION,
    "stream": {**COMPLETION, "stream": True},
    "stream of 4": {**COMPLETION, "stream": True, "n": 4},
    "3 prompts": {**COMPLETION, "prompt": ["a", "b", "c"], "n": 2},
    "chat": {**CHAT, "stream": True},
}


def data_of(body: dict[str, Any]) -> bytes:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return request(json.dumps(body).encode(), path)


@pytest.mark.parametrize("way", ["close", "abort", "half"])
@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("phase", PHASES)
@asynchronous
async def test_a_client_that_leaves_ends_its_request(
    phase: str, kind: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = FakeLLM()
    reached = asyncio.Event()

    async def reach() -> None:
        reached.set()
        await never()

    setattr(llm, phase, reach)
    async with running(llm) as server:
        _, writer = await server.connect()
        writer.write(data_of(BODIES[kind]))
        await reached.wait()
        left = time.monotonic()
        if way == "half":
            writer.write_eof()
        elif way == "close":
            writer.close()
        else:
            writer.transport.abort()
        await llm.end.wait()
        assert llm.ends[0] - left < SOON_S and llm.num_unfinished == 0
        await until(lambda: not server.server.server_state.tasks)
        writer.close()
        assert (await server.get("/health")).status_code == 200
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("num_bytes", [1, 30, 140])
@asynchronous
async def test_a_client_that_leaves_before_its_request_is_whole_starts_none(num_bytes: int) -> None:
    async with running() as server:
        _, writer = await server.connect()
        data = data_of(COMPLETION)
        assert num_bytes < len(data)
        writer.write(data[:num_bytes])
        await until(lambda: server.server.server_state.connections)
        writer.close()
        await until(lambda: not server.server.server_state.connections)
        await until(lambda: not server.server.server_state.tasks)
        assert server.llm.widths == []


@asynchronous
async def test_clients_that_leave_at_random_moments_leave_nothing() -> None:
    chosen = random.Random(1)
    llm = FakeLLM(num_tokens=20)
    llm.admission = llm.first = llm.next = lambda: asyncio.sleep(chosen.random() / 500)
    async with running(llm) as server:

        async def visit() -> None:
            reader, writer = await server.connect()
            writer.write(data_of(chosen.choice(list(BODIES.values()))))
            with suppress(TimeoutError):
                async with asyncio.timeout(chosen.random() / 20):
                    await reader.read()
            chosen.choice([writer.close, writer.transport.abort])()

        for _ in range(10):
            await asyncio.gather(*(visit() for _ in range(10)))
        await until(lambda: not server.server.server_state.tasks)
        assert llm.num_unfinished == 0
        llm.admission = llm.first = llm.next = at_once
        assert (await server.post()).status_code == 200


@asynchronous
async def test_the_events_of_a_stream_come_one_by_one() -> None:
    gates = [asyncio.Event() for _ in range(3)]
    llm, taken = FakeLLM(), iter(gates)
    llm.first = llm.next = lambda: next(taken).wait()
    async with running(llm) as server:
        reader, writer = await server.connect()
        writer.write(data_of({**COMPLETION, "stream": True}))
        await until(lambda: llm.widths)
        gates[0].set()
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b"content-type: text/event-stream; charset=utf-8" in head and b"content-length" not in head
        for letter, gate in zip("abc", [*gates[1:], gates[0]], strict=True):
            event = await reader.readuntil(b"\n\n\r\n")
            assert f'"text":"{letter}"'.encode() in event
            gate.set()
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert rest.count(b"data: ") == 2 and b"data: [DONE]\n\n" in rest
        writer.close()
