"""Wrong bodies, headers, sizes and encodings: an error in OpenAI's shape, and the other requests undisturbed."""

import asyncio
import json
from typing import Any

import pytest

from tests.m7_serving.fake_llm import FakeLLM
from tests.m7_serving.running import COMPLETION, asynchronous, check_error, events_of, request, running

DEPTH = 100_000


def body(**changes: Any) -> bytes:
    return json.dumps({**COMPLETION, **changes}).encode()


INVALID_BODIES = {
    "empty": b"",
    "space": b" ",
    "null": b"null",
    "number": b"1",
    "list": b"[]",
    "text": b'"a"',
    "cut off": body()[:-1],
    "two objects": body() + body(),
    "comment": b"{/* */}",
    "single quotes": b"{'prompt': 'a'}",
    "trailing comma": b'{"prompt": "a",}',
    "control character": b'{"prompt": "a\nb"}',
    "NUL": b"\0",
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "cut off UTF-8": b'{"prompt": "\xe2\x82"}',
    "latin-1": '{"prompt": "é"}'.encode("latin-1"),
    "deep lists": b"[" * DEPTH + b"]" * DEPTH,
    "deep lists, not closed": b"[" * DEPTH,
    "deep objects": b'{"a":' * DEPTH + b"1" + b"}" * DEPTH,
    "deep prompt": b'{"prompt":' + b"[" * DEPTH + b"]" * DEPTH + b"}",
    "deep metadata and no prompt": b'{"metadata":' + b"[" * 900 + b"]" * 900 + b"}",
    "huge number": b'{"prompt": [' + b"9" * 100_000 + b"]}",
    "huge exponent": b'{"prompt": "a", "temperature": 1e999999}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "top_p": -Infinity}',
    "unknown field": body(bogus=1),
    "unknown field with a long name": body(**{"x" * 100_000: 1}),
    "10,000 unknown fields": body(**{f"x{i}": "y" * 100 for i in range(10_000)}),
    "10,000 wrong tokens": body(prompt=["1" * 100, *[1] * 10_000]),
    "half a surrogate pair": b'{"prompt": "a", "\\ud800": 1}',
    "half a surrogate pair as value": b'{"prompt": "a", "n": "\\ud800"}',
    "no prompt": b"{}",
    "prompt of null": body(prompt=None),
    "prompt of an object": body(prompt={}),
    "mixed prompts": body(prompt=["a", 1]),
    "token of text": body(prompt=["1", 2]),
    "token out of range": body(prompt=[1000]),
    "negative token": body(prompt=[-1]),
    "truth value as token": body(prompt=[True]),
    "n of text": body(n="1"),
    "n of 0": body(n=0),
    "n of 10**30": body(n=10**30),
    "max_tokens of a fraction": body(max_tokens=1.5),
    "temperature of text": body(temperature="hot"),
    "negative temperature": body(temperature=-1),
    "stream of text": body(stream="true"),
    "logit_bias of a list": body(logit_bias=[1]),
    "stop of numbers": body(stop=[1]),
    "model of a number": body(model=1),
}
HEADERS = {
    "no type": (415, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"),
    "form": (415, request(body()).replace(b"application/json", b"application/x-www-form-urlencoded")),
    "plain text": (415, request(body()).replace(b"application/json", b"text/plain")),
    "multipart": (415, request(body()).replace(b"application/json", b"multipart/form-data; boundary=x")),
    "JSON of another name": (415, request(body()).replace(b"application/json", b"application/jsonp")),
    "gzip": (415, request(body(), "/v1/completions", "Content-Encoding: gzip")),
    "length of text": (400, request(body(), "/v1/completions", "Content-Length: x", length=False)),
    "negative length": (400, request(body(), "/v1/completions", "Content-Length: -1", length=False)),
    "two lengths": (400, request(body(), "/v1/completions", "Content-Length: 3")),
    "unknown transfer encoding": (400, request(b"", "/v1/completions", "Transfer-Encoding: br", length=False)),
    "chunk size of text": (400, request(b"x\r\n", "/v1/completions", "Transfer-Encoding: chunked", length=False)),
    "no HTTP": (400, b"hello\r\n\r\n"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
    "no host": (400, b"GET /health HTTP/1.1\r\n\r\n"),
    "space in a header's name": (400, b"GET /health HTTP/1.1\r\nHost: a\r\nA B: 1\r\n\r\n"),
    "NUL in a header": (400, b"GET /health HTTP/1.1\r\nHost: a\r\nA: \0\r\n\r\n"),
    "path not in ASCII": (400, "GET /é HTTP/1.1\r\nHost: a\r\n\r\n".encode()),
    "long path": (431, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"),
    "long header": (431, request(b"{}", "/v1/completions", f"A: {'a' * 100_000}")),
    "many headers": (431, request(b"{}", "/v1/completions", *[f"A{i}: b" for i in range(10_000)])),
    "long line without an end": (431, b"GET /" + b"a" * 500_000),
    "path with dots": (404, b"GET /v1/../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n"),
    "path with an encoded NUL": (404, b"GET /%00 HTTP/1.1\r\nHost: a\r\n\r\n"),
    "websocket": (404, b"GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", INVALID_BODIES)
@asynchronous
async def test_an_invalid_body_is_answered_with_an_error(kind: str) -> None:
    async with running() as server:
        status, headers, answer = await server.send(request(INVALID_BODIES[kind]))
        check_error(status, answer, 400)
        assert headers["content-type"] == "application/json"
        assert server.llm.widths == [] and (await server.post()).status_code == 200


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", HEADERS)
@asynchronous
async def test_an_invalid_request_is_answered_with_an_error(kind: str) -> None:
    async with running() as server:
        expected, data = HEADERS[kind]
        status, _, answer = await server.send(data)
        check_error(status, answer, expected)
        assert (await server.post()).status_code == 200


@asynchronous
async def test_invalid_requests_do_not_disturb_a_stream() -> None:
    is_open = asyncio.Event()
    llm = FakeLLM()
    llm.next = is_open.wait
    async with running(llm) as server:
        stream = asyncio.create_task(server.post({**COMPLETION, "stream": True}))
        await asyncio.gather(*(server.send(request(each)) for each in INVALID_BODIES.values()))
        await asyncio.gather(*(server.send(data) for _, data in HEADERS.values()))
        is_open.set()
        events = events_of((await stream).text)
        assert "".join(event["choices"][0]["text"] for event in events) == "abc"


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "Application/JSON", "application/json ;x=y"]
)
@asynchronous
async def test_json_is_accepted_by_all_its_names(content_type: str) -> None:
    async with running() as server:
        data = request(body()).replace(b"application/json", content_type.encode())
        assert (await server.send(data))[0] == 200


@asynchronous
async def test_the_name_of_the_wrong_field_is_given() -> None:
    async with running() as server:
        error = (await server.post({**COMPLETION, "temperature": "hot"})).json()["error"]
        assert error["param"] == "temperature" and "temperature" in error["message"] and "hot" not in error["message"]
