"""`/v1/chat/completions`: the answer to a conversation, whole or in chunks.

A chunk has a part of one choice. The chunks of a choice are its role, its new texts, and its `finish_reason`; the usage
comes last. New in this milestone. vLLM: `entrypoints/openai/chat_completion`; SGLang: `serving_chat.py`.
"""

import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from m1_single_request.input_processor import Prompt
from m7_serving.async_llm import AsyncLLM
from m7_serving.openai.deltas import Delta, Generation
from m7_serving.openai.fields import InvalidFieldError
from m7_serving.openai.logprobs import chat_logprobs
from m7_serving.openai.params import chat_params
from m7_serving.openai.requests import ChatCompletionRequest, Message
from m7_serving.openai.usage import Watch

NAME_OF_MESSAGE = re.compile(r"""message(\.|\[['"])name\b""")


async def generation(
    llm: AsyncLLM, request: ChatCompletionRequest, *, model: str, request_id: str, watch: Watch
) -> Generation:
    """Return the call of the engine that answers a conversation. `model`: the name that is served.

    Raises a subclass of `InvalidRequestError`, and the errors of `AsyncLLM.check_admissible`.
    """
    params = chat_params(request, llm.input_processor.max_model_len)
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    head = {"id": f"chatcmpl-{request_id}", "object": kind, "created": int(time.time()), "model": model}
    choice_of, pieces_of = partial(_choice, llm, request), partial(_pieces, llm, request)
    return Generation(llm, request, [await chat_prompt(llm, request)], params, head, watch, choice_of, pieces_of)


async def chat_prompt(llm: AsyncLLM, request: ChatCompletionRequest) -> Prompt:
    """Return the prompt of a conversation: its messages, or its tokens and images if the request has options for the
    template, which `generate` does not take."""
    messages = template_messages(request.messages, llm.input_processor.tokenizer.chat_template)
    if not request.chat_template_kwargs:
        return messages
    llm.check_admissible(request.n)
    template = llm.input_processor.apply_chat_template
    return await llm.in_tokenizer_thread(template, messages, request.chat_template_kwargs)


def template_messages(messages: Sequence[Message], template: object) -> list[dict[str, Any]]:
    """Return messages as the chat template takes them.

    The role `developer` becomes `system` for a template that lacks it, as for OpenAI's older models. Raises
    `InvalidFieldError` for a name that the template would ignore.
    """
    text = template if isinstance(template, str) else ""
    found = [message.model_dump(exclude_none=True) for message in messages]
    for index, message in enumerate(found):
        if message["role"] == "developer" and "developer" not in text:
            message["role"] = "system"
        if "name" in message and not NAME_OF_MESSAGE.search(text):
            name = f"messages[{index}].name"
            reason = "the chat template of this model ignores names"
            raise InvalidFieldError(name, f"{name}: {reason}", "unsupported_parameter")
    return found


def _choice(llm: AsyncLLM, request: ChatCompletionRequest, delta: Delta) -> dict[str, Any]:
    return {
        "index": delta.choice,
        "message": {"role": "assistant", "content": delta.text, "refusal": None},
        "logprobs": _logprobs(llm, request, delta),
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
    }


def _pieces(llm: AsyncLLM, request: ChatCompletionRequest, delta: Delta) -> Iterator[dict[str, Any]]:
    """Yield the choices of a delta's chunks: none for tokens without text, unless they have log-probabilities."""
    choice = {"index": delta.choice, "delta": {}, "logprobs": None, "finish_reason": None}
    if delta.is_first:
        yield {**choice, "delta": {"role": "assistant", "content": "", "refusal": None}}
    if delta.text or (request.logprobs and delta.token_ids):
        yield {**choice, "delta": {"content": delta.text}, "logprobs": _logprobs(llm, request, delta)}
    if delta.finish_reason is not None:
        yield {**choice, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}


def _logprobs(llm: AsyncLLM, request: ChatCompletionRequest, delta: Delta) -> dict[str, Any] | None:
    if delta.logprobs is None:
        return None
    return chat_logprobs(delta.token_ids, delta.logprobs, request.top_logprobs, llm.input_processor.tokenizer)
