"""The page /status: what it is sent, that it costs nothing without a viewer, and how a browser shows it."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, cast

import pytest
from openai import OpenAI

from m1_single_request.events import Abort
from m1_single_request.output_events import Finish
from m1_single_request.tracer import TraceRecord
from m7_serving import AsyncLLM, SamplingParams
from m7_serving.server.status import MOST_EVENTS, PAGE, StatusReader, updates
from tests.m7_serving.fake_llm import FakeLLM
from tests.m7_serving.running import asynchronous, running
from tests.m7_serving.servers import chat, serving
from tests.m7_serving.test_kills import eventually

PAINTED = "canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some(Boolean)"
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


@pytest.mark.exhaustive
@pytest.mark.browser
def test_a_browser_shows_lanes(browser: Any) -> None:
    """Of a server while it works: a lane for each request, an aborted one, the numbers of the tiles, a lost server."""
    with serving("--max-num-seqs", "4") as server, OpenAI(base_url=server.url, api_key="none") as client:
        asked = chat(max_tokens=1000, extra_body={"ignore_eos": True})
        with browser.new_page() as page, ThreadPoolExecutor(12) as pool:
            page.goto(f"{server.root}/status")
            assert eventually(lambda: page.evaluate("find('state').textContent") == "")
            assert page.evaluate("canvas = find('lanes'); canvas.dataset.requests") == "0"
            answers = [pool.submit(lambda: client.chat.completions.create(**asked)) for _ in range(11)]
            stream = client.chat.completions.create(**asked, stream=True)
            next(iter(stream))
            stream.close()
            assert eventually(lambda: page.evaluate("find('tiles').firstChild.textContent") == "4running")
            assert eventually(lambda: page.evaluate("canvas.dataset.requests") == "12")  # lanes stay for 30 s
            for each in answers:
                assert each.result().usage.completion_tokens == 1000
            ended = "[...requests.values()].map(one => one.reason).sort().join()"
            assert eventually(lambda: page.evaluate(ended) == ",".join(["abort", *["length"] * 11]))
            assert page.evaluate("[...requests.values()].every(one => one.prompt > 0 && one.engine === 'both-0')")
            assert page.evaluate(PAINTED)
            assert eventually(lambda: page.evaluate("find('tiles').firstChild.textContent") == "0running")
            server.stop()
            assert eventually(lambda: "does not answer" in page.evaluate("find('state').textContent"))
