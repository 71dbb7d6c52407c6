"""Metrics: counters are the sums of the usages, gauges are the engine's, and each server has its own."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from m1_single_request.errors import InvalidPromptError
from m7_serving.server.metrics import Metrics
from tests.m7_serving.fake_llm import FakeLLM, never
from tests.m7_serving.running import CHAT, COMPLETION, MODEL, Running, asynchronous, events_of, request, running, until


async def read(server: Running) -> dict[str, float]:
    """Return the samples of the page, without the buckets of histograms."""
    response = await server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(response.text)
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    assert all(sample.labels == {"model_name": MODEL} for sample in samples)
    return {sample.name.removeprefix("sglang:"): sample.value for sample in samples}


async def usages(server: Running, bodies: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for path, body in bodies:
        response = await server.post(body, path)
        assert response.status_code == 200
        found.append(events_of(response.text)[-1]["usage"] if body.get("stream") else response.json()["usage"])
    return found


@asynchronous
async def test_the_counters_are_the_sums_of_the_usages() -> None:
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    bodies = [
        ("/v1/completions", COMPLETION),
        ("/v1/completions", {**COMPLETION, **streamed}),
        ("/v1/completions", {**COMPLETION, "n": 3}),
        ("/v1/completions", {**COMPLETION, "prompt": ["a", "b"], "n": 2, **streamed}),
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 0, "echo": True}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "n": 2, **streamed}),
    ]
    llm = FakeLLM()
    llm.input_processor.tokenizer.decode = lambda *_, **__: "text"
    async with running(llm) as server:
        found = await usages(server, bodies)
        page = await read(server)
        assert page["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in found)
        assert page["generation_tokens_total"] == sum(usage["completion_tokens"] for usage in found)
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in found)
        assert page["cached_tokens_total"] == cached > 0
        assert page["num_requests_total"] == 8 and page["num_aborted_requests_total"] == 0
        assert page["time_to_first_token_seconds_count"] == page["e2e_request_latency_seconds_count"] == 8
        assert page["time_to_first_token_seconds_sum"] <= page["e2e_request_latency_seconds_sum"]
        outputs = 1 + 1 + 3 + 4 + 1 + 2
        assert page["inter_token_latency_seconds_count"] == 2 * outputs


@asynchronous
async def test_the_gauges_are_the_engines() -> None:
    async with running() as server:
        server.llm.num_unfinished = 7
        page = await read(server)
        assert page["num_running_reqs"] == 7 and page["num_queue_reqs"] == 0
        assert page["num_used_tokens"] == 10 and page["token_usage"] == pytest.approx(0.1)
        assert page["cache_hit_rate"] == page["gen_throughput"] == 0


@asynchronous
async def test_a_request_whose_client_left_is_counted_as_aborted() -> None:
    for body in ({**COMPLETION, "prompt": ["a", "b"]}, {**COMPLETION, "prompt": ["a", "b"], "stream": True}):
        llm = FakeLLM()
        llm.next = never
        async with running(llm) as server:
            _, writer = await server.connect()
            writer.write(request(json.dumps(body).encode()))
            await until(lambda llm=llm: llm.widths)
            await asyncio.sleep(0)
            writer.close()
            await llm.end.wait()
            page = await read(server)
            assert page["num_aborted_requests_total"] == 2 and page["num_requests_total"] == 0
            assert page["generation_tokens_total"] == 0


@asynchronous
async def test_a_rejected_request_is_not_counted() -> None:
    async def reject() -> None:
        raise InvalidPromptError("no")

    llm = FakeLLM()
    llm.admission = reject
    async with running(llm) as server:
        assert (await server.post()).status_code == 400
        page = await read(server)
        assert page["num_requests_total"] == page["num_aborted_requests_total"] == 0


@asynchronous
async def test_the_page_needs_an_engine() -> None:
    async with running() as server:
        await server.llm.close()
        assert (await server.get("/metrics")).status_code == 503


def test_the_page_is_there_while_no_engine_is() -> None:
    stats = asyncio.run(FakeLLM().stats())
    page = Metrics("a").page(replace(stats, max_total_tokens=0, available_size=0, evictable_size=0))
    assert b'sglang:token_usage{model_name="a"} 0.0' in page


def test_two_servers_have_metrics_of_their_own() -> None:
    assert Metrics("a").registry is not Metrics("a").registry


def test_the_throughput_is_that_since_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = asyncio.run(FakeLLM().stats())
    times = iter([0.0, 2.0, 2.5, 4.0])
    monkeypatch.setattr("m7_serving.server.metrics.time.monotonic", lambda: next(times))
    metrics = Metrics("a")

    def throughput(num_tokens: int) -> float:
        object.__setattr__(stats, "num_output_tokens", num_tokens)
        (line,) = [line for line in metrics.page(stats).decode().splitlines() if line.startswith("sglang:gen_through")]
        return float(line.split()[1])

    assert [throughput(100), throughput(120), throughput(130)] == [50, 50, 15]


@asynchronous
async def test_the_dashboard_shows_metrics_that_there_are() -> None:
    """And all of them: none is measured for nobody."""
    dashboard = json.loads((Path(__file__).parents[2] / "examples" / "grafana.json").read_text("utf-8"))
    expressions = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    async with running() as server:
        page = (await server.get("/metrics")).text
    kinds = dict(re.findall(r"^# TYPE sglang:(\w+) (counter|gauge|histogram)$", page, re.M))
    names = {
        f"{name}_bucket" if kind == "histogram" else name
        for name, kind in kinds.items()
        if not name.endswith("_created")
    }
    shown = set(re.findall(r"sglang:(\w+)", expressions))
    assert shown <= names
    assert names - shown == {"num_used_tokens", "gen_throughput"}, "the same as token_usage and the tokens"
