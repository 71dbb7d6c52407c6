"""Hooks of schemathesis, which imports this module: short, whole answers, and more bodies that the model can answer."""

from typing import Any

import schemathesis

MOST = {"max_tokens": 4, "max_completion_tokens": 4, "n": 2}
VOCAB_SIZE = 4096


@schemathesis.hook
def before_call(_: schemathesis.HookContext, case: schemathesis.Case, __: dict[str, Any]) -> None:
    """Bound the work for a body, and replace values that no schema can exclude. Other values stay, valid or not."""
    if not isinstance(case.body, dict):
        return
    body = dict(case.body)
    if case.operation.path.startswith("/v1"):
        body = {"max_tokens": 4, **body}
        body |= {name: min(body[name], most) for name, most in MOST.items() if type(body.get(name)) is int}
        if body.get("stream") is True:
            body["stream"] = False
    for name in ("prompt", "tokens"):
        if name in body:
            body[name] = known_ids(body[name])
    if isinstance(body.get("messages"), list):
        body["messages"] = [answerable(message) for message in body["messages"]]
    case.body = body


def known_ids(value: Any) -> Any:
    """Return token ids modulo the size of the vocabulary; negative ones, and other values, as they are."""
    if isinstance(value, list):
        return [known_ids(each) for each in value]
    return value % VOCAB_SIZE if type(value) is int and value >= 0 else value


def answerable(message: Any) -> Any:
    """Return a message with a role and parts that the model has, if it is a message at all."""
    if not isinstance(message, dict):
        return message
    if message.get("role") == "tool":
        message = {**message, "role": "user"}
    if isinstance(message.get("content"), list):
        message = {**message, "content": [{"type": "text", "text": "hello"} for _ in message["content"]]}
    return message
