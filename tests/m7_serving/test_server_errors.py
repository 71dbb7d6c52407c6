"""Errors of the server: status, OpenAI's shape, headers; before and inside a stream."""

import logging

import openai
import pytest

from m1_single_request.errors import (
    EngineClosedError,
    EngineDeadError,
    InvalidPromptError,
    PartError,
    PromptTooLongError,
)
from m6_multimodal_pd.errors import EngineLostError, RemoteError
from m7_serving.errors import EngineUnavailableError, ServerBusyError
from tests.m7_serving.fake_llm import FakeLLM, Pause, never
from tests.m7_serving.running import CHAT, COMPLETION, MODEL, asynchronous, check_error, events_of, running

SECRET = "m9.secret.ClassPath at /srv/secret.py"
ERRORS = {
    "too long": (PromptTooLongError("the prompt has 9 tokens"), 400, "context_length_exceeded", "the prompt has 9"),
    "prompt": (InvalidPromptError("token id 7"), 400, None, "token id 7"),
    "busy": (ServerBusyError("256 requests"), 503, "server_overloaded", "256 requests"),
    "restart": (EngineUnavailableError("again soon"), 503, "engine_unavailable", "again soon"),
    "lost": (EngineLostError(SECRET), 503, "engine_unavailable", "the engine"),
    "dead": (EngineDeadError(SECRET), 503, "engine_unavailable", "the engine"),
    "closed": (EngineClosedError(SECRET), 503, "engine_unavailable", "the engine"),
    "remote": (RemoteError(SECRET), 500, None, "the server failed"),
    "part": (PartError(SECRET), 500, None, "the server failed"),
    "bug": (KeyError(SECRET), 500, None, "the server failed"),
    "memory": (MemoryError(SECRET), 500, None, "the server failed"),
    "exit": (RuntimeError(SECRET), 500, None, "the server failed"),
}


def raising(error: Exception) -> Pause:
    async def pause() -> None:
        raise error

    return pause


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ERRORS)
@asynchronous
async def test_an_error_before_the_first_token_has_a_status(kind: str, stream: bool, path: str) -> None:
    error, status, code, text = ERRORS[kind]
    llm = FakeLLM()
    llm.admission = raising(error)
    async with running(llm) as server:
        body = COMPLETION if path == "/v1/completions" else CHAT
        response = await server.post({**body, "stream": stream}, path)
        found = check_error(response.status_code, response.json(), status)
        assert found["code"] == code and text in found["message"] and "secret" not in response.text
        assert ("retry-after" in response.headers) == (status == 503)
        assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("kind", ["lost", "bug", "prompt"])
@asynchronous
async def test_an_error_inside_a_stream_is_an_event(kind: str) -> None:
    error, status, code, text = ERRORS[kind]
    llm = FakeLLM()
    llm.error = error
    async with running(llm) as server:
        response = await server.post({**COMPLETION, "stream": True})
        *chunks, failed = events_of(response.text)
        assert response.status_code == 200 and [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b"]
        found = check_error(status, failed, status)
        assert found["code"] == code and text in found["message"] and "secret" not in response.text


@asynchronous
async def test_an_error_of_the_last_output_is_the_answer() -> None:
    llm = FakeLLM()
    llm.error = EngineLostError(SECRET)
    async with running(llm) as server:
        response = await server.post()
        check_error(response.status_code, response.json(), 503)


@asynchronous
async def test_an_unexpected_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    llm = FakeLLM()
    llm.admission = raising(KeyError(SECRET))
    async with running(llm) as server:
        with caplog.at_level(logging.DEBUG):
            await server.post()
            await server.post({**COMPLETION, "stream": True})
        errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(errors) == 2 and all(record.exc_info for record in errors)
        assert "secret" in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/tokenize", 405),
        ("HEAD", "/v1/completions", 405),
    ],
)
@asynchronous
async def test_an_unknown_path_or_method(method: str, path: str, status: int) -> None:
    async with running() as server:
        response = await server.client.request(method, path, json={})
        assert response.status_code == status
        if method != "HEAD":
            check_error(response.status_code, response.json(), status)
        assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@asynchronous
async def test_another_model_is_not_found(path: str) -> None:
    bodies = {"/v1/completions": COMPLETION, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]}}
    async with running() as server:
        response = await server.post({**bodies.get(path, CHAT), "model": "gpt-4" * 100}, path)
        error = check_error(response.status_code, response.json(), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


@asynchronous
async def test_the_served_model_has_the_name_of_the_configuration() -> None:
    async with running(served_model_name="org/name") as server:
        models = (await server.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["org/name"]
        for path in ("/v1/models/org/name", "/v1/models/org%2Fname"):
            assert (await server.get(path)).json()["max_model_len"] == 4096
        assert (await server.get("/v1/models/org")).status_code == 404
        assert (await server.post({**COMPLETION, "model": "org/name"})).json()["model"] == "org/name"


@asynchronous
async def test_health_needs_an_engine() -> None:
    async with running() as server:
        assert (await server.get("/health")).status_code == 200
        server.llm.is_serving = False
        response = await server.get("/health")
        check_error(response.status_code, response.json(), 503)


@asynchronous
async def test_a_request_that_takes_too_long_has_status_503() -> None:
    llm = FakeLLM()
    llm.first = never
    async with running(llm, request_timeout_s=0.1) as server:
        for stream in (False, True):
            response = await server.post({**COMPLETION, "stream": stream})
            assert check_error(response.status_code, response.json(), 503)["code"] == "request_timeout"
        assert llm.num_unfinished == 0


@asynchronous
async def test_a_stream_that_takes_too_long_ends_with_an_error() -> None:
    llm = FakeLLM()
    llm.next = never
    async with running(llm, request_timeout_s=0.1) as server:
        response = await server.post({**COMPLETION, "stream": True})
        _, failed = events_of(response.text)
        assert check_error(503, failed, 503)["code"] == "request_timeout"
        assert llm.num_unfinished == 0


@asynchronous
async def test_the_openai_client_knows_the_errors() -> None:
    async with running(api_key=["right"]) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="right", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="other", prompt="a")
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model=MODEL, prompt="")
            server.llm.error = EngineLostError("lost")
            with pytest.raises(openai.InternalServerError):
                await client.completions.create(model=MODEL, prompt="a")
            stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
            with pytest.raises(openai.APIError, match="the engine"):
                async for _ in stream:
                    pass
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


@asynchronous
async def test_the_documentation_describes_the_bodies() -> None:
    async with running() as server:
        page = (await server.get("/openapi.json")).json()
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            operation = page["paths"][path]["post"]
            schema = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            assert "model" in page["components"]["schemas"][schema.rpartition("/")[2]]["properties"]
            assert {"4XX", "5XX"} <= set(operation["responses"]) and "422" not in operation["responses"]
        assert (await server.get("/docs")).status_code == 200


@asynchronous
async def test_the_version_is_that_of_the_package() -> None:
    async with running() as server:
        assert set((await server.get("/version")).json()) == {"version"}
