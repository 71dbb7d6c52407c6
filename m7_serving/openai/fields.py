"""Fields of a request that are not supported, or have no effect on the answer: the only place that lists them.

A field that a client sends is expected to act. So every field is supported, listed here, or rejected with an error that
names it. null, and a value that is the documented default of an unsupported field, mean that the field is absent;
clients send them often. New in this milestone. vLLM and SGLang ignore unknown fields, and support most of those that
are rejected here.
"""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from m1_single_request.errors import LONGEST_SHOWN, InvalidRequestError, shown

Absent = Mapping[str, Collection[Any]]
"""Name of an unsupported field -> the values, besides null, that mean that it is absent."""

NO_EFFECT = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "user"}
)
"""Accepted with any value: they are for the statistics, safety checks and caches of OpenAI's service."""

COMMON: Absent = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "length_penalty": (1.0,),
    "logprob_token_ids": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
CHAT: Absent = {
    **COMMON,
    "add_generation_prompt": (True,),  # `chat_template_kwargs` can set it
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),  # the same
    "documents": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("medium",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
COMPLETION: Absent = {**COMMON, "add_special_tokens": (True,), "suffix": ()}
STREAM_OPTIONS: Absent = {"include_obfuscation": (False, True)}
MESSAGE: Absent = {"annotations": ([],), "audio": (), "function_call": (), "refusal": (), "tool_calls": ([],)}
"""Of a message, also of an answer that a client sends back."""
MESSAGE_NO_EFFECT = frozenset({"tool_call_id"})
PART_NO_EFFECT = frozenset({"prompt_cache_breakpoint"})
IMAGE_URL: Absent = {"detail": ("auto",)}
TEMPLATE_RESERVED = ("chat_template", "tokenize")
"""Names that `chat_template_kwargs` must not have: a template is a program, and only the server's own may run."""


class InvalidFieldError(InvalidRequestError):
    """A field of a request that is unknown, not supported, missing or of an invalid value.

    `param` is its name, such as `messages[0].content`, and `code` the kind of error, as in OpenAI's errors.
    """

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param, self.code = param, code


def field_error(reason: str, param: str | None = None, code: str = "invalid_value") -> PydanticCustomError:
    """Return the error that a validator raises; `param` is the field's name, None if pydantic adds it."""
    message = "{reason}" if param is None else "{param}: {reason}"
    return PydanticCustomError("field", message, {"reason": reason, "param": param, "code": code})


def without_absent(
    fields: Mapping[str, Any], supported: Collection[str], unsupported: Absent, no_effect: Collection[str]
) -> dict[str, Any]:
    """Return the supported fields that are present.

    Raises `PydanticCustomError` for the first field that is unknown, or present and not supported.
    """
    present = {}
    for name, value in fields.items():
        if name in supported:
            if value is not None:
                present[name] = value
        elif name in unsupported:
            if value is not None and value not in unsupported[name]:
                reason = f"this server does not support it; its value is {shown(value)}"
                raise field_error(reason, name, "unsupported_parameter")
        elif name not in no_effect:
            valid = name[:LONGEST_SHOWN].encode(errors="replace").decode()  # JSON can contain half a surrogate pair
            raise field_error("this server has no such field", valid, "unknown_parameter")
    return present
