"""A page at /status that shows the server at work, fed by the trace: requests as lanes, queues, KV memory.

A reader is attached to the trace of the router while a browser shows the page: without one the page costs nothing. The
page gets numbers and names, and never the text of a request. New in this milestone. vLLM and SGLang leave this to
Grafana.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from m1_single_request.errors import EngineError
from m1_single_request.tracer import TraceReader, TraceRecord
from m7_serving.async_llm import AsyncLLM

PAGE = (Path(__file__).parent / "status.html").read_text(encoding="utf-8")
INTERVAL_S = 0.25
MOST_EVENTS = 10_000
"""Events that are kept for a browser that does not read; the oldest are dropped."""
FIELDS = {
    "request_added": ("rid", "len"),
    "request_routed": ("rid", "decode"),
    "result": ("rid", "out_len"),
    "finish": ("rid", "reason", "out_len"),
}
"""Kinds of events that the page shows, and their fields."""


class StatusReader(TraceReader):
    """Keeps what the page shows until it is taken, by another thread."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)

    def read(self, record: TraceRecord) -> None:
        """Keep an event of one of the kinds."""
        event = record.event
        if names := FIELDS.get(event.kind):
            values = {name: getattr(event, name) for name in names}
            self._events.append({"time": record.time, "kind": event.kind, **values})

    def take(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]


async def updates(llm: AsyncLLM, is_draining: Callable[[], bool]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the totals of the engines, and the events since the last time, until the server shuts down."""
    reader = StatusReader()
    try:
        await llm.call(lambda core: core.tracer.attach(reader))
        while True:
            stats = await llm.stats()
            rates = {"hit_rate": stats.hit_rate, "accept_length": stats.accept_length}
            yield {"time": time.perf_counter(), "stats": asdict(stats) | rates, "events": reader.take()}
            if is_draining():  # later than the first update: an error, not a stream, would end the page
                return
            await asyncio.sleep(INTERVAL_S)
    finally:
        with suppress(EngineError):  # the engine has ended
            await llm.call(lambda core: core.tracer.detach(reader))
