"""`/tokenize` and `/detokenize`: the tokenizer of the server, for clients that have none.

Both run on the tokenizer thread. New in this milestone. vLLM: `entrypoints/serve/tokenize`; SGLang: the same endpoints.
"""

from collections.abc import Sequence
from typing import Any

from m1_single_request.errors import PromptTooLongError, shown
from m1_single_request.input_processor import InputProcessor
from m7_serving.async_llm import AsyncLLM
from m7_serving.openai.chat import template_messages
from m7_serving.openai.fields import InvalidFieldError
from m7_serving.openai.requests import DetokenizeRequest, TokenizeRequest


async def tokenize(llm: AsyncLLM, request: TokenizeRequest) -> dict[str, Any]:
    """Return the token ids of a text, or of a conversation up to its answer. Raises `InvalidRequestError`."""
    return await llm.in_tokenizer_thread(_tokenize, llm.input_processor, request)


async def detokenize(llm: AsyncLLM, request: DetokenizeRequest) -> dict[str, Any]:
    """Return the text of token ids, at most as many as fit into the model. Raises `InvalidRequestError`."""
    processor = llm.input_processor
    if len(request.tokens) > processor.max_model_len:
        raise PromptTooLongError(
            f"{len(request.tokens):,} tokens are more than max_model_len={processor.max_model_len}"
        )
    check_token_ids(request.tokens, processor.vocab_size, "tokens")
    return {"prompt": await llm.in_tokenizer_thread(decode, processor, request.tokens)}


def decode(processor: InputProcessor, token_ids: Sequence[int]) -> str:
    """Return the text of token ids, special tokens included."""
    return str(processor.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise `InvalidFieldError` for a token id outside the vocabulary; `param` is the name of the field."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidFieldError(
                param, f"{param}: token id {shown(token_id)} is outside the vocabulary of {vocab_size}"
            )


def _tokenize(processor: InputProcessor, request: TokenizeRequest) -> dict[str, Any]:
    if request.messages is not None:
        messages = template_messages(request.messages, processor.tokenizer.chat_template)
        token_ids = list(processor.apply_chat_template(messages, request.chat_template_kwargs))
    else:
        assert request.prompt is not None, "checked by the request"
        token_ids = processor.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)
    answer = {"count": len(token_ids), "max_model_len": processor.max_model_len, "tokens": token_ids}
    if request.return_token_strs:
        answer["token_strs"] = processor.tokenizer.convert_ids_to_tokens(token_ids)
    return answer
