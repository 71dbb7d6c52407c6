"""`/tokenize` and `/detokenize`."""

import asyncio
from typing import Any

import pytest

from m1_single_request.errors import PromptTooLongError
from m7_serving.openai.fields import InvalidFieldError
from m7_serving.openai.requests import DetokenizeRequest, TokenizeRequest
from m7_serving.openai.tokens import detokenize, tokenize
from tests.m1_single_request.helpers import real_tokenizer, sentencepiece_tokenizer
from tests.m7_serving.parsed import parsed
from tests.m7_serving.scripted import MAX_MODEL_LEN, ScriptedLLM

TEXT = "Once upon a time 🙂"


def tokenized(**body: Any) -> dict[str, Any]:
    llm: Any = ScriptedLLM()
    found = asyncio.run(tokenize(llm, parsed(TokenizeRequest, body)))
    assert llm.threaded
    return found


def detokenized(tokens: list[int], tokenizer: Any = None) -> str:
    llm: Any = ScriptedLLM(tokenizer=tokenizer)
    found = asyncio.run(detokenize(llm, parsed(DetokenizeRequest, {"tokens": tokens})))
    assert llm.threaded and list(found) == ["prompt"]
    return str(found["prompt"])


def test_a_text_becomes_tokens() -> None:
    ids = real_tokenizer().encode(TEXT)
    assert tokenized(prompt=TEXT) == {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids}
    assert tokenized(prompt="")["count"] == 0


def test_the_tokens_may_come_as_text() -> None:
    found = tokenized(prompt=TEXT, return_token_strs=True)
    assert found["token_strs"] == real_tokenizer().convert_ids_to_tokens(found["tokens"])


def test_messages_become_the_tokens_of_the_template() -> None:
    text = detokenized(tokenized(messages=[{"role": "developer", "content": "Hi"}])["tokens"])
    assert text == "<|im_start|>system\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_tokens_become_their_text() -> None:
    assert detokenized(tokenized(prompt=TEXT)["tokens"]) == TEXT
    assert detokenized([]) == ""
    assert detokenized([real_tokenizer().eos_token_id]) == real_tokenizer().eos_token
    tokenizer = sentencepiece_tokenizer()
    assert detokenized(tokenizer.encode("the world", add_special_tokens=False), tokenizer) == "the world"


@pytest.mark.parametrize("wrong", [-1, 10**6, 10**30])
def test_a_token_outside_the_vocabulary_is_refused(wrong: int) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        detokenized([1, wrong])
    assert caught.value.param == "tokens"


def test_more_tokens_than_the_model_takes_are_refused() -> None:
    assert detokenized([1] * MAX_MODEL_LEN)
    with pytest.raises(PromptTooLongError):
        detokenized([1] * (MAX_MODEL_LEN + 1))
