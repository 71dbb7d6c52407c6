"""One side of the measurement, as a process: `engine SETTINGS`, `raw URL` or `openai URL`.

It reads lines with prompts and a number of tokens, answers all prompts at once, and writes the times of all chunks.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

from benchmarks import Row

Prompts = list[list[int]]


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


async def raw(url: str, prompts: Prompts, num_tokens: int) -> list[tuple[list[float], int]]:
    """Send requests by sockets, and look only for the end of each stream."""
    host, _, port = url.removeprefix("http://").partition("/")[0].partition(":")

    async def stream(prompt: list[int]) -> tuple[list[float], int]:
        fields = body_of(prompt, num_tokens) | {"ignore_eos": True, "stream_options": {"include_usage": True}}
        body = json.dumps(fields).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        times, data = [], b""
        while b"data: [DONE]" not in data:
            part = await reader.read(2**16)
            if not part:
                raise ConnectionError(f"the server has closed the connection after {data[-300:]!r}")
            times.append(time.perf_counter())
            data = data[-2000:] + part
        writer.close()
        usage = json.loads(data[data.rindex(b'"usage":') + 8 :].partition(b"}}")[0] + b"}}")
        return times[1:-1], usage["completion_tokens"]  # less the head and the end

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


def main() -> None:
    """Answer the lines of stdin."""
    out, (kind, where) = os.fdopen(os.dup(1), "w"), sys.argv[1:]
    os.dup2(2, 1)
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
