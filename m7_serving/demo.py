"""Demo of m7, a server and its clients: `python -m m7_serving.demo`.

Without --prompt and --chat: a client and its stream, beside what the engine does for it; a dozen clients at once behind
one system prompt; a client that goes away; a picture over HTTP; requests that are rejected; and the end of the server,
which lets the last client finish. All clients are OpenAI's own (`pip install openai`). The other flags are those of the
server and of a request.
"""

import argparse
import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rich.console import Console

from m1_single_request import demo as m1
from m1_single_request.config import TraceConfig
from m1_single_request.errors import ConfigError
from m1_single_request.flags import config_of
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_readers import ConsoleReader, Records
from m7_serving import AsyncLLM
from m7_serving.__main__ import FLAGS as OF_THE_SERVER, configs_of
from m7_serving.config import ServerConfig
from m7_serving.demo_tour import Tour, answered
from m7_serving.server.run import serve

FLAGS: m1.Flags = {
    **{title: flags for title, flags in OF_THE_SERVER.items() if title != "server"},
    "sampling": m1.FLAGS["sampling"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    return m1.exit_status(run, m1.make_parser("m7_serving.demo", __doc__, FLAGS).parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Start a server, and run its clients: the tour, or the prompt or the chat that the flags request."""
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        raise ConfigError(f"the demo's clients need the package openai (pip install openai): {error}") from error
    params, records = config_of(args, SamplingParams), Records()
    level = args.trace or ("off" if args.prompt is None else "verbose")
    console_reader = () if level == "off" else (ConsoleReader(verbose=level == "verbose", console=console),)
    trace = TraceConfig(jsonl=args.trace_file, readers=(records, *console_reader))

    async def with_clients(url: str) -> None:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            if m1.is_tour(args):
                await Tour(client, records, console, params).run()
            else:
                await converse(client, params, console, args.prompt)

    asyncio.run(served(with_clients, args, trace))


async def served(clients: Callable[[str], Awaitable[None]], args: argparse.Namespace, trace: TraceConfig) -> None:
    """Start a server on a free port, run `clients` with its URL, and stop it as an operator would."""
    config = config_of(args, ServerConfig, port=0)
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start() -> AsyncLLM:
        return await AsyncLLM.start(max_requests=config.max_requests, trace_config=trace, **configs_of(args))

    serving = asyncio.create_task(serve(start, config, lambda address: url.set_result(f"{address}/v1")))
    try:
        futures: list[asyncio.Future[Any]] = [serving, url]
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if url.done():
            await clients(url.result())
    finally:
        if not serving.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await serving


async def converse(client: Any, params: SamplingParams, console: Console, prompt: str | None) -> None:
    """Answer the prompt, or one line after the other until /quit or the end of the input."""
    history: list[dict[str, str]] = []
    while (line := prompt or await asyncio.to_thread(m1.read_line)) != "/quit":
        history.append({"role": "user", "content": line or ""})
        history.append({"role": "assistant", "content": await answered(client, history, params, console)})
        if prompt is not None:
            return


if __name__ == "__main__":
    raise SystemExit(main())
