"""The routes of the server: OpenAI's API, and what operators need.

A route checks the name of the model and returns a response around a coroutine of `openai/` (a whole answer) or a
generator (a stream); it runs while the response is sent (`responses.py`). New in this milestone. vLLM:
`entrypoints/openai/api_server.py`; SGLang: `entrypoints/http_server.py`.
"""

import time
import uuid
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from m1_single_request.errors import shown
from m6_multimodal_pd.config import DEFAULT_MODEL
from m7_serving.async_llm import AsyncLLM
from m7_serving.config import ServerConfig
from m7_serving.errors import EngineUnavailableError, ServerBusyError
from m7_serving.openai import chat, completions, tokens
from m7_serving.openai.bodies import ChatCompletion, Completion, Model, Models, Text, Tokens
from m7_serving.openai.deltas import answer, chunks
from m7_serving.openai.requests import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from m7_serving.server import status
from m7_serving.server.auth import RequireKey
from m7_serving.server.error_shape import HANDLERS, failure
from m7_serving.server.limits import Limits
from m7_serving.server.metrics import Metrics
from m7_serving.server.responses import StreamedResponse, WholeResponse

Maker = Callable[..., Any]
ERROR_FIELDS = {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")}
ERROR_SCHEMA = {"type": "object", "properties": {"error": {"type": "object", "properties": ERROR_FIELDS}}}
ERROR_RESPONSE = {"description": "Error", "content": {"application/json": {"schema": ERROR_SCHEMA}}}
OR_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {StreamedResponse.media_type: {}}}}


def make_app(llm: AsyncLLM, config: ServerConfig) -> FastAPI:
    """Return the ASGI application that serves `llm`. While `app.state.is_draining` it starts no request."""
    name = served_name(llm, config)
    metrics = Metrics(name)
    app = FastAPI(
        title="Stepwise",
        version=version("stepwise-llm"),
        redirect_slashes=False,
        exception_handlers=HANDLERS,
        responses={"4XX": ERROR_RESPONSE, "5XX": ERROR_RESPONSE},
    )
    app.state.is_draining = False
    app.include_router(model_routes(app, llm, config, metrics, name))
    app.include_router(state_routes(app, llm, metrics, name))
    if config.api_key:
        app.add_middleware(RequireKey, keys=config.api_key)
    app.add_middleware(Limits, config=config)  # the last one is the first that a request meets
    return app


def served_name(llm: AsyncLLM, config: ServerConfig) -> str:
    """Return the name of the model in requests: as configured, or the name of the included model, or the path or hub id
    of another one."""
    model = llm.config.model.model
    return config.served_model_name or (DEFAULT_MODEL.name if model == DEFAULT_MODEL else str(model))


def model_routes(app: FastAPI, llm: AsyncLLM, config: ServerConfig, metrics: Metrics, name: str) -> APIRouter:
    """Return the routes that run the model or its tokenizer."""
    router, timeout_s = APIRouter(), config.request_timeout_s

    def generated(make: Maker, request: ChatCompletionRequest | CompletionRequest) -> Response:
        if request.model not in (None, name):
            return unknown_model(request.model)
        if app.state.is_draining:
            raise ServerBusyError("the server is shutting down")
        call = partial(make, llm, request, model=name, request_id=uuid.uuid4().hex, watch=metrics.watch)
        return StreamedResponse(chunks(call), timeout_s) if request.stream else WholeResponse(answer(call), timeout_s)

    def converted(convert: Maker, request: TokenizeRequest | DetokenizeRequest) -> Response:
        if request.model not in (None, name):
            return unknown_model(request.model)
        return WholeResponse(convert(llm, request), timeout_s)

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=OR_STREAM)
    async def create_chat_completion(request: ChatCompletionRequest) -> Response:
        """Answer a conversation."""
        return generated(chat.generation, request)

    @router.post("/v1/completions", response_model=Completion, responses=OR_STREAM)
    async def create_completion(request: CompletionRequest) -> Response:
        """Continue prompts."""
        return generated(completions.generation, request)

    @router.post("/tokenize", response_model=Tokens)
    async def tokenize(request: TokenizeRequest) -> Response:
        """Return the tokens of a text or a conversation."""
        return converted(tokens.tokenize, request)

    @router.post("/detokenize", response_model=Text)
    async def detokenize(request: DetokenizeRequest) -> Response:
        """Return the text of tokens."""
        return converted(tokens.detokenize, request)

    return router


def state_routes(app: FastAPI, llm: AsyncLLM, metrics: Metrics, name: str) -> APIRouter:
    """Return the routes that show the state of the server."""
    router = APIRouter()
    model = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "stepwise",
        "max_model_len": llm.input_processor.max_model_len,
    }

    @router.get("/v1/models", response_model=Models)
    async def list_models() -> dict[str, Any]:
        """Return the served models."""
        return {"object": "list", "data": [model]}

    @router.get("/v1/models/{model_id:path}", response_model=Model)
    async def retrieve_model(model_id: str) -> Response | dict[str, Any]:
        """Return a served model."""
        return model if model_id == name else unknown_model(model_id)

    @router.get("/health", response_model=None)
    async def health() -> dict[str, str]:
        """Return 200 while the engines serve, also while `max_requests` are unfinished; else 503."""
        if app.state.is_draining or not llm.is_serving:
            raise EngineUnavailableError("the server does not answer requests now")
        return {}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        """Return the metrics for Prometheus."""
        return Response(metrics.page(await llm.stats()), media_type=CONTENT_TYPE_LATEST)

    @router.get("/status", response_class=HTMLResponse)
    async def show_status() -> Response:
        """Return a page that shows the server at work."""
        return HTMLResponse(status.PAGE)

    @router.get("/status/events", include_in_schema=False)
    async def stream_status() -> Response:
        """Return the events of that page."""
        return StreamedResponse(status.updates(llm, lambda: app.state.is_draining), timeout_s=None)

    @router.get("/version", response_model=None)
    async def read_version() -> dict[str, str]:
        """Return the version of the server."""
        return {"version": version("stepwise-llm")}

    return router


def unknown_model(name: str | None) -> Response:
    """Return the answer to a request for a model that is not served."""
    return failure(404, f"the model {shown(name)} is not served here", param="model", code="model_not_found").response
