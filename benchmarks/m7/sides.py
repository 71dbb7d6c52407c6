"""One side of a measurement, as a process: `engine SETTINGS`, `raw URL`, `openai URL` or `slow URL`.

It reads lines with prompts and a number of tokens, answers all prompts at once, and writes the times of all chunks.
"""

import asyncio
import json
import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, TextIO

from benchmarks import Row

Prompts = list[list[int]]
OK = b"HTTP/1.1 200"


def engine(settings: Row, prompts: Prompts, num_tokens: int, state: dict[str, Any]) -> tuple[list[list[float]], int]:
    """Run the steps of an engine of this process."""
    import torch

    from m6_multimodal_pd import LLMEngine, ModelConfig, SamplingParams

    if not state:
        torch.set_num_threads(2 if settings else 1)  # as the server has it
        state["engine"] = LLMEngine(model_config=ModelConfig(**settings))
    llm, params = state["engine"], SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    ids = [llm.add_request(prompt, params) for prompt in prompts]
    times: dict[str, list[float]] = {request_id: [] for request_id in ids}
    total = 0
    while llm.has_unfinished_requests():
        changed = llm.step()
        now = time.perf_counter()
        for request_id, output in changed.items():
            times[request_id].append(now)
            total += len(output.token_ids) if output.finished else 0
    return list(times.values()), total


def body_of(prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """Return the fields of a request that OpenAI's API has."""
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}


def address_of(url: str) -> tuple[str, int]:
    """Return the host and the port of a server on this machine."""
    host, _, port = url.removeprefix("http://").partition("/")[0].partition(":")
    return host, int(port)


def posted(fields: dict[str, Any]) -> bytes:
    """Return the bytes of a request."""
    body = json.dumps(fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def raw(url: str, prompts: Prompts, num_tokens: int) -> list[tuple[list[float], int]]:
    """Send requests by sockets, and look only for the end of each stream."""

    async def stream(prompt: list[int]) -> tuple[list[float], int]:
        reader, writer = await asyncio.open_connection(*address_of(url))
        more = {"ignore_eos": True, "stream_options": {"include_usage": True}}
        writer.write(posted(body_of(prompt, num_tokens) | more))
        times, data = [], b""
        while b"data: [DONE]" not in data:
            part = await reader.read(2**16)
            if not part:
                raise ConnectionError(f"the server has closed the connection after {data[-300:]!r}")
            times.append(time.perf_counter())
            data = data[-2000:] + part
        writer.close()
        number = re.findall(rb'"completion_tokens": ?(\d+)', data)[-1]
        return times[1:-1], int(number)  # less the head and the end

    return await asyncio.gather(*map(stream, prompts))


async def official(url: str, prompts: Prompts, num_tokens: int) -> list[tuple[list[float], int]]:
    """Send requests by OpenAI's client."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

        async def stream(prompt: list[int]) -> tuple[list[float], int]:
            options: Any = {"stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
            times, usage = [], None
            async for chunk in await client.completions.create(model=name, **body_of(prompt, num_tokens), **options):
                times.append(time.perf_counter())
                usage = chunk.usage
            assert usage is not None
            return times[:-2], usage.completion_tokens  # less the end and the usage

        name = (await client.models.list()).data[0].id
        return await asyncio.gather(*map(stream, prompts))


def hold_streams(
    url: str, prompts: Prompts, num_tokens: int, num_large: int, large_tokens: int
) -> list[tuple[socket.socket, int]]:
    """Send requests on sockets with a small buffer, and read that each is answered. A large answer has eight outputs.

    Returns each socket, and how many bytes to read at a time: of a large answer so many that the server finds within
    its time limit that some were read. Raises `ConnectionError` if a request is rejected.
    """
    opened = []
    for number, prompt in enumerate(prompts):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(address_of(url))
        large = {"logprobs": 20, "max_tokens": large_tokens, "n": 8} if number < num_large else {}
        sock.sendall(posted(body_of(prompt, num_tokens) | {"ignore_eos": True} | large))
        opened.append((sock, 256 if large else 1))
    for sock, _ in opened:
        if (head := sock.recv(len(OK), socket.MSG_WAITALL)) != OK:
            raise ConnectionError(f"the server answers {head!r}")
    return opened


def read_slowly(opened: list[tuple[socket.socket, int]]) -> None:
    """Read a little of each stream every half second, until one ends."""
    with suppress(ConnectionError):
        while all(sock.recv(size) for sock, size in opened):
            time.sleep(0.5)


def slow(out: TextIO, url: str) -> None:
    """Hold streams, and answer each line with whether all are still open."""
    thread = None
    for line in sys.stdin:
        if thread is None:
            thread = threading.Thread(target=read_slowly, args=[hold_streams(url, *json.loads(line))], daemon=True)
            thread.start()
        out.write(json.dumps({"holds": thread.is_alive()}) + "\n")
        out.flush()


def main() -> None:
    """Answer the lines of stdin."""
    out, (kind, where) = os.fdopen(os.dup(1), "w"), sys.argv[1:]
    os.dup2(2, 1)
    if kind == "slow":
        return slow(out, where)
    state: dict[str, Any] = {}
    for line in sys.stdin:
        prompts, num_tokens = json.loads(line)
        began, worked = time.perf_counter(), time.process_time()
        if kind == "engine":
            times, total = engine(json.loads(where), prompts, num_tokens, state)
        else:
            found = asyncio.run({"raw": raw, "openai": official}[kind](where, prompts, num_tokens))
            times, total = [own for own, _ in found], sum(number for _, number in found)
        seconds, cpu = time.perf_counter() - began, time.process_time() - worked
        answer = {"seconds": seconds, "times": times, "num_tokens": total, "cpu": {"client": cpu}}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
