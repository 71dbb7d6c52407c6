"""The trace that the page of milestone 7 explains: one request, from the bytes of its client to its first token.

Server, engine and client are in one process. The notes are in the order of time, without times: the request has one
output token, so that no two threads are at work for it at once.
"""

import asyncio
import textwrap

from benchmarks.texts import message
from m6_multimodal_pd import TraceConfig
from m7_serving import AsyncLLM
from notebooks.journey import IN_PROCESS, Journey, serving

REQUEST = {"messages": [message("What is prefill?")], "max_tokens": 1, "stream": True}


async def follow() -> Journey:
    """Return the notes on a request."""
    journey = Journey()
    trace = TraceConfig(readers=(journey,))
    llm = await AsyncLLM.start(disaggregation_config=IN_PROCESS, trace_config=trace)
    async with llm, serving(llm) as served:
        with journey.watching():
            async for event in served.events("/v1/chat/completions", REQUEST):
                journey.note_event(event)
    return journey


def traced_steps() -> str:
    """Return the notes on a request, a line for each."""
    lines = []
    for _, place, text in asyncio.run(follow()).notes:
        lines += textwrap.wrap(f"{place:<13}{text}", 84, subsequent_indent=" " * 13)
    return "\n".join(lines) + "\n"
