"""The page /status: what it is sent, that it costs nothing without a viewer, and how a browser shows it."""

import asyncio
import json
from contextlib import aclosing
from typing import Any, cast

from m1_single_request.events import Abort
from m1_single_request.output_events import Finish
from m1_single_request.tracer import TraceRecord
from m7_serving import AsyncLLM, SamplingParams
from m7_serving.server.status import MOST_EVENTS, PAGE, StatusReader, updates
from tests.m7_serving.fake_llm import FakeLLM
from tests.m7_serving.running import asynchronous, running

SECRET = "What is a KV cache?"


async def answer(llm: AsyncLLM, **fields: Any) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    async for _ in llm.generate(SECRET, params, **fields):
        pass


def test_the_page_gets_the_requests_and_the_totals_and_no_text(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def act() -> list[dict[str, Any]]:
        async with aclosing(updates(llm, lambda: False)) as stream:
            await anext(stream)
            await answer(llm, request_id="seen")
            return [await anext(stream), await anext(stream)]

    sent = runner.run(act())
    events = [event for update in sent for event in update["events"]]
    assert {event["rid"] for event in events} == {"seen"}
    kinds = [event["kind"] for event in events]
    assert kinds[:2] == ["request_added", "request_routed"] and kinds[-1] == "finish" and kinds.count("result") > 1
    assert events[-1]["out_len"] == 20 and events[-1]["reason"] == "length"
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert sent[-1]["stats"]["max_total_tokens"] > 0 and "hit_rate" in sent[-1]["stats"]
    shown = {"time", "kind", "rid", "len", "decode", "out_len", "reason"}
    assert {name for event in events for name in event} == shown, "numbers and names, and no text of a request"


def test_a_page_that_is_opened_while_the_server_shuts_down_gets_one_update(
    runner: asyncio.Runner, llm: AsyncLLM
) -> None:
    async def act() -> int:
        return len([update async for update in updates(llm, lambda: True)])

    assert runner.run(act()) == 1


def test_without_a_viewer_nothing_is_traced(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def readers() -> int:
        return await llm.call(lambda core: len(core.tracer.readers))

    async def act() -> list[int]:
        found = [await readers()]
        async with aclosing(updates(llm, lambda: False)) as stream:
            await anext(stream)
            found.append(await readers())
        return [*found, await readers()]

    assert runner.run(act()) == [0, 1, 0]


def test_a_viewer_that_reads_nothing_costs_little_memory() -> None:
    reader, event = StatusReader(), Finish(rid="a", reason="stop", matched=None, why="", out_len=1)
    for number in range(MOST_EVENTS + 5):
        reader.read(TraceRecord(0, float(number), event))
    assert [event["time"] for event in reader.take()] == [float(number) for number in range(5, MOST_EVENTS + 5)]


def test_a_kind_that_the_page_does_not_show_is_not_kept() -> None:
    reader = StatusReader()
    reader.read(TraceRecord(0, 1.0, Abort(rid="a", state="running")))
    assert reader.take() == []


def test_the_events_of_the_page_are_a_stream_of_the_server(runner: asyncio.Runner, llm: AsyncLLM) -> None:
    async def act() -> list[Any]:
        async with running(cast(FakeLLM, llm)) as server:
            server.app.state.is_draining = True  # so that it ends by itself
            return (await server.get("/status/events")).text.splitlines()

    first, *_, last = filter(None, runner.run(act()))
    assert json.loads(first.removeprefix("data: "))["stats"] and last == "data: [DONE]"


@asynchronous
async def test_the_page_loads_nothing_from_elsewhere() -> None:
    async with running() as server:
        page = await server.get("/status")
        assert page.text == PAGE and page.headers["content-type"].startswith("text/html")
        assert "http://" not in PAGE and "https://" not in PAGE and PAGE.count("<script") == 1
