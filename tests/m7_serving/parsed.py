"""Requests from JSON, as the server builds them."""

from typing import Any, TypeVar

from pydantic import ValidationError

from m7_serving.openai.requests import Body, first_problem

RequestT = TypeVar("RequestT", bound=Body)


def parsed(request_class: type[RequestT], body: Any) -> RequestT:
    """The request of a body. Raises `InvalidFieldError` for its first problem."""
    try:
        return request_class.model_validate(body)
    except ValidationError as error:
        raise first_problem({**error.errors()[0]}, body) from None
