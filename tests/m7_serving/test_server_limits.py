"""Limits of connections, sizes and times, on raw sockets."""

import asyncio
import json
import socket
import time

import httpx
import openai
import pytest

from m7_serving.server import limits
from tests.m7_serving.fake_llm import FakeLLM, never
from tests.m7_serving.running import COMPLETION, MODEL, answer_of, asynchronous, check_error, request, running, until

BODY = json.dumps(COMPLETION).encode()
CHUNKED = "Transfer-Encoding: chunked"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


# --- sizes ------------------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_body_that_is_announced_too_large_is_not_waited_for() -> None:
    async with running(max_body_bytes=1000) as server:
        head = request(b"", "/v1/completions", "Content-Length: 1001", length=False)
        status, headers, body = await server.send(head)
        check_error(status, body, 413)
        assert headers["connection"] == "close"


@asynchronous
async def test_a_body_that_becomes_too_large_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DISCARD_S", 0.1)
    async with running(max_body_bytes=1000) as server:
        reader, writer = await server.connect()
        writer.write(request(b"", "/v1/completions", CHUNKED, length=False) + chunk(b" " * 900))
        writer.write(chunk(b" " * 101))  # the last chunk never comes
        status, headers, body = await answer_of(reader)
        check_error(status, body, 413)
        assert headers["connection"] == "close" and await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("is_chunked", [False, True])
@asynchronous
async def test_a_body_of_the_largest_size_is_accepted(is_chunked: bool) -> None:
    async with running(max_body_bytes=1000) as server:
        body = BODY + b" " * (1000 - len(BODY))
        if is_chunked:
            data = b"".join(chunk(body[i : i + 7]) for i in range(0, 1000, 7)) + b"0\r\n\r\n"
            sent = request(data, "/v1/completions", CHUNKED, length=False)
        else:
            sent = request(body)
        assert (await server.send(sent))[0] == 200


@pytest.mark.parametrize("value", [b"[]", b"{}", b"1", b'{"a":[]}'])
@asynchronous
async def test_a_body_of_very_many_values_is_not_parsed(value: bytes) -> None:
    async with running() as server:
        values = b",".join([value] * (limits.MAX_VALUES + 1))
        status, _, body = await server.send(request(b'{"prompt": "a", "metadata": [%s]}' % values))
        assert "commas" in check_error(status, body, 413)["message"]


@asynchronous
async def test_clients_get_the_answer_to_a_body_that_is_too_large() -> None:
    prompt = "a" * 20_000_000
    async with running(max_body_bytes=1000) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            for _ in range(5):
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.completions.create(model=MODEL, prompt=prompt)
                assert caught.value.status_code == 413


@asynchronous
async def test_a_client_that_waits_for_100_continue_sends_no_body_that_is_too_large() -> None:
    async with running(max_body_bytes=1000) as server:
        expects = request(b"", "/v1/completions", "Content-Length: 5000", "Expect: 100-continue", length=False)
        assert (await server.send(expects))[0] == 413
        reader, writer = await server.connect()
        length = f"Content-Length: {len(BODY)}"
        writer.write(request(b"", "/v1/completions", length, "Expect: 100-continue", length=False))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(BODY)
        assert (await answer_of(reader))[0] == 200
        writer.close()


@asynchronous
async def test_trailers_are_limited() -> None:
    async with running(max_header_bytes=2000) as server:
        reader, writer = await server.connect()
        writer.write(request(b"", "/v1/completions", CHUNKED, length=False) + chunk(BODY) + b"0\r\n")
        writer.write(b"A: " + b"a" * 1_000_000)
        status, _, body = await answer_of(reader)
        check_error(status, body, 431)
        writer.close()


# --- times ------------------------------------------------------------------------------------------------------------


@asynchronous
async def test_headers_that_come_too_slowly_are_answered_with_408() -> None:
    async with running(header_timeout_s=0.2) as server:
        reader, writer = await server.connect()
        answer = asyncio.create_task(answer_of(reader))
        start = time.monotonic()
        for byte in request(BODY)[:-1]:
            if answer.done():
                break
            writer.write(bytes([byte]))
            await asyncio.wait([answer], timeout=0.02)
        status, _, body = await answer
        check_error(status, body, 408)
        assert time.monotonic() - start < 2 and await reader.read() == b""
        writer.close()


@asynchronous
async def test_a_connection_that_sends_nothing_is_closed() -> None:
    async with running(header_timeout_s=0.1) as server:
        reader, writer = await server.connect()
        assert await reader.read() == b""
        writer.close()


@asynchronous
async def test_a_second_request_has_the_same_time_for_its_headers() -> None:
    async with running(header_timeout_s=0.1) as server:
        reader, writer = await server.connect()
        for _ in range(2):
            writer.write(request(BODY))
            assert (await answer_of(reader))[0] == 200
        writer.write(b"POST /v1")
        assert (await answer_of(reader))[0] == 408
        writer.close()


@pytest.mark.parametrize("is_chunked", [False, True])
@asynchronous
async def test_a_body_that_comes_too_slowly_is_answered_with_408(is_chunked: bool) -> None:
    async with running(body_timeout_s=0.2) as server:
        reader, writer = await server.connect()
        length = CHUNKED if is_chunked else "Content-Length: 1000"
        writer.write(request(b"", "/v1/completions", length, length=False))
        answer = asyncio.create_task(answer_of(reader))
        while not answer.done():
            writer.write(chunk(b" ") if is_chunked else b" ")
            await asyncio.wait([answer], timeout=0.02)
        status, headers, body = await answer
        check_error(status, body, 408)
        assert headers["connection"] == "close"
        writer.close()


@asynchronous
async def test_the_answer_may_take_longer_than_headers_and_body() -> None:
    llm = FakeLLM()
    llm.first = lambda: asyncio.sleep(0.3)
    async with running(llm, header_timeout_s=0.1, body_timeout_s=0.1, keep_alive_timeout_s=0.1) as server:
        assert (await server.post()).status_code == 200


@asynchronous
async def test_an_unused_connection_is_closed() -> None:
    async with running(keep_alive_timeout_s=0.1) as server:
        reader, writer = await server.connect()
        writer.write(request(BODY))
        assert (await answer_of(reader))[0] == 200
        assert await reader.read() == b""
        writer.close()


@asynchronous
async def test_a_client_that_does_not_read_is_disconnected() -> None:
    llm = FakeLLM(num_tokens=10**9)
    llm.padding = "x" * 200_000
    async with running(llm, write_timeout_s=0.2) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(request(json.dumps({**COMPLETION, "stream": True, "max_tokens": 10**9}).encode()))
            await until(llm.end.is_set)
        assert llm.num_unfinished == 0
        await until(lambda: not server.server.server_state.connections)


# --- connections ------------------------------------------------------------------------------------------------------


@asynchronous
async def test_one_connection_too_many_is_rejected() -> None:
    async with running(max_connections=3) as server:
        opened = [await server.connect() for _ in range(3)]
        await until(lambda: len(server.server.server_state.connections) == 3)
        reader, writer = await server.connect()
        status, headers, body = await answer_of(reader)
        check_error(status, body, 503)
        assert headers["retry-after"] == "1" and await reader.read() == b""
        writer.close()
        opened[0][1].close()
        await until(lambda: len(server.server.server_state.connections) == 2)
        assert (await server.get("/health")).status_code == 200
        for _, writer in opened:
            writer.close()


@asynchronous
async def test_a_client_with_one_connection_too_many_gets_the_answer() -> None:
    async with running(max_connections=1) as server:
        _, writer = await server.connect()
        await until(lambda: server.server.server_state.connections)
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            for _ in range(20):
                with pytest.raises(openai.InternalServerError, match="too many connections"):
                    await client.completions.create(model=MODEL, prompt="a" * 200_000)
        writer.close()


@asynchronous
async def test_a_request_behind_an_unanswered_one_is_dropped() -> None:
    """Otherwise the server would stop reading, and not notice that the client leaves."""
    for parts in ([request(BODY) * 2], [request(BODY), request(BODY)]):
        llm = FakeLLM()
        is_open = asyncio.Event()
        llm.first = is_open.wait
        async with running(llm) as server:
            reader, writer = await server.connect()
            for part in parts:
                writer.write(part)
                await until(lambda llm=llm: llm.widths)
            is_open.set()
            assert (await answer_of(reader))[0] == 200
            assert await reader.read() == b"" and len(llm.widths) == 1
            writer.close()


@pytest.mark.parametrize("stream", [False, True])
@asynchronous
async def test_a_client_that_leaves_behind_a_second_request_ends_the_first(stream: bool) -> None:
    llm = FakeLLM()
    llm.first = never
    async with running(llm) as server:
        _, writer = await server.connect()
        one = request(json.dumps({**COMPLETION, "stream": stream}).encode())
        writer.write(one + one + one[:50])
        await until(lambda: llm.widths)
        writer.write(one)
        writer.transport.abort()
        await until(llm.end.is_set, 1)


@asynchronous
async def test_many_requests_come_over_one_connection() -> None:
    async with running() as server:
        pool = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", limits=pool) as client:
            start = time.monotonic()
            for _ in range(20):
                assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
                assert (await client.get("/health")).status_code == 200
                assert (await client.post("/v1/completions", json={**COMPLETION, "n": 0})).status_code == 400
            assert len(server.server.server_state.connections) == 1
            assert time.monotonic() - start < 1.5  # without TCP_NODELAY an answer in two parts takes 40 ms
