"""What cannot be seen is refused, in every way of asking, and nobody notices but who asked.

Every refusal is one typed error with the value in it, and it comes before anything changes: no event names the request,
no number is used up, nothing is held, and the next good request gets transformers' tokens. In a batch it is one output
with `finish_reason="error"`, while the others run.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from m6_multimodal_pd import (
    EngineError,
    InvalidPromptError,
    InvalidRequestError,
    LLMEngine,
    ModelConfig,
    PromptTooLongError,
)
from tests.m6_multimodal_pd.engines import MakeEngine, Recorder, check_drained, check_flushed, counts, greedy, setting
from tests.m6_multimodal_pd.refused import CONVERSATIONS, IMAGE_PAD, LIMITS, image
from tests.m6_multimodal_pd.seeing import Theirs, asking, picture

PARAMS = greedy(4)
GOOD = asking("a", 1, "v")


def ask_all(engine: LLMEngine, prompt: Any, error: type[EngineError], message: str) -> None:
    """Refused in every way of asking; a batch runs on without it."""
    calls: list[Callable[..., Any]] = [engine.generate, engine.stream, engine.add_request]
    if isinstance(prompt, list) and any(isinstance(one, dict) for one in prompt):
        calls += [engine.chat, lambda prompt, _: engine.chat_prompt(prompt)]
    recorder, before = Recorder(engine.tracer), engine.stats()
    for call in calls:
        with pytest.raises(error, match=message) as caught:
            call(prompt, PARAMS)
        assert type(caught.value) is error and "\n" not in str(caught.value)
        assert not engine.has_unfinished_requests()
    assert recorder.records == [] and engine.stats() == before, "something has changed"
    rid = engine.add_request([5, 6], PARAMS)
    assert rid == "req-0", "a refused request has used a number up"
    refused, other = engine.generate_batch([prompt, [7]], PARAMS).values()
    assert (refused.finish_reason, refused.finished, type(refused.error)) == ("error", True, error)
    assert (refused.text, refused.token_ids) == ("", ()) and other.finish_reason == "length"
    named = {name for record in recorder.records for name in record.event.request_ids()}
    assert refused.request_id not in named and {rid, other.request_id} <= named
    assert set(engine.step()) == {rid}


def check_good(engine: Any, their_model: Theirs) -> None:
    """The engine works as if nothing had been, and holds nothing."""
    prompt = engine.chat_prompt(GOOD)
    assert engine.generate(prompt, PARAMS).token_ids == their_model.answer(prompt).token_ids[:4]
    check_drained(engine)
    check_flushed(engine)


@pytest.fixture
def strict(make_engine: MakeEngine) -> Any:
    """An engine with narrow limits."""
    return make_engine(**setting(multimodal=LIMITS))


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_what_cannot_be_seen_is_refused_in_every_way_of_asking(strict: Any, their_model: Theirs, name: str) -> None:
    messages, error, message = CONVERSATIONS[name]
    ask_all(strict, messages, error, message)
    assert counts(strict) == (0, 0, 0)
    check_good(strict, their_model)


# --- prompts that are no messages -------------------------------------------------------------------------------------


def placeholder(engine: Any) -> int:
    """The token that stands for a picture."""
    return int(engine.engine_core.input_processor.prompts.tokens.image)


def cut(engine: Any) -> list[int]:
    """A prompt of whose picture one token is left."""
    prompt: Any = engine.chat_prompt(asking(1, "a"))
    start, end = prompt.multimodal_inputs.mm_items[0].offsets[0]
    del prompt[start : end - 1]
    return prompt  # type: ignore[no-any-return]


def moved(engine: Any) -> list[int]:
    """A prompt into which somebody has put a token, in front of its picture."""
    prompt: list[int] = engine.chat_prompt(asking("a", 1))
    prompt.insert(1, 5)
    return prompt


PROMPTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a text": (lambda engine: f"What is {IMAGE_PAD}?", "1 placeholder tokens for images .* need 0"),
    "token ids": (lambda engine: [5, placeholder(engine), 6], "pass images as parts of chat messages"),
    "a copy that lost its pictures": (lambda engine: list(engine.chat_prompt(asking("a"))), "has 9 .* need 0"),
    "a slice": (lambda engine: engine.chat_prompt(asking("a", 1))[:-1], "has 9 placeholder tokens .* need 0"),
    "a sum": (lambda engine: engine.chat_prompt(asking("a", 1)).__add__([5]), "has 9 placeholder tokens .* need 0"),
    "a picture cut away": (cut, "has 1 placeholder tokens .* need 9"),
    "one token more in front": (moved, "was changed after .* is token 6, and was token 5; change the messages"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_placeholders_that_are_not_those_of_the_pictures_are_refused(
    strict: Any, their_model: Theirs, name: str
) -> None:
    make, message = PROMPTS[name]
    ask_all(strict, make(strict), InvalidPromptError, message)
    check_good(strict, their_model)


def test_text_behind_the_last_picture_may_be_put_on_and_taken_off(strict: Any, their_model: Theirs) -> None:
    """What an assistant is to go on with: its positions follow those of the prompt."""
    prompt = strict.chat_prompt(asking("a", 1))
    prompt += [300, 301]
    assert strict.generate(prompt, PARAMS).token_ids == their_model.answer(prompt).token_ids[:4]
    del prompt[-4:]
    assert strict.generate(prompt, PARAMS).token_ids == their_model.answer(prompt).token_ids[:4]


def test_a_prompt_of_another_processor_is_refused(make_engine: MakeEngine, strict: Any, their_model: Theirs) -> None:
    other = make_engine(**setting(multimodal={"max_pixels": 576}))
    made = other.chat_prompt(asking("a", 1))
    ask_all(
        strict,
        made,
        InvalidPromptError,
        r"other settings of its processor: make the prompt with chat_prompt\(\) of this engine",
    )
    check_good(strict, their_model)


def test_a_template_that_shows_no_picture_is_told_from_one_that_shows_too_many(make_engine: MakeEngine) -> None:
    silent = "{% for message in messages %}{{ message.content if message.content is string else 'x' }}{% endfor %}"
    engine: Any = make_engine(**setting(), chat_template=silent)
    with pytest.raises(InvalidPromptError, match=r"1 image, .* 0 placeholders for that: it may render those of a user"):
        engine.generate(asking("a"), PARAMS)


# --- too long ---------------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_too_long_by_its_picture_is_refused(make_engine: MakeEngine, their_model: Theirs) -> None:
    engine: Any = make_engine(**setting(), max_model_len=64)
    assert len(engine.chat_prompt(asking(1))) + 40 < 64 <= len(engine.chat_prompt(image(picture("x", 8, 6))))
    ask_all(engine, engine.chat_prompt(image(picture("x", 8, 6))), PromptTooLongError, "max_model_len is 64")
    assert counts(engine) == (0, 0, 0)
    prompt = engine.chat_prompt(asking("a", 1))
    assert engine.generate(prompt, PARAMS).token_ids == their_model.answer(prompt).token_ids[:4]


def test_pictures_too_long_together_are_refused_early(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = make_engine(**setting(), max_model_len=64)
    reader = engine.engine_core.input_processor.prompts.media
    made: list[str] = []
    process = reader.process
    monkeypatch.setattr(reader, "process", lambda part, what: made.append(what) or process(part, what))
    with pytest.raises(
        PromptTooLongError, match="of the messages are 80 tokens, counted up to number 4; max_model_len is 64"
    ):
        engine.chat_prompt(asking("c", "c", "c", "c", "c", "c"))
    assert len(made) == 4
    assert len(engine.chat_prompt(asking("c", "c", "c"))) > 60, "what leaves room for a token is made"


def test_a_prompt_that_the_memory_never_holds_is_refused(make_engine: MakeEngine) -> None:
    engine: Any = make_engine(**setting(tokens=48))
    with pytest.raises(InvalidRequestError, match="48"):
        engine.add_request(image(picture("x", 8, 6)), PARAMS)
    assert engine.generate(asking("d"), PARAMS).finish_reason == "length"


# --- models without eyes ----------------------------------------------------------------------------------------------


@pytest.fixture
def text_engine(tiny_directory: Path) -> Iterator[LLMEngine]:
    """m6 on a model that reads only."""
    model = ModelConfig(model=tiny_directory, device="cpu", dtype="float32")
    with LLMEngine(model_config=model, **setting()) as engine:
        yield engine


def test_a_text_model_refuses_pictures_and_answers_texts(text_engine: Any, strict: Any) -> None:
    ask_all(text_engine, asking("a", "v", 1), InvalidPromptError, "have 2 images or videos, .* takes texts only")
    made = strict.chat_prompt(asking("d", 1))
    with pytest.raises(InvalidPromptError, match="has images or videos, and this model takes texts only"):
        text_engine.generate(made, PARAMS)
    conversation = [{"role": "user", "content": "What is a cat?"}]
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "a cat?"}]}]
    assert text_engine.chat(in_parts, PARAMS).token_ids == text_engine.chat(conversation, PARAMS).token_ids
    assert text_engine.chat(conversation, PARAMS).token_ids == text_engine.generate(conversation, PARAMS).token_ids
    check_drained(text_engine)
