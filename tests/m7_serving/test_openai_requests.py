"""Request models: what is accepted, what is refused by its name, and what means that a field is absent."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError

from m7_serving.openai import fields
from m7_serving.openai.fields import InvalidFieldError
from m7_serving.openai.requests import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.m7_serving.parsed import parsed

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES}
COMPLETION = {"prompt": "Hi"}


def chat(**more: Any) -> ChatCompletionRequest:
    return parsed(ChatCompletionRequest, CHAT | more)


def completion(**more: Any) -> CompletionRequest:
    return parsed(CompletionRequest, COMPLETION | more)


def problem(request_class: type[Body], body: object) -> InvalidFieldError:
    with pytest.raises(InvalidFieldError) as caught:
        parsed(request_class, body)
    assert len(str(caught.value)) < 500
    return caught.value


def minimal(request_class: type[Body]) -> dict[str, Any]:
    return CHAT if request_class is ChatCompletionRequest else COMPLETION


BOTH = pytest.mark.parametrize("request_class", [ChatCompletionRequest, CompletionRequest])


# --- the fields of OpenAI's API ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_class", "params"),
    [
        (ChatCompletionRequest, chat_create_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
    ],
)
def test_every_field_of_openais_client_is_supported_or_listed(request_class: type[Body], params: Any) -> None:
    names = {*params.__annotations__, "stream"}
    listed = {*request_class.model_fields, *request_class.unsupported, *request_class.no_effect}
    assert names - listed == set()


@BOTH
def test_no_field_is_in_two_lists(request_class: type[Body]) -> None:
    lists = [set(request_class.model_fields), set(request_class.unsupported), set(request_class.no_effect)]
    assert sum(map(len, lists)) == len(set.union(*lists))


@BOTH
def test_the_defaults_are_openais(request_class: type[Body]) -> None:
    request: Any = parsed(request_class, minimal(request_class))
    assert (request.temperature, request.top_p, request.n, request.stream) == (1.0, 1.0, 1, False)
    assert (request.presence_penalty, request.frequency_penalty, request.stop) == (0.0, 0.0, [])
    assert request.seed is request.logit_bias is request.stream_options is None


def test_without_a_limit_a_completion_has_16_tokens_and_a_chat_none() -> None:
    assert completion().max_tokens == completion(max_tokens=None).max_tokens == 16
    assert chat().max_tokens is None and chat().max_completion_tokens is None


# --- absent -----------------------------------------------------------------------------------------------------------


@BOTH
def test_null_means_absent_for_every_known_field(request_class: type[Body]) -> None:
    known = {*request_class.model_fields, *request_class.unsupported, *request_class.no_effect}
    body = dict.fromkeys(known, None) | minimal(request_class)
    assert parsed(request_class, body) == parsed(request_class, minimal(request_class))


@BOTH
def test_the_default_of_an_unsupported_field_means_absent(request_class: type[Body]) -> None:
    plain = parsed(request_class, minimal(request_class))
    for name, values in request_class.unsupported.items():
        for value in values:
            assert parsed(request_class, minimal(request_class) | {name: value}) == plain, name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("parallel_tool_calls", True),
        ("modalities", ["text"]),
        ("functions", []),
        ("function_call", "none"),
        ("logit_bias", {}),
        ("store", False),
        ("service_tier", "auto"),
        ("user", "someone"),
        ("metadata", {"a": "b"}),
        ("safety_identifier", "x"),
        ("prompt_cache_key", "x"),
        ("stop", []),
        ("verbosity", "medium"),
    ],
)
def test_a_chat_accepts_what_clients_send_by_default(name: str, value: Any) -> None:
    chat(**{name: value})


# --- refused by name --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("functions", [{"name": "f"}]),
        ("store", True),
        ("service_tier", "flex"),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("echo", True),
        ("prompt_logprobs", 1),
    ],
)
def test_what_a_chat_does_not_support_is_refused_by_its_name(name: str, value: Any) -> None:
    error = problem(ChatCompletionRequest, CHAT | {name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert str(error).startswith(f"{name}: ")


@pytest.mark.parametrize(("name", "value"), [("suffix", "x"), ("suffix", ""), ("best_of", 2), ("response_format", {})])
def test_what_completions_do_not_support_is_refused_by_its_name(name: str, value: Any) -> None:
    error = problem(CompletionRequest, COMPLETION | {name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")


def test_best_of_may_be_n() -> None:
    assert completion(n=3, best_of=3).n == completion(n=3, best_of=None).n == 3


@BOTH
@pytest.mark.parametrize("value", [None, 0, "x", {}])
def test_an_unknown_field_is_refused_by_its_name(request_class: type[Body], value: Any) -> None:
    error = problem(request_class, minimal(request_class) | {"stopp": value})
    assert (error.param, error.code) == ("stopp", "unknown_parameter")
    assert "stopp" in str(error)


def test_half_a_surrogate_pair_is_no_harm() -> None:
    assert problem(CompletionRequest, COMPLETION | {"\ud800": 1}).param == "?"
    for name in ("tools", "stop", "model", "cache_salt", "temperature", "messages", "logit_bias", "stream_options"):
        for value in ("\ud800", ["\ud800"], {"\ud800": "\ud800"}):
            try:
                chat(**{name: value})
            except InvalidFieldError as error:
                assert str(error).encode() and error.param.encode()


def test_a_chat_has_no_prompt_and_a_completion_no_messages() -> None:
    assert problem(ChatCompletionRequest, CHAT | {"prompt": "x"}).code == "unknown_parameter"
    assert problem(CompletionRequest, COMPLETION | CHAT).param == "messages"


@pytest.mark.parametrize("request_class", [ChatCompletionRequest, CompletionRequest, DetokenizeRequest])
def test_what_must_be_there_is_named(request_class: type[Body]) -> None:
    error = problem(request_class, {})
    assert error.code == "missing_required_parameter"
    assert error.param in ("messages", "prompt", "tokens")


@pytest.mark.parametrize("body", [None, [], "x", 5, True, [CHAT]])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    assert "JSON object" in str(problem(ChatCompletionRequest, body))


def test_nothing_of_an_input_is_repeated_at_length() -> None:
    long = "x" * 100_000
    body: Any
    for body in ({long: 1}, {"tools": [long] * 1000}, {"temperature": long}, {"logit_bias": {long: 1}}):
        problem(ChatCompletionRequest, CHAT | body)
    for body in ([long], {"messages": long}, {"messages": [{"role": long, "content": long}]}):
        problem(ChatCompletionRequest, body)
    problem(CompletionRequest, {"prompt": [1, *["x"] * 100_000]})
    problem(CompletionRequest, {"prompt": "x", "logit_bias": {str(i): "x" for i in range(100_000)}})


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["x", *[1] * 1000]},
        {"prompt": [1, *["x"] * 1000]},
        {"prompt": [[1], *["x"] * 1000]},
        {"prompt": "x", "stop": [1] * 1000},
        {"prompt": "x", "stop_token_ids": ["x"] * 1000},
        {"prompt": "x", "logit_bias": {str(i): "x" for i in range(1000)}},
        {f"field {i}": 1 for i in range(1000)},
        {"messages": ["x"] * 1000},
        {"messages": [{"role": "user", "content": ["x"] * 1000}]},
    ],
)
def test_a_thousand_mistakes_are_one_error(body: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        (ChatCompletionRequest if "messages" in body else CompletionRequest).model_validate(body)
    assert caught.value.error_count() == 1


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"),
        ("temperature", 2.5),
        ("temperature", -0.5),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("n", 1.5),
        ("n", 1.0),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("seed", "1"),
        ("stream", 1),
        ("stream", "true"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_completion_tokens", 0),
        ("logprobs", 5),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("top_logprobs", 2),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop", ["a"] * 17),
        ("stop_token_ids", "5"),
        ("stop_token_ids", [1.5]),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"1": "1"}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": float("nan")}),
        ("logit_bias", {"9" * 30: 1}),
        ("logit_bias", {"²": 1}),
        ("stream_options", {"include_usage": True}),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
        ("chat_template_kwargs", []),
        ("messages", []),
        ("messages", "Hi"),
        ("model", 5),
        ("cache_salt", 5),
        ("priority", "high"),
        ("speculate", "no"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_field(name: str, value: Any) -> None:
    error = problem(ChatCompletionRequest, CHAT | {name: value})
    assert error.param.partition("[")[0] == name
    assert str(error).startswith(name)


def test_a_number_of_thousands_of_digits_is_refused_or_kept() -> None:
    for name in ("temperature", "n", "top_logprobs", "seed"):
        try:
            chat(**{name: 10**5000})
        except InvalidFieldError as error:
            assert error.param == name


def test_a_whole_number_may_stand_for_a_number() -> None:
    assert chat(temperature=1, top_p=1).temperature == 1.0


def test_the_keys_of_logit_bias_are_token_ids() -> None:
    assert chat(logit_bias={"5": 1, "0": -100.0}).logit_bias == {5: 1.0, 0: -100.0}


def test_a_stop_may_be_one_string() -> None:
    assert chat(stop="x").stop == completion(stop=["x"]).stop == ["x"]


def test_both_names_of_the_limit_must_agree() -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    assert problem(ChatCompletionRequest, CHAT | {"max_tokens": 5, "max_completion_tokens": 6}).param == "max_tokens"


def test_top_logprobs_need_logprobs() -> None:
    assert chat(logprobs=True, top_logprobs=20).top_logprobs == 20
    assert chat(top_logprobs=0).top_logprobs == 0


def test_stream_options_need_a_stream() -> None:
    for request_class in (ChatCompletionRequest, CompletionRequest):
        assert problem(request_class, minimal(request_class) | {"stream_options": {}}).param == "stream_options"
    options = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": None}).stream_options
    assert options is not None and options.include_usage and not options.continuous_usage_stats


def test_stream_options_have_their_own_fields() -> None:
    chat(stream=True, stream_options={"include_obfuscation": False})
    for options in ({"include_obfuscation": "yes"}, {"include": 1}):
        error = problem(ChatCompletionRequest, CHAT | {"stream": True, "stream_options": options})
        assert error.param == f"stream_options.{next(iter(options))}"


def test_zero_tokens_need_an_echo() -> None:
    assert completion(max_tokens=0, echo=True).max_tokens == 0
    assert problem(CompletionRequest, COMPLETION | {"max_tokens": 0}).param == "max_tokens"
    assert problem(CompletionRequest, COMPLETION | {"max_tokens": -1, "echo": True}).param == "max_tokens"


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ["Hi"]),
        (["Hi"], ["Hi"]),
        (["Hi", "You"], ["Hi", "You"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "prompt 0 is empty"),
        ([""], "prompt 0 is empty"),
        (["a", ""], "prompt 1 is empty"),
        ([[1], []], "prompt 1 is empty"),
        ([[]], "prompt 0 is empty"),
        ([], "no prompt"),
        (None, "required"),
        (5, "list"),
        ({}, "list"),
        ([1, "a"], "integer"),
        ([True], "integer"),
        ([1.5], "integer"),
        (["a", 1], "string"),
        (["a", [1]], "string"),
        ([[1], "a"], "list"),
        ([[1], [None]], "integer"),
        ([None], "integer"),
        ([{}], "integer"),
    ],
)
def test_another_prompt_is_refused(prompt: Any, text: str) -> None:
    error = problem(CompletionRequest, {"prompt": prompt})
    assert error.param.startswith("prompt") and text in str(error)


def test_the_place_of_a_wrong_prompt_is_named() -> None:
    assert problem(CompletionRequest, {"prompt": [[1, 2], [3, "x"]]}).param == "prompt[1][1]"
    assert problem(CompletionRequest, {"prompt": ["a", 5]}).param == "prompt[1]"


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_a_message_has_one_of_openais_roles(role: str) -> None:
    assert chat(messages=[{"role": role, "content": "Hi"}]).messages[0].role == role


def test_an_answer_can_be_sent_back() -> None:
    answer: Any = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "tool_calls": None}
    assert chat(messages=[*MESSAGES, answer, {"role": "tool", "content": "5", "tool_call_id": "x"}])


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("Hi", "messages[0]"),
        ({"content": "Hi"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "robot", "content": "Hi"}, "messages[0].role"),
        ({"role": "user", "content": "Hi", "colour": "red"}, "messages[0].colour"),
        ({"role": "assistant", "content": "Hi", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": ["Hi"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"text": "Hi"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "image", "image": "/x.png"}]}, "messages[0].content[0].image"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "data:,x"}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x", "detail": "high"}}]},
            "messages[0].content[0].image_url.detail",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "image_url": {"url": "x"}}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_a_wrong_message_is_refused_with_its_place(message: Any, param: str) -> None:
    assert problem(ChatCompletionRequest, {"messages": [message]}).param == param


def test_a_content_may_have_texts_and_images() -> None:
    url = {"url": "data:image/png;base64,AAAA", "detail": "auto"}
    text = {"type": "text", "text": "What is it?", "prompt_cache_breakpoint": {"mode": "explicit"}}
    parts = [text, {"type": "image_url", "image_url": url}]
    content = chat(messages=[{"role": "user", "content": parts}]).messages[0].content
    assert [part.type for part in content if not isinstance(part, str)] == ["text", "image_url"]


# --- /tokenize and /detokenize ----------------------------------------------------------------------------------------


def test_what_is_tokenized_is_a_prompt_or_messages() -> None:
    assert parsed(TokenizeRequest, {"prompt": ""}).prompt == ""
    assert parsed(TokenizeRequest, {"messages": MESSAGES, "add_special_tokens": False}).messages
    for body in ({}, {"prompt": "x"} | CHAT, {"prompt": ["x"]}):
        assert problem(TokenizeRequest, body).param == "prompt"
    assert problem(TokenizeRequest, CHAT | {"add_special_tokens": True}).param == "add_special_tokens"
    assert problem(TokenizeRequest, {"prompt": "x", "chat_template_kwargs": {"a": 1}}).param == "chat_template_kwargs"


@pytest.mark.parametrize("tokens", ["x", [1.5], [[1]], None, [True]])
def test_tokens_are_token_ids(tokens: Any) -> None:
    assert problem(DetokenizeRequest, {"tokens": tokens}).param.startswith("tokens")


# --- anything ---------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(), max_size=5)  # also half a surrogate pair
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *fields.CHAT, "user"})


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
def test_any_json_is_a_request_or_an_error_with_a_name(body: dict[str, Any]) -> None:
    for request_class in (ChatCompletionRequest, CompletionRequest):
        try:
            parsed(request_class, minimal(request_class) | body)
        except InvalidFieldError as error:
            assert error.param and str(error).startswith(error.param) and len(str(error)) < 500
            json.dumps([str(error), error.param, error.code], ensure_ascii=False).encode()
