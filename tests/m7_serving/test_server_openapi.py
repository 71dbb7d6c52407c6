"""`/openapi.json` describes the server as it is: types of answers, their bodies, and the prompts that it accepts."""

import asyncio
from typing import Any, cast

import pytest
from pydantic import TypeAdapter

from m7_serving import AsyncLLM
from m7_serving.openai import bodies
from tests.m7_serving.fake_llm import FakeLLM
from tests.m7_serving.running import CHAT, COMPLETION, asynchronous, running

MEDIA_TYPES = {
    ("post", "/v1/chat/completions"): {"application/json", "text/event-stream"},
    ("post", "/v1/completions"): {"application/json", "text/event-stream"},
    ("post", "/tokenize"): {"application/json"},
    ("post", "/detokenize"): {"application/json"},
    ("get", "/v1/models"): {"application/json"},
    ("get", "/v1/models/{model_id}"): {"application/json"},
    ("get", "/health"): {"application/json"},
    ("get", "/metrics"): {"text/plain"},
    ("get", "/status"): {"text/html"},
    ("get", "/version"): {"application/json"},
}
ANSWERS: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "/v1/chat/completions": (bodies.ChatCompletion, CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}),
    "/v1/completions": (bodies.Completion, COMPLETION | {"logprobs": 2, "echo": True, "max_tokens": 3}),
    "/tokenize": (bodies.Tokens, {"prompt": "a text", "return_token_strs": True}),
    "/detokenize": (bodies.Text, {"tokens": [1, 2]}),
    "/v1/models": (bodies.Models, None),
    "/v1/models/tiny-qwen3-vl": (bodies.Model, None),
}


@asynchronous
async def test_all_operations_are_described_with_the_types_of_their_answers() -> None:
    async with running() as served:
        paths = (await served.get("/openapi.json")).json()["paths"]
        found = {
            (method, path): set(operation["responses"]["200"]["content"])
            for path, methods in paths.items()
            for method, operation in methods.items()
        }
        assert found == MEDIA_TYPES
        for method, path in found:
            assert {"4XX", "5XX"} <= set(paths[path][method]["responses"])
        for path in ("/metrics", "/status", "/health", "/version", "/v1/models"):
            sent = (await served.get(path)).headers["content-type"].partition(";")[0]
            assert {sent} == MEDIA_TYPES["get", path]


@asynchronous
async def test_prompts_and_stops_are_described_as_they_are_accepted() -> None:
    async with running() as served:
        schemas = (await served.get("/openapi.json")).json()["components"]["schemas"]
        fields = schemas["CompletionRequest"]["properties"]
        kinds = {kind["type"]: kind for kind in fields["prompt"]["anyOf"] if kind["type"] == "string"}
        assert kinds["string"]["minLength"] == 1
        assert all(kind["minItems"] == 1 for kind in fields["prompt"]["anyOf"] if kind["type"] == "array")
        assert {kind["type"] for kind in fields["stop"]["anyOf"]} == {"string", "array"}


@pytest.mark.parametrize("path", ANSWERS)
def test_bodies_are_as_described(path: str, llm: AsyncLLM, runner: asyncio.Runner) -> None:
    body_type, body = ANSWERS[path]

    async def answer() -> Any:
        async with running(cast(FakeLLM, llm)) as served:
            sent = await (served.get(path) if body is None else served.post(body, path))
            assert sent.status_code == 200, sent.text
            return sent.json()

    found = runner.run(answer())
    assert TypeAdapter(body_type).validate_python(found, strict=True) == found  # unknown keys would be dropped
