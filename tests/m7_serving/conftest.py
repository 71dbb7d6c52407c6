"""What m7's tests share: an event loop, and an engine of this process in it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from m7_serving import AsyncLLM, DisaggregationConfig

IN_PROCESS = DisaggregationConfig(both=1, transport="in_process")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """An event loop for the tests of a module."""
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def llm(runner: asyncio.Runner) -> Iterator[AsyncLLM]:
    """The model that ships, in this process; a test leaves it without requests."""
    made = runner.run(AsyncLLM.start(max_requests=200, disaggregation_config=IN_PROCESS))
    yield made
    runner.run(made.close())


async def is_idle(llm: AsyncLLM) -> bool:
    """Wait until an engine has no request, and all of its KV memory is free, or only cached."""
    for _ in range(500):
        stats: Any = await llm.stats()
        is_free = stats.available_size + stats.evictable_size == stats.max_total_tokens
        if is_free and not (stats.num_running or stats.num_waiting or llm.num_unfinished):
            return True
        await asyncio.sleep(0.01)
    return False
