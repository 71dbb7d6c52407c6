"""Answers and streams of both endpoints from scripted outputs: shapes, order, and joined chunks equal to the answer."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from m1_single_request.errors import ForwardError, InvalidPromptError, PromptTooLongError
from m1_single_request.outputs import RequestOutput
from m1_single_request.request import FinishAbort, FinishError
from m1_single_request.sampling_params import SamplingParams
from m7_serving.errors import EngineUnavailableError, ServerBusyError
from m7_serving.openai import chat, deltas
from m7_serving.openai.fields import InvalidFieldError
from m7_serving.openai.params import chat_params, completion_params
from m7_serving.openai.requests import ChatCompletionRequest, CompletionRequest
from m7_serving.openai.usage import usage
from tests.m1_single_request.helpers import real_tokenizer
from tests.m7_serving.parsed import parsed
from tests.m7_serving.scripted import (
    MAX_MODEL_LEN,
    Joined,
    ScriptedLLM,
    Watched,
    batches_of,
    collected,
    endpoint_call,
    family,
    ids_of,
    joined_chat,
    joined_text,
    merged,
    outputs_of,
)
from tests.support.amounts import examples

NAMES: Any = {"model": "tiny", "request_id": "1", "watch": Watched()}
MESSAGES = [{"role": "user", "content": "Hi"}]
PROMPT = ids_of("Once")


def chat_request(**more: Any) -> ChatCompletionRequest:
    return parsed(ChatCompletionRequest, {"messages": MESSAGES} | more)


def completion_request(**more: Any) -> CompletionRequest:
    return parsed(CompletionRequest, {"prompt": "Once"} | more)


def params_of(request: Any) -> SamplingParams:
    if isinstance(request, ChatCompletionRequest):
        return chat_params(request, MAX_MODEL_LEN)
    return completion_params(request)


def answer(llm: ScriptedLLM, request: Any) -> dict[str, Any]:
    found: dict[str, Any] = asyncio.run(deltas.answer(endpoint_call(llm, request, **NAMES)))
    return found


def stream(llm: ScriptedLLM, request: Any) -> list[dict[str, Any]]:
    return asyncio.run(collected(deltas.chunks(endpoint_call(llm, request, **NAMES))))


def scripted(request: Any, *texts: str, **more: Any) -> ScriptedLLM:
    """An engine that answers one prompt with `n` texts, a byte per step."""
    params = params_of(request)
    return ScriptedLLM(
        batches_of([family([outputs_of(ids_of(text), params, prompt=PROMPT, **more) for text in texts])])
    )


# --- chunks joined ----------------------------------------------------------------------------------------------------


PIECES = ["a", "é", "🙂", "END", "EN", " ", "中", "\n"]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map(lambda pieces: "".join(pieces).encode())
datas = st.one_of(texts, texts.map(lambda data: data[:-1] or data), st.binary(min_size=1, max_size=8))
"""Whole characters, a half one at the end, anything."""
stops = st.lists(st.sampled_from(["END", "é", "a中", "🙂"]), max_size=2)
reads = st.lists(st.booleans(), max_size=20)


def script(data: st.DataObject, request: Any, num_prompts: int) -> tuple[list[list[RequestOutput]], ScriptedLLM]:
    """Outputs of random tokens for every prompt of a request, and an engine from which a slow reader takes them."""
    params = params_of(request)
    prompts = []
    for number in range(num_prompts):
        children = [ids_of(data.draw(datas)) for _ in range(params.n)]
        each = [outputs_of(own, replace(params, max_tokens=len(own), n=1), prompt=PROMPT[number:]) for own in children]
        prompts.append(family(each))
    return prompts, ScriptedLLM(merged(batches_of(prompts), data.draw(reads)))


@given(st.data())
@settings(max_examples=examples(300))
def test_the_joined_chunks_of_a_chat_are_its_answer(data: st.DataObject) -> None:
    top = data.draw(st.sampled_from([None, 0, 2]))
    more = {} if top is None else {"logprobs": True, "top_logprobs": top}
    request = chat_request(n=data.draw(st.integers(1, 3)), stop=data.draw(stops), stream=True, **more)
    (outputs,), llm = script(data, request, 1)
    joined, body = joined_chat(stream(llm, request)), answer(llm, request)
    assert sorted(joined) == [choice["index"] for choice in body["choices"]] == list(range(request.n))
    for choice, completion in zip(body["choices"], outputs[-1].outputs, strict=True):
        rows = [] if top is None else choice["logprobs"]["content"]
        assert joined[choice["index"]] == Joined(
            choice["message"]["content"], rows, choice["finish_reason"], choice["stop_reason"]
        )
        assert choice["message"]["content"] == completion.text
        assert choice["finish_reason"] == completion.finish_reason
        assert choice["stop_reason"] == completion.stop_reason
        assert len(rows) == (0 if top is None else len(completion.token_ids))


@given(st.data())
@settings(max_examples=examples(300))
def test_the_joined_chunks_of_completions_are_their_answer(data: st.DataObject) -> None:
    num_prompts, echo = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    request = completion_request(
        prompt=[PROMPT[i:] for i in range(num_prompts)],
        n=data.draw(st.integers(1, 3)),
        stop=data.draw(stops),
        logprobs=data.draw(st.sampled_from([None, 0, 2])),
        echo=echo,
        max_tokens=data.draw(st.sampled_from([0, 16])) if echo else 16,
        stream=True,
    )
    outputs, llm = script(data, request, num_prompts)
    joined, body = joined_text(stream(llm, request)), answer(llm, request)
    assert sorted(joined) == [choice["index"] for choice in body["choices"]] == list(range(num_prompts * request.n))
    for choice in body["choices"]:
        prompt, number = divmod(choice["index"], request.n)
        completion = outputs[prompt][-1].outputs[number]
        assert joined[choice["index"]] == Joined(
            choice["text"], choice["logprobs"], choice["finish_reason"], choice["stop_reason"]
        )
        own = completion.text if request.max_tokens else ""
        assert choice["text"] == ("Once"[prompt:] if echo else "") + own
        if request.logprobs is not None:
            num_tokens = len(PROMPT[prompt:]) * echo + len(completion.token_ids) * bool(request.max_tokens)
            assert {len(values) for values in choice["logprobs"].values()} == {num_tokens}
            lengths = [len(token) for token in choice["logprobs"]["tokens"]]
            assert choice["logprobs"]["text_offset"] == [sum(lengths[:i]) for i in range(num_tokens)]


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_the_answer_of_a_chat_has_openais_shape() -> None:
    body = answer(scripted(chat_request(max_tokens=2), "Hi"), chat_request(max_tokens=2))
    assert body.pop("created") > 1_000_000_000
    assert body == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 2,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    ChatCompletion.model_validate(body | {"created": 1}, strict=True)


def test_the_answer_of_a_completion_has_openais_shape() -> None:
    request = completion_request(max_tokens=2, logprobs=1)
    body = answer(scripted(request, "Hi"), request)
    assert (body["id"], body["object"], body["model"]) == ("cmpl-1", "text_completion", "tiny")
    choice = body["choices"][0]
    assert choice["text"] == "Hi" and choice["logprobs"]["tokens"] == list("Hi")
    Completion.model_validate(body, strict=True)


def test_the_chunks_of_a_chat_come_in_openais_order() -> None:
    request = chat_request(max_tokens=2, stream=True, stream_options={"include_usage": True})
    chunks = stream(scripted(request, "Hi"), request)
    assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        ("chatcmpl-1", "chat.completion.chunk", "tiny")
    }
    assert len({chunk["created"] for chunk in chunks}) == 1
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas == [{"role": "assistant", "content": "", "refusal": None}, {"content": "H"}, {"content": "i"}, {}]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 2
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_without_usage_no_chunk_has_one() -> None:
    for request in (chat_request(stream=True, max_tokens=2), completion_request(stream=True, max_tokens=2)):
        assert all("usage" not in chunk and chunk["choices"] for chunk in stream(scripted(request, "Hi"), request))


def test_the_prompt_is_the_first_chunk_of_an_echo() -> None:
    request = completion_request(echo=True, logprobs=0, max_tokens=2, stream=True)
    chunks = stream(scripted(request, "Hi"), request)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Once", "H", "i", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    logprobs = chunks[0]["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list("Once") and logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None


def test_a_half_character_is_no_chunk_of_its_own() -> None:
    request = chat_request(max_tokens=3, stream=True)
    chunks = stream(scripted(request, "éa"), request)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "é", "a", None]


def test_the_logprobs_of_a_half_character_are_sent_at_once() -> None:
    request = chat_request(max_tokens=3, stream=True, logprobs=True)
    contents = [chunk["choices"][0] for chunk in stream(scripted(request, "éa"), request)[1:-1]]
    assert [choice["delta"]["content"] for choice in contents] == ["", "é", "a"]
    assert [row["bytes"] for choice in contents for row in choice["logprobs"]["content"]] == [[0xC3], [0xA9], [0x61]]


def test_an_empty_answer_has_a_role_and_an_end() -> None:
    request = chat_request(stream=True)
    llm = ScriptedLLM(batches_of([outputs_of([real_tokenizer().eos_token_id], params_of(request))]))
    chunks = stream(llm, request)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]
    assert answer(llm, request)["choices"][0]["message"]["content"] == ""


def test_a_stop_is_named() -> None:
    request = chat_request(stop=["END"], stop_token_ids=ids_of("x"), n=2)
    body = answer(scripted(request, "aENDb", "bx"), request)
    assert [choice["message"]["content"] for choice in body["choices"]] == ["a", "b"]
    assert [choice["stop_reason"] for choice in body["choices"]] == ["END", ids_of("x")[0]]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}


def test_a_choice_that_has_ended_sends_nothing_more() -> None:
    request = chat_request(n=2, stop=["E"], stream=True, max_tokens=5)
    indices = [chunk["choices"][0]["index"] for chunk in stream(scripted(request, "E", "abcde"), request)]
    assert indices.count(0) == 2 and indices.count(1) == 7


def test_choices_are_numbered_by_prompt_and_output() -> None:
    request = completion_request(prompt=["a", "b"], n=2, max_tokens=1)
    params = params_of(request)
    prompts = [family([outputs_of(ids_of(text), params) for text in own]) for own in ("wx", "yz")]
    body = answer(ScriptedLLM(batches_of(prompts)), request)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "w"), (1, "x"), (2, "y"), (3, "z")]


# --- the prompt alone -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
def test_with_no_tokens_the_prompt_is_scored(is_streamed: bool) -> None:
    request = completion_request(prompt=[PROMPT], echo=True, max_tokens=0, logprobs=1, stream=is_streamed)
    llm = scripted(request, "x")
    if is_streamed:
        choice: Any = joined_text(stream(llm, request))[0]._asdict()
    else:
        body = answer(llm, request)
        choice = body["choices"][0]
        assert body["usage"]["completion_tokens"] == 0 and body["usage"]["prompt_tokens"] == 4
    assert choice["text"] == "Once" and choice["finish_reason"] == "length" and choice["stop_reason"] is None
    assert choice["logprobs"]["tokens"] == list("Once")
    assert [value is None for value in choice["logprobs"]["token_logprobs"]] == [True, False, False, False]
    assert all(isinstance(top, dict) for top in choice["logprobs"]["top_logprobs"][1:])


def test_a_choice_waits_for_the_logprobs_of_its_prompt() -> None:
    """Of `n` choices one computes them, and another may have tokens before."""
    request = completion_request(prompt=[PROMPT], echo=True, logprobs=0, max_tokens=2, n=2, stream=True)
    complete = family([outputs_of(ids_of(text), params_of(request), prompt=PROMPT) for text in ("Hi", "Oh")])
    early = outputs_of(ids_of("Hi"), SamplingParams(logprobs=0, max_tokens=2), prompt=PROMPT)[0]
    joined = joined_text(stream(ScriptedLLM([{0: early}, *batches_of([complete])]), request))
    assert [joined[i].text for i in (0, 1)] == ["OnceHi", "OnceOh"]
    assert [len(joined[i].logprobs["tokens"]) for i in (0, 1)] == [6, 6]


# --- usage ------------------------------------------------------------------------------------------------------------


def test_a_prompt_counts_once_for_all_its_outputs() -> None:
    request = completion_request(prompt=["a", "b"], n=2, max_tokens=3)
    params = params_of(request)
    first = family([outputs_of(ids_of(t), params, prompt=[1, 2, 3], cached_tokens=2) for t in ("abc", "abc")])
    second = family([outputs_of(ids_of(t), params, prompt=[1, 2], cached_tokens=1) for t in ("abc", "xyz")])
    assert answer(ScriptedLLM(batches_of([first, second])), request)["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 12,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize("make", [chat_request, completion_request])
def test_every_chunk_may_have_the_usage_so_far(make: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = make(stream=True, stream_options=options, max_tokens=3, n=2)
    llm = scripted(request, "abc", "xyz")
    chunks = stream(llm, request)
    so_far = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert so_far == sorted(so_far) and so_far[-1] == 6
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {4}
    assert chunks[-1]["usage"] == answer(llm, request)["usage"]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("max_tokens", "num_output"), [(2, 4), (0, 0)])
def test_the_metrics_get_what_is_returned(is_streamed: bool, max_tokens: int, num_output: int) -> None:
    request = completion_request(echo=True, max_tokens=max_tokens, n=2, stream=is_streamed)
    llm: Any = scripted(request, "Hi", "Oh")
    watched = Watched()
    more = NAMES | {"watch": watched}
    if is_streamed:
        asyncio.run(collected(deltas.chunks(endpoint_call(llm, request, **more))))
    else:
        asyncio.run(deltas.answer(endpoint_call(llm, request, **more)))
    assert watched.num_prompts == 1 and watched.error is None
    assert usage(watched.outputs.values())["completion_tokens"] == num_output


# --- what goes to the engine ------------------------------------------------------------------------------------------


def test_the_messages_go_to_the_engine_as_they_are() -> None:
    url = {"url": "data:image/png;base64,AAAA", "detail": "auto"}
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": url}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    request = chat_request(messages=messages, priority=3, cache_salt="x", speculate=False, max_tokens=1)
    llm = scripted(request, "a")
    answer(llm, request)
    (call,) = llm.calls
    assert call["prompts"] == [
        [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                ],
            },
        ]
    ]
    assert call["request_id"] == "chatcmpl-1" and call["params"] == params_of(request)
    assert (call["priority"], call["cache_salt"], call["speculate"]) == (3, "x", False)
    assert not llm.threaded


def test_options_of_the_template_are_rendered_on_the_tokenizer_thread() -> None:
    request = chat_request(chat_template_kwargs={"enable_thinking": False}, max_tokens=1)
    llm = scripted(request, "a")
    answer(llm, request)
    assert llm.threaded and all(isinstance(token_id, int) for token_id in llm.calls[0]["prompts"][0])
    request = chat_request(chat_template_kwargs={"unknown": 1})
    with pytest.raises(InvalidPromptError):
        answer(llm, request)


def test_a_developer_is_a_system_for_a_template_without_developers() -> None:
    messages = chat_request(messages=[{"role": "developer", "content": "x"}]).messages
    assert chat.template_messages(messages, "{{ message.role }}")[0]["role"] == "system"
    assert chat.template_messages(messages, "{% if message.role == 'developer' %}")[0]["role"] == "developer"


def test_a_name_needs_a_template_that_uses_it() -> None:
    messages = chat_request(messages=[*MESSAGES, {"role": "user", "content": "x", "name": "Ann"}]).messages
    for template in ("{{ message.name }}", "{{ message['name'] }}"):
        assert chat.template_messages(messages, template)[1]["name"] == "Ann"
    with pytest.raises(InvalidFieldError) as caught:
        chat.template_messages(messages, "{{ message.content }} {{ tool.name }}")
    assert caught.value.param == "messages[1].name"


def test_prompts_of_a_completion_go_to_the_engine_as_they_are() -> None:
    for prompt in (["a", "b"], [[1, 2], [3]]):
        request = completion_request(prompt=prompt, max_tokens=1)
        llm = ScriptedLLM(batches_of([outputs_of(ids_of("x"), params_of(request))] * 2))
        answer(llm, request)
        assert llm.calls[0]["prompts"] == prompt and not llm.threaded


@pytest.mark.parametrize("echo", [False, True])
def test_a_token_id_outside_the_vocabulary_is_refused_with_its_place(echo: bool) -> None:
    for wrong in (-1, 10**6, 10**30):
        with pytest.raises(InvalidFieldError) as caught:
            answer(ScriptedLLM(), completion_request(prompt=[[1], [2, wrong]], echo=echo))
        assert caught.value.param == "prompt[1]"
    with pytest.raises(PromptTooLongError):
        answer(ScriptedLLM(), completion_request(prompt=[1] * MAX_MODEL_LEN, echo=echo))


def test_a_full_server_makes_no_texts_of_the_prompts_to_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_outputs: int) -> None:
        raise ServerBusyError(f"{num_outputs} are too many")

    llm = ScriptedLLM()
    monkeypatch.setattr(llm, "check_admissible", refuse)
    with pytest.raises(ServerBusyError, match="6 are too many"):
        answer(llm, completion_request(prompt=[[1], [2], [3]], n=2, echo=True))
    assert not llm.threaded and not llm.calls


# --- errors, and readers that go away ---------------------------------------------------------------------------------

REQUESTS = pytest.mark.parametrize("request_of", [chat_request, completion_request])


@REQUESTS
@pytest.mark.parametrize("error", [InvalidPromptError("no"), ServerBusyError("busy"), EngineUnavailableError("lost")])
def test_an_error_of_the_admission_is_raised_before_the_first_chunk(request_of: Any, error: Exception) -> None:
    async def first(chunks: Any) -> None:
        async with aclosing(chunks):
            await anext(chunks)

    request = request_of(stream=True)
    with pytest.raises(type(error)):
        asyncio.run(first(deltas.chunks(endpoint_call(ScriptedLLM([error]), request, **NAMES))))
    with pytest.raises(type(error)):
        answer(ScriptedLLM([error]), request_of())


@REQUESTS
@pytest.mark.parametrize("is_lonely", [True, False])
def test_the_error_of_a_request_that_failed_is_raised(request_of: Any, is_lonely: bool) -> None:
    request = request_of(stream=True, n=1 if is_lonely else 2, max_tokens=3)
    params, error = params_of(request), ForwardError("NaN")
    failed = outputs_of(ids_of("a"), params, end=FinishError(error))
    llm = ScriptedLLM(batches_of([family([failed] if is_lonely else [failed, outputs_of(ids_of("xyz"), params)])]))
    with pytest.raises(ForwardError):
        answer(llm, request)
    chunks = deltas.chunks(endpoint_call(llm, request, **NAMES))
    seen: list[Any] = []

    async def read() -> None:
        async with aclosing(chunks):
            async for chunk in chunks:
                seen.append(chunk["choices"][0])

    with pytest.raises(ForwardError):
        asyncio.run(read())
    assert all(choice["finish_reason"] is None for choice in seen if choice["index"] == 0)
    assert llm.is_closed


@REQUESTS
def test_a_request_that_the_server_aborted_is_an_error(request_of: Any) -> None:
    request = request_of()
    llm = ScriptedLLM(batches_of([outputs_of(ids_of("ab"), params_of(request), end=FinishAbort())]))
    for run in (answer, stream):
        with pytest.raises(EngineUnavailableError):
            run(llm, request)


@REQUESTS
def test_a_reader_that_goes_away_closes_the_generator_of_the_engine(request_of: Any) -> None:
    request = request_of(stream=True, max_tokens=5)
    for num_read in range(1, 6):
        llm = scripted(request, "abcde")

        async def leave(llm: ScriptedLLM = llm, num_read: int = num_read) -> bool:
            chunks = deltas.chunks(endpoint_call(llm, request, **NAMES))
            for _ in range(num_read):
                await anext(chunks)
            await chunks.aclose()
            return llm.is_closed

        assert asyncio.run(leave())


@REQUESTS
def test_a_whole_answer_that_is_cancelled_closes_the_generator_of_the_engine(request_of: Any) -> None:
    request = request_of(max_tokens=5)
    llm = scripted(request, "abcde")

    async def cancel() -> bool:
        task = asyncio.create_task(deltas.answer(endpoint_call(llm, request, **NAMES)))
        for _ in range(2):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return llm.is_closed

    assert asyncio.run(cancel())
