"""What may be a prompt: every form, every length, and what is refused with an error of ours."""

import array
import math
from typing import Any

import numpy as np
import pytest
import torch

from m1_single_request import InvalidPromptError, LLMEngine, PromptTooLongError, SamplingParams
from tests.m1_single_request.engines import MAX_MODEL_LEN, MakeEngine, greedy

# --- length -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", [], ()], ids=repr)
def test_an_empty_prompt_is_refused(engine: LLMEngine, prompt: Any) -> None:
    with pytest.raises(InvalidPromptError, match="empty"):
        engine.generate(prompt, greedy(3))


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, 10 * MAX_MODEL_LEN])
def test_a_prompt_that_leaves_no_room_is_refused(engine: LLMEngine, length: int) -> None:
    with pytest.raises(PromptTooLongError, match=rf"'mine'.*{length}.*{MAX_MODEL_LEN}.*{MAX_MODEL_LEN - 1}"):
        engine.generate([7] * length, greedy(1), request_id="mine")
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("room", [1, 15])
@pytest.mark.parametrize("min_tokens", [0, 50])
def test_prompt_and_output_together_keep_to_the_limit(make_engine: MakeEngine, room: int, min_tokens: int) -> None:
    engine = make_engine(max_model_len=16)
    output = engine.generate([7] * (16 - room), greedy(50, min_tokens=min_tokens))
    assert (len(output.token_ids), output.finish_reason) == (room, "length")
    free = make_engine().generate([7] * (16 - room), greedy(50)).token_ids
    assert output.token_ids == free[:room]


def test_a_text_is_measured_in_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=4)
    assert engine.generate("a a a", greedy(9)).finish_reason == "length"
    with pytest.raises(PromptTooLongError):
        engine.generate("a a a a", greedy(9))


# --- token ids --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_id", [4096, 10**6, 2**31, 2**63, 2**64, 10**30, -1, -(2**63)])
def test_a_token_id_outside_the_vocabulary_is_refused(engine: LLMEngine, token_id: int) -> None:
    with pytest.raises(InvalidPromptError, match=f"{token_id} is outside the vocabulary"):
        engine.generate([5, token_id, 5], greedy(3))
    assert engine.generate([0, 4095], greedy(2)).finished, "these are the ends of it"


NO_PROMPTS: list[Any] = [
    None, 5, 2.5, [1.0], [math.nan], [True], [None], ["a"], [[1, 2], [3]], [np.int64(4)], np.array([1, 2]),
    torch.tensor([1, 2]), {1, 2}, {1: 2}, iter([1, 2]), b"bytes", bytearray(b"bytes"), memoryview(b"bytes"), object,
]  # fmt: skip


@pytest.mark.parametrize("prompt", NO_PROMPTS, ids=lambda prompt: f"{type(prompt).__name__}-{str(prompt)[:12]}")
def test_what_is_neither_text_nor_token_ids_is_refused(engine: LLMEngine, prompt: Any) -> None:
    with pytest.raises(InvalidPromptError, match="a prompt is a string or a list of token ids"):
        engine.generate(prompt, greedy(3))
    assert not engine.has_unfinished_requests()


def test_a_refusal_is_one_line_whatever_it_shows(engine: LLMEngine) -> None:
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    for prompt, shown in (
        (np.zeros((40, 40)), "not ndarray of float64 and shape (40, 40)"),
        ([nested], "not [[[[[...]]]]]"),
    ):
        with pytest.raises(InvalidPromptError) as caught:
            engine.generate(prompt, greedy(3))
        assert shown in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", [(1, 2), range(1, 3), array.array("q", [1, 2])], ids=lambda p: type(p).__name__)
def test_any_sequence_of_whole_numbers_is_a_prompt(engine: LLMEngine, prompt: Any) -> None:
    assert engine.generate(prompt, greedy(2)).prompt_token_ids == (1, 2)


def test_a_prompt_that_changes_later_does_not_change_its_request(engine: LLMEngine) -> None:
    prompt = [5, 6, 7]
    stream = engine.stream(prompt, greedy(3))
    prompt.append(10**6)
    assert list(stream)[-1].prompt_token_ids == (5, 6, 7)


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d"], ids=ascii)
def test_a_lone_surrogate_is_no_text(engine: LLMEngine, text: str) -> None:
    with pytest.raises(InvalidPromptError, match="not valid text"):
        engine.generate(text, greedy(3))


@pytest.mark.parametrize("text", ["\x00", "😀", "漢", "\u200d", " ", "\n", "\ufffd", "<|im_start|>"], ids=ascii)
def test_any_other_text_runs(engine: LLMEngine, text: str) -> None:
    output = engine.generate(text, greedy(2))
    assert output.prompt == text and output.finished


def test_parameters_are_checked_against_the_model(engine: LLMEngine) -> None:
    bad = [
        {"stop_token_ids": [4096]},
        {"logit_bias": {4096: 1.0}},
        {"logprobs": 4097},
        {"prompt_logprobs": 4097},
        {"n": 2},
    ]
    for values in bad:
        with pytest.raises(Exception, match=next(iter(values))) as caught:
            engine.generate("a", SamplingParams(**values))
        assert type(caught.value).__name__ == "InvalidParamsError"
    assert len(engine.generate("a", greedy(1, logprobs=4096)).outputs[0].logprobs[0]) == 4096
