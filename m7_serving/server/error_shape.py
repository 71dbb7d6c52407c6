"""Errors in the form of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`, and their status.

Clients get the text of errors that they caused, or that ask them to try later, in bounded size; of all others a fixed
text, and the log has the rest.
New in this milestone. vLLM: `ErrorResponse`, whose `type` is a name of the status; SGLang: the same, without `error`
around it.
"""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from m1_single_request.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    EngineError,
    EngineUsageError,
    InvalidRequestError,
    ModelLoadError,
    PromptTooLongError,
)
from m4_radix_cache.errors import DiskError
from m6_multimodal_pd.errors import EngineLostError, PeerLostError, TransferError
from m7_serving.errors import EngineUnavailableError, ServerBusyError
from m7_serving.openai.fields import InvalidFieldError
from m7_serving.openai.requests import first_problem

LONGEST_MESSAGE = 2000  # characters
LONGEST_FIELD = 200
RETRY_AFTER = {"Retry-After": "1"}  # seconds
ENGINE_ERRORS = (EngineLostError, PeerLostError, TransferError, EngineDeadError, EngineClosedError)
logger = logging.getLogger(__name__)


class Failure(NamedTuple):
    """Status, body and headers of an answer to a request that has failed."""

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def response(self) -> Response:
        """The failure as an answer."""
        return Response(msgspec.json.encode(self.body), self.status, self.headers, "application/json")


def failure(
    status: int, message: str, headers: Mapping[str, str] = {}, *, param: str | None = None, code: str | None = None
) -> Failure:
    """Return the failure with this message. `param`: the field of the request that caused it."""
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    field = None if param is None else _bounded(param, LONGEST_FIELD)
    error = {"message": _bounded(message, LONGEST_MESSAGE), "type": kind, "param": field, "code": code}
    return Failure(status, {"error": error}, headers)


def failure_of(error: Exception) -> Failure:
    """Return the failure that an error means to a client. The log gets an error that no client has caused."""
    match error:
        case RequestValidationError():
            return _invalid_body(error)
        case InvalidFieldError():
            return failure(400, str(error), param=error.param, code=error.code)
        case PromptTooLongError():
            return failure(400, str(error), code="context_length_exceeded")
        case InvalidRequestError() | ConfigError() | ModelLoadError():  # the last two are an operator's
            return failure(400, str(error))
        case EngineUsageError() if not isinstance(error, EngineClosedError):
            return failure(409, str(error))
        case HTTPException():
            return failure(error.status_code, error.detail, error.headers or {})
        case ServerBusyError():
            return failure(503, str(error), RETRY_AFTER, code="server_overloaded")
        case EngineUnavailableError():
            return failure(503, str(error), RETRY_AFTER, code="engine_unavailable")
        case DiskError():  # an operator's
            return failure(503, str(error), RETRY_AFTER, code="disk_unavailable")
        case TimeoutError():
            return failure(503, "the request took longer than the server allows", code="request_timeout")
    is_engines = isinstance(error, ENGINE_ERRORS)
    logger.error("a request has failed: %s", error, exc_info=None if is_engines else error)
    if is_engines:
        return failure(503, "the engine of this request was lost or has ended", RETRY_AFTER, code="engine_unavailable")
    return failure(500, "the server failed to answer this request; its log has the error")


async def answer_error(_: Request, error: Exception) -> Response:
    """Return the answer to a request that has raised `error`. An exception handler of the application."""
    return failure_of(error).response


ERRORS = (RequestValidationError, HTTPException, EngineError, TimeoutError, Exception)
HANDLERS: dict[int | type[Exception], Any] = dict.fromkeys(ERRORS, answer_error)
"""Exception handlers of an application, by the class of the error."""


def _invalid_body(error: RequestValidationError) -> Failure:
    """Return the failure for the first problem of a body. It quotes little of the input: to quote all of it for each of
    the problems could turn 4 KB into many megabytes."""
    problem = error.errors()[0]
    if problem["type"] == "json_invalid":
        return failure(400, f"the body is not valid JSON: {problem['ctx']['error']}, at character {problem['loc'][1]}")
    return failure_of(first_problem({**problem, "loc": problem["loc"][1:]}, error.body))


def _bounded(text: str, longest: int) -> str:
    """Return `text` in bounded length and valid Unicode: strings of JSON may contain half a surrogate pair."""
    shown = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return shown.encode(errors="replace").decode()
