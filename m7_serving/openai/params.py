"""Sampling parameters and options of a request, from the fields of its body.

The defaults are OpenAI's: temperature 1, not greedy as in `SamplingParams`. New in this milestone. vLLM:
`to_sampling_params` of its request models.
"""

import re

from m1_single_request.errors import InvalidParamsError
from m1_single_request.input_processor import RequestOptions
from m1_single_request.sampling_params import SamplingParams
from m7_serving.openai.fields import InvalidFieldError
from m7_serving.openai.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest

SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "seed",
    "skip_special_tokens",
)
"""Fields of `SamplingParams` that the request has under the same name and with the same meaning."""


def chat_params(request: ChatCompletionRequest, max_model_len: int) -> SamplingParams:
    """Return the parameters of a conversation's answer. Without a limit it may fill the model's length."""
    max_tokens = request.max_completion_tokens or request.max_tokens or max_model_len
    return _params(request, max_tokens, request.top_logprobs if request.logprobs else None, None)


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Return the parameters of a prompt's continuation. For `max_tokens=0` one token is computed, to be dropped."""
    logprobs = request.logprobs if request.max_tokens else None
    return _params(request, request.max_tokens or 1, logprobs, request.logprobs if request.echo else None)


def must_fit(request: GenerationRequest) -> bool:
    """Return whether the client has named a number of tokens, for which there must be room."""
    return not request.model_fields_set.isdisjoint(("max_tokens", "max_completion_tokens"))


def options(request: GenerationRequest) -> RequestOptions:
    """Return the options of a request besides its parameters."""
    return {"priority": request.priority, "cache_salt": request.cache_salt, "speculate": request.speculate}


def _params(
    request: GenerationRequest, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Raises `InvalidFieldError` for a value out of range; the error of `SamplingParams` begins with its name."""
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            top_k=request.top_k or -1,
            **{name: getattr(request, name) for name in SAME_NAME},
        )
    except InvalidParamsError as error:
        name = re.match(r"\w*", str(error))
        assert name is not None
        raise InvalidFieldError(name[0], str(error)) from None
