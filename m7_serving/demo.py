"""Demo of m7, a server and its clients: `python -m m7_serving.demo`.

Without --prompt and --chat: a client and its stream, beside what the engine does for it; a dozen clients at once behind
one system prompt; a client that goes away; a picture over HTTP; requests that are rejected; and the end of the server,
which lets the last client finish. All clients are OpenAI's own (`pip install openai`). The other flags are those of the
engine and of a request, and the limits of the server.
"""

import argparse
import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from rich.console import Console

from m1_single_request import demo as m1
from m1_single_request.errors import ConfigError
from m1_single_request.flags import config_of
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_readers import Records
from m6_multimodal_pd.errors import EngineLostError
from m7_serving import AsyncLLM
from m7_serving.__main__ import CLASSES, FLAGS as OF_THE_SERVER, configs_of
from m7_serving.config import ServerConfig

FLAGS: m1.Flags = {
    **{title: flags for title, flags in OF_THE_SERVER.items() if title not in ("server", "trace")},
    "sampling": m1.FLAGS["sampling"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    return m1.exit_status(run, m1.make_parser("m7_serving.demo", __doc__, FLAGS).parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Start a server, and run its clients: the tour, or the prompt or the chat that the flags request."""
    try:
        from openai import AsyncOpenAI

        from m7_serving.demo_tour import Chat, Tour
        from m7_serving.server.run import serve
    except ImportError as error:
        raise ConfigError(f'the demo needs more packages (pip install "stepwise-llm[serve]" openai): {error}') from None
    params, records = config_of(args, SamplingParams), Records()
    trace = m1.trace_of(args, console, CLASSES["trace"])
    trace = replace(trace, readers=(records, *trace.readers))

    async def with_clients(url: str) -> None:
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            (model,) = (await client.models.list()).data
            common = (client, model.id, params, console)
            await (Tour(*common, records).run() if m1.is_tour(args) else Chat(*common).run(args.prompt))

    config = config_of(args, ServerConfig, port=0)
    start = partial(AsyncLLM.start, max_requests=config.max_requests, **configs_of(args) | {"trace_config": trace})
    asyncio.run(beside(with_clients, partial(serve, start, config)))


async def beside(
    clients: Callable[[str], Awaitable[None]], serve: Callable[[Callable[[str], None]], Awaitable[bool]]
) -> None:
    """Start a server in this event loop, run its clients with its URL, and stop it as an operator would. Ctrl-C ends
    both."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run_clients() -> None:
        await clients(f"{await url}/v1")

    tasks = [asyncio.ensure_future(run_clients()), asyncio.ensure_future(serve(url.set_result))]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not tasks[1].done():
        os.kill(os.getpid(), signal.SIGTERM)
    tasks[0].cancel()
    if not await tasks[1]:
        raise EngineLostError("the demo ends, because no engine is left")
    with suppress(asyncio.CancelledError):
        await tasks[0]


if __name__ == "__main__":
    raise SystemExit(main())
