"""API keys: what they guard, and what is not a key."""

import pytest

from m7_serving.server.auth import OPEN
from tests.m7_serving.fake_llm import FakeLLM
from tests.m7_serving.running import CHAT, COMPLETION, asynchronous, check_error, request, running

GUARDED = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/anything": {},
}
KEYS = ("first-key", "second-key")
WRONG = (
    None,
    "",
    "first-key",
    "Basic first-key",
    "Bearer",
    "Bearer ",
    "Bearer first",
    "Bearer first-keyy",
    "Bearer FIRST-KEY",
    "Bearer first-key second-key",
    "Bearer x" + "y" * 10_000,
    "Bearer \xe9",
)


@pytest.mark.parametrize("header", WRONG)
@asynchronous
async def test_a_wrong_key_is_rejected(header: str | None) -> None:
    async with running(api_key=KEYS) as server:
        lines = [] if header is None else [f"Authorization: {header}"]
        for path in GUARDED:
            status, headers, body = await server.send(request(b"{}", path, *lines))
            error = check_error(status, body, 401)
            assert error["code"] == "invalid_api_key" and headers["www-authenticate"] == "Bearer"
        assert (await server.get("/v1/models")).status_code == 401
        assert server.llm.widths == []


@pytest.mark.parametrize("path", ["/v1%2fmodels", "/%76%31/models", "/v1//models", "/v1/models?key=first-key"])
@asynchronous
async def test_no_other_spelling_of_a_path_is_a_way_around_the_key(path: str) -> None:
    async with running(api_key=KEYS) as server:
        data = f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
        assert (await server.send(data))[0] == 401


@asynchronous
async def test_two_keys_in_one_request_are_rejected() -> None:
    async with running(api_key=KEYS) as server:
        lines = [f"Authorization: Bearer {key}" for key in KEYS]
        assert (await server.send(request(b"{}", "/v1/completions", *lines)))[0] == 401


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@asynchronous
async def test_each_key_is_accepted(key: str, scheme: str) -> None:
    async with running(api_key=KEYS) as server:
        response = await server.post(headers={"Authorization": f"{scheme} {key}"})
        assert response.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/openapi.json", "/status", "/docs", "/redoc"])
@asynchronous
async def test_operators_need_no_key(path: str) -> None:
    async with running(api_key=KEYS) as server:
        assert (await server.get(path)).status_code == 200


@asynchronous
async def test_all_routes_but_those_without_a_model_are_guarded() -> None:
    """A new route is guarded until it is named as open."""
    async with running(api_key=KEYS) as server:
        assert set(server.app.openapi()["paths"]) - OPEN == {
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/models",
            "/v1/models/{model_id}",
            "/tokenize",
            "/detokenize",
        }
        assert (await server.get("/unknown")).status_code == 401


@asynchronous
async def test_the_body_of_a_request_without_a_key_is_not_read() -> None:
    async with running(FakeLLM(), api_key=KEYS) as server:
        reader, writer = await server.connect()
        writer.write(request(b"", "/v1/completions", "Content-Length: 1000000", length=False))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 401 " in head and b"connection: close" in head
        writer.close()
