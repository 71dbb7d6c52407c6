"""Log-probabilities: the shapes of both endpoints, the bytes of tokens, and numbers that JSON has."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from m1_single_request.outputs import Logprob
from m7_serving.openai.logprobs import LEAST, chat_logprobs, completion_logprobs, finite, token_bytes
from tests.m1_single_request.helpers import real_tokenizer, sentencepiece_tokenizer
from tests.m7_serving.scripted import ids_of

ROW = {7: Logprob(-3.0, 4, "seven"), 1: Logprob(-0.5, 1, "one"), 2: Logprob(-1.0, 2, "two"), 3: Logprob(-2.0, 3, "x")}
"""Token 7 is none of the best three."""
BEST_ROW = {1: Logprob(-0.5, 1, "one"), 2: Logprob(-1.0, 2, "two")}


def text_of(token_id: int, tokenizer: Any = None) -> str:
    return str((tokenizer or real_tokenizer()).decode([token_id], clean_up_tokenization_spaces=False))


def test_a_chat_has_an_object_for_each_token() -> None:
    found = chat_logprobs([7], [ROW], 2, real_tokenizer())
    one = {"token": "one", "logprob": -0.5, "bytes": [111, 110, 101]}
    two = {"token": "two", "logprob": -1.0, "bytes": [116, 119, 111]}
    own = {"token": "seven", "logprob": -3.0, "bytes": list(b"seven"), "top_logprobs": [one, two]}
    assert found == {"content": [own], "refusal": None}


@pytest.mark.parametrize(("num_top", "tokens"), [(0, []), (1, ["one"]), (3, ["one", "two", "x"])])
def test_a_chat_has_the_most_likely_tokens_that_were_asked_for(num_top: int, tokens: list[str]) -> None:
    content = chat_logprobs([7], [ROW], num_top, real_tokenizer())["content"][0]
    assert [top["token"] for top in content["top_logprobs"]] == tokens


def test_a_completion_has_four_lists() -> None:
    found = completion_logprobs([1, 7], [BEST_ROW, ROW], 10, real_tokenizer())
    assert found == {
        "tokens": ["one", "seven"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"one": -0.5, "two": -1.0}, {"one": -0.5, "two": -1.0, "x": -2.0, "seven": -3.0}],
        "text_offset": [10, 13],
    }
    assert list(found["top_logprobs"][1]) == ["one", "two", "x", "seven"]


def test_the_first_token_of_a_prompt_has_none() -> None:
    token_id = ids_of("a")[0]
    found = completion_logprobs([token_id, 1], [None, BEST_ROW], 0, real_tokenizer())
    assert found["tokens"] == ["a", "one"] and found["text_offset"] == [0, 1]
    assert found["token_logprobs"] == [None, -0.5] and found["top_logprobs"][0] is None


def test_of_two_tokens_with_one_text_the_more_likely_one_is_kept() -> None:
    row = {5: Logprob(-2.0, 2, "\ufffd"), 6: Logprob(-1.0, 1, "\ufffd")}
    found = completion_logprobs([5], [row], 0, real_tokenizer())
    assert found["top_logprobs"] == [{"\ufffd": -1.0}] and found["token_logprobs"] == [-2.0]


def test_no_token_has_no_logprobs() -> None:
    assert chat_logprobs([], [], 2, real_tokenizer())["content"] == []
    assert completion_logprobs([], [], 3, real_tokenizer())["text_offset"] == []


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf, -1e30])
def test_what_json_lacks_becomes_the_least(value: float) -> None:
    row = {1: Logprob(value, 1, "one")}
    assert finite(value) == LEAST
    for found in (chat_logprobs([1], [row], 1, real_tokenizer()), completion_logprobs([1], [row], 0, real_tokenizer())):
        assert str(LEAST) in json.dumps(found, allow_nan=False)


def test_any_other_value_stays() -> None:
    assert finite(-0.25) == -0.25 and finite(0.0) == 0.0


@given(st.text(min_size=1, max_size=8))
def test_the_bytes_of_tokens_joined_are_those_of_the_text(text: str) -> None:
    for ids in (ids_of(text), real_tokenizer().encode(text, add_special_tokens=False)):
        joined = [byte for i in ids for byte in token_bytes(i, text_of(i), real_tokenizer())]
        assert bytes(joined).decode() in (text, real_tokenizer().decode(ids))


def test_a_byte_of_sentencepiece_is_itself() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xA9>"])
    assert isinstance(ids, list)
    assert bytes(b for i in ids for b in token_bytes(i, text_of(i, tokenizer), tokenizer)).decode() == "é"


def test_a_special_token_has_the_bytes_of_its_name() -> None:
    token_id = real_tokenizer().eos_token_id
    name = text_of(token_id)
    assert bytes(token_bytes(token_id, name, real_tokenizer())).decode() == name
