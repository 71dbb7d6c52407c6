"""From the fields of a request to `SamplingParams`: OpenAI's defaults, every field passed on, errors with names."""

from typing import Any

import pytest

from m1_single_request.sampling_params import SamplingParams
from m7_serving.openai.fields import InvalidFieldError
from m7_serving.openai.params import SAME_NAME, chat_params, completion_params, options
from m7_serving.openai.requests import ChatCompletionRequest, CompletionRequest
from tests.m7_serving.parsed import parsed

VALUES: dict[str, Any] = {
    "n": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "min_p": 0.1,
    "presence_penalty": 1.5,
    "frequency_penalty": -1.5,
    "repetition_penalty": 1.25,
    "logit_bias": {"7": 3.0},
    "stop": ("END",),
    "stop_token_ids": (5,),
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "seed": 11,
    "skip_special_tokens": False,
}


def chat(**more: Any) -> SamplingParams:
    body = {"messages": [{"role": "user", "content": "Hi"}]} | more
    return chat_params(parsed(ChatCompletionRequest, body), 256)


def completion(**more: Any) -> SamplingParams:
    return completion_params(parsed(CompletionRequest, {"prompt": "Hi"} | more))


def test_the_defaults_are_openais_not_the_engines() -> None:
    assert chat() == SamplingParams(temperature=1.0, max_tokens=256)
    assert completion() == SamplingParams(temperature=1.0, max_tokens=16)


@pytest.mark.parametrize("make", [chat, completion])
def test_every_field_is_passed_on(make: Any) -> None:
    body = {name: list(value) if isinstance(value, tuple) else value for name, value in VALUES.items()}
    params = make(**body, top_k=4, max_tokens=9)
    assert set(VALUES) == set(SAME_NAME)
    for name, value in (VALUES | {"logit_bias": {7: 3.0}, "top_k": 4, "max_tokens": 9}).items():
        assert getattr(params, name) == value, name


@pytest.mark.parametrize("make", [chat, completion])
def test_top_k_of_0_or_minus_1_means_all_tokens(make: Any) -> None:
    assert make(top_k=0).top_k == make(top_k=-1).top_k == make().top_k == -1


def test_a_chat_has_two_names_for_its_limit() -> None:
    assert chat(max_tokens=5).max_tokens == chat(max_completion_tokens=5).max_tokens == 5


def test_logprobs_of_a_chat() -> None:
    assert chat(logprobs=False).logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    assert chat(logprobs=True, top_logprobs=3).prompt_logprobs is None


def test_logprobs_of_a_completion() -> None:
    assert completion().logprobs is None and completion(logprobs=0).logprobs == 0
    assert completion(logprobs=2).prompt_logprobs is None
    echoed = completion(logprobs=2, echo=True)
    assert (echoed.logprobs, echoed.prompt_logprobs) == (2, 2)
    assert completion(echo=True).prompt_logprobs is None


def test_for_a_prompt_alone_one_token_is_computed() -> None:
    params = completion(max_tokens=0, echo=True, logprobs=1)
    assert (params.max_tokens, params.logprobs, params.prompt_logprobs) == (1, None, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", 2),
        ("top_k", -2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("min_tokens", -1),
        ("min_tokens", 1000),
        ("max_tokens", 2**63),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", "x" * 70_000),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"9999999999999999999": 1}),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_name_of_its_field(name: str, value: Any) -> None:
    for make in (chat, completion):
        with pytest.raises(InvalidFieldError) as caught:
            make(**{name: value})
        assert caught.value.param == name
        assert str(caught.value).startswith(name) and len(str(caught.value)) < 500


def test_the_engine_has_three_options_of_a_request() -> None:
    more = {"priority": -3, "cache_salt": "mine", "speculate": False}
    assert options(parsed(CompletionRequest, {"prompt": "Hi"} | more)) == more
    plain = {"priority": 0, "cache_salt": None, "speculate": True}
    assert options(parsed(CompletionRequest, {"prompt": "Hi"})) == plain
