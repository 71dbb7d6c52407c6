"""What is computed of a picture is not computed again: KV behind the same text, embeddings wherever it stands."""

from typing import Any

import numpy as np
import pytest

from m6_multimodal_pd import LLMEngine, SamplingParams
from tests.m6_multimodal_pd.engines import MakeEngine, Recorder, counts, setting
from tests.m6_multimodal_pd.seeing import Theirs, asking, messages, picture, text

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def cached_tokens(engine: LLMEngine, conversation: Any) -> int:
    """How many tokens of its prompt an answer did not compute."""
    return engine.chat(conversation, PARAMS).metrics.cached_tokens


def start_of(engine: LLMEngine, conversation: Any, item: int = 0) -> int:
    """Where an item of a conversation begins in its prompt."""
    prompt: Any = engine.chat_prompt(conversation)
    return int(prompt.multimodal_inputs.mm_items[item].start)


@pytest.fixture
def engine(make_engine: MakeEngine) -> Any:
    """A cache of single tokens, so that hits are exact."""
    return make_engine(**setting(page_size=1))


# --- the prefix cache -------------------------------------------------------------------------------------------------


def test_the_same_question_about_another_picture_finds_what_stands_before_it(engine: Any) -> None:
    """Pictures of the same size: the tokens are the same to the last one."""
    other = {"type": "image", "image": picture("another", 3, 3)}
    first, second = asking(1, "a", 2), [{"role": "user", "content": [text(1), other, text(2)]}]
    assert engine.chat_prompt(first) == engine.chat_prompt(second)
    engine.chat(first, PARAMS)
    assert cached_tokens(engine, second) == start_of(engine, first)
    asked = len(engine.chat_prompt(first)) + len(engine.chat_prompt(second))
    assert engine.stats().hit_rate == pytest.approx(start_of(engine, first) / asked)


def test_a_second_turn_with_the_same_picture_does_not_run_the_tower(engine: Any, their_model: Theirs) -> None:
    engine.chat(messages((("a", 1),)), PARAMS)
    runs = counts(engine)[0]
    second = messages((("a", 1), (2,)))
    output = engine.chat(second, PARAMS)
    assert counts(engine)[0] == runs == 1
    assert output.metrics.cached_tokens > start_of(engine, second) + 9
    assert output.token_ids == their_model.answer(engine.chat_prompt(second)).token_ids[:4]


def test_equal_bytes_of_another_shape_are_another_key(engine: Any) -> None:
    """16 x 24 and 24 x 16 pixels of the same bytes, which become as many tokens."""
    pixels = np.random.default_rng(0).integers(0, 256, 16 * 24 * 3, dtype=np.uint8)
    pictures = [{"type": "image", "image": pixels.reshape(shape)} for shape in ((16, 24, 3), (24, 16, 3))]
    wide, high = ([{"role": "user", "content": [shown, text(1)]}] for shown in pictures)
    assert engine.chat_prompt(wide) == engine.chat_prompt(high)
    engine.chat(wide, PARAMS)
    assert cached_tokens(engine, high) == start_of(engine, high) and counts(engine)[1] == 2


def test_requests_under_different_salts_share_embeddings_and_no_kv(engine: Any) -> None:
    engine.chat(asking("a", 1), PARAMS)
    output = engine.chat(asking("a", 1), PARAMS, cache_salt="tenant")
    assert output.metrics.cached_tokens == 0 and counts(engine) == (1, 1, 1)


def test_a_prompt_made_by_one_engine_has_no_number_of_another(make_engine: MakeEngine, their_model: Theirs) -> None:
    """Each engine numbers contents for itself: a prompt from elsewhere must not meet another picture's KV."""
    first, second = make_engine(**setting(page_size=1)), make_engine(**setting(page_size=1))
    first.chat(asking("b", 1), PARAMS)
    made = first.chat_prompt(asking("b", 1))
    second.chat(asking("a", 1), PARAMS)
    output = second.generate(made, PARAMS)
    assert output.token_ids == their_model.answer(made).token_ids[:4]


# --- the embedding cache ----------------------------------------------------------------------------------------------


def test_embeddings_leave_for_others_and_come_again_when_needed(make_engine: MakeEngine, their_model: Theirs) -> None:
    row = 3 * 64 * 4  # bytes of a token of the tiny model
    engine = make_engine(**setting(page_size=1, cache="chunk", multimodal={"embedding_cache_bytes": 25 * row}))
    recorder = Recorder(engine.tracer)
    for question in (("a", 1), ("c", 1), ("a", 1)):
        prompt = engine.chat_prompt(asking(*question))
        assert engine.generate(prompt, PARAMS).token_ids == their_model.answer(prompt).token_ids[:4]
    assert counts(engine) == (3, 3, 0) and engine.stats().num_evicted_items == 2
    gone = [(event.num_tokens, event.num_bytes, event.used_bytes) for event in recorder.events("item_evicted")]
    assert gone == [(9, 9 * row, 0), (20, 20 * row, 0)]
    kinds = [kind for kind in recorder.kinds() if kind in ("encoder_run", "item_evicted")]
    assert kinds == ["encoder_run", *("encoder_run", "item_evicted") * 2], "after the run that needs the room"
    assert engine.stats().embedding_cache_bytes == 9 * row
