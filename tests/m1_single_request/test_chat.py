"""Conversations: what the chat template makes of them, and what is no conversation."""

from typing import Any

import pytest

from m1_single_request import InvalidPromptError, LLMEngine
from tests.m1_single_request.engines import MakeEngine, greedy

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a KV cache?"}]


def test_chat_is_generate_on_the_ids_of_the_template(engine: LLMEngine) -> None:
    tokenizer = engine.engine_core.input_processor.tokenizer
    text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    output = engine.chat(MESSAGES, greedy(5), request_id="talk")
    assert output.request_id == "talk"
    assert output.prompt_token_ids == tuple(ids) == tuple(engine.chat_prompt(MESSAGES))
    assert output.token_ids == engine.generate(ids, greedy(5)).token_ids


def test_template_options_reach_the_template(make_engine: MakeEngine) -> None:
    template = "{{ messages[0].content }}|{{ mood | default('none') }}|{{ add_generation_prompt }}"
    engine = make_engine(chat_template=template)
    decode = engine.engine_core.input_processor.tokenizer.decode
    assert decode(engine.chat_prompt(MESSAGES)) == "Be brief.|none|True"
    assert decode(engine.chat_prompt(MESSAGES, chat_template_kwargs={"mood": "good"})) == "Be brief.|good|True"
    options = {"add_generation_prompt": False}
    assert decode(engine.chat_prompt(MESSAGES, chat_template_kwargs=options)) == "Be brief.|none|False"
    output = engine.chat(MESSAGES, greedy(1), chat_template_kwargs={"mood": "bad"})
    assert decode(output.prompt_token_ids) == "Be brief.|bad|True"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hello",
        {"role": "user", "content": "hello"},
        ["hello"],
        [{"role": "user"}],
        [{"content": "hello"}],
        [{"role": "user", "content": ["hello"]}],
        [{"role": 3, "content": "hello"}],
        [{"role": "wizard", "content": "hello"}],
        [{"role": "user", "content": "\ud800"}],
        iter([{"role": "user", "content": "hello"}]),
    ],
    ids=lambda messages: type(messages).__name__ if hasattr(messages, "__next__") else ascii(messages),
)
def test_messages_that_are_none_are_refused(engine: LLMEngine, messages: Any) -> None:
    with pytest.raises(InvalidPromptError):
        engine.chat(messages)
    assert not engine.has_unfinished_requests()


def test_whoever_shows_a_picture_is_told_who_can_see(engine: LLMEngine) -> None:
    parts = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is it?"}]
    with pytest.raises(InvalidPromptError, match="content must be text; pictures are for m6_multimodal_pd"):
        engine.chat([{"role": "user", "content": parts}])


@pytest.mark.parametrize("options", [5, [("mood", "good")], {"conversation": 1}, {7: 8}], ids=repr)
def test_template_options_that_are_none_are_refused(engine: LLMEngine, options: Any) -> None:
    with pytest.raises(InvalidPromptError):
        engine.chat(MESSAGES, chat_template_kwargs=options)


def test_a_model_without_a_template_says_so(make_engine: MakeEngine) -> None:
    engine = make_engine(chat_template="to be taken away")
    engine.engine_core.input_processor.tokenizer.chat_template = None
    with pytest.raises(InvalidPromptError, match="no chat template"):
        engine.chat(MESSAGES)


@pytest.mark.parametrize("name", ["tools", "documents", "enable_thinking"])
def test_an_option_that_the_template_never_reads_is_refused(make_engine: MakeEngine, name: str) -> None:
    with pytest.raises(InvalidPromptError, match=f"has no variable '{name}'"):
        make_engine().chat_prompt([{"role": "user", "content": "Hi"}], chat_template_kwargs={name: []})


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{% for i in range(10**9) %}{% endfor %}", "{{ 'a' * 10**13 }}"])
def test_a_template_that_breaks_down_is_an_error_of_ours(make_engine: MakeEngine, template: str) -> None:
    with pytest.raises(InvalidPromptError, match="the chat template rejects"):
        make_engine(chat_template=template).chat([{"role": "user", "content": "Hi"}])
