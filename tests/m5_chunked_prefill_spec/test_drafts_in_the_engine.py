"""Guesses in the whole engine: answers end where m1's do, and nothing behind the end is left anywhere.

The guesses come from somebody who knows the whole answer, also what would have followed a stop, and errs now and then:
so stops lie at any place of an accepted run.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from m1_single_request.outputs import RequestOutput
from m5_chunked_prefill_spec import LLMEngine, SamplingParams
from tests.equivalence.traffic import prompt_of
from tests.m5_chunked_prefill_spec.cached import check_keys
from tests.m5_chunked_prefill_spec.engines import (
    MakeEngine,
    Remembered,
    ask_all,
    check_flushed,
    greedy,
    guessing_engine,
)

Answers = Mapping[tuple[int, ...], Sequence[int]]
PROMPTS = [prompt_of(length, which) for which, length in enumerate((5, 9, 16, 21))]
LENGTH = 24
GUESSES = [(1, 0), (3, 2), (7, 0), (7, 5)]
each_quality = pytest.mark.parametrize(("drafts", "wrong_every"), GUESSES)


@pytest.fixture
def answers(m1: Remembered) -> dict[tuple[int, ...], tuple[int, ...]]:
    """What is said to each prompt, if nothing stops it."""
    return {tuple(prompt): m1.generate(prompt, greedy(LENGTH)).token_ids for prompt in PROMPTS}


def all_of(engine: LLMEngine, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    """The answers, the engine looked at after every step, and the cache at the end."""
    said = ask_all(engine, asked)
    check_keys(engine, [[*output.prompt_token_ids, *output.token_ids] for output in said])
    return said


def check_ends(ours: Sequence[RequestOutput], theirs: Sequence[RequestOutput]) -> None:
    """The same tokens and text, for the same reason."""
    for output, wanted in zip(ours, theirs, strict=True):
        (mine,), (right,) = output.outputs, wanted.outputs
        assert output.error is None
        assert mine.token_ids == right.token_ids and mine.text == right.text
        assert (mine.finish_reason, mine.stop_reason) == (right.finish_reason, right.stop_reason)


# --- ends inside a run ------------------------------------------------------------------------------------------------

Case = tuple[list[tuple[list[int], SamplingParams]], dict[str, Any]]
"""Requests, and the settings in which the engines of m5 and m1 differ from the usual ones."""


def at_max_tokens(m1: Remembered, answers: Answers) -> Case:
    return [(PROMPTS[i % 4], greedy(1 + i)) for i in range(14)], {}


def at_a_stop_id(m1: Remembered, answers: Answers) -> Case:
    asked = []
    for prompt in PROMPTS:
        for place in (1, 2, 5, 8, 9):
            stop = answers[tuple(prompt)][place]
            asked.append((prompt, greedy(LENGTH, stop_token_ids=[stop], include_stop_str_in_output=place % 2 == 0)))
    return asked, {}


def at_a_stop_string(m1: Remembered, answers: Answers) -> Case:
    """Within a token, or across several."""
    asked = []
    for which, prompt in enumerate(PROMPTS):
        text = m1.generate(prompt, greedy(LENGTH)).text
        for start in range(3 + which, min(len(text) - 6, 40), 7):
            stop = text[start : start + 1 + start % 5]
            asked.append((prompt, greedy(LENGTH, stop=[stop], include_stop_str_in_output=start % 2 == 0)))
    assert len(asked) > 12
    return asked, {}


def at_the_end_of_sequence(m1: Remembered, answers: Answers, place: int) -> Case:
    """Unless it is ignored."""
    both = [SamplingParams(max_tokens=LENGTH, ignore_eos=ignores) for ignores in (False, True)]
    eos = {answers[tuple(prompt)][place] for prompt in PROMPTS}
    return [(prompt, params) for prompt in PROMPTS for params in both], {"eos_token_ids": eos}


def at_the_models_length(m1: Remembered, answers: Answers, room: int) -> Case:
    return [(prompt, greedy(LENGTH)) for prompt in PROMPTS[:3]], {"max_model_len": len(PROMPTS[2]) + room}


def not_before_min_tokens(m1: Remembered, answers: Answers, least: int) -> Case:
    """Forbidden tokens change the answer; the guesses are those of the changed answer."""
    stops = [[answers[tuple(prompt)][2], 7] for prompt in PROMPTS]
    params = [greedy(LENGTH, stop_token_ids=stop, min_tokens=least) for stop in stops]
    return list(zip(PROMPTS, params, strict=True)), {}


ENDS: list[tuple[Callable[..., Case], int | None, set[str]]] = [
    (at_max_tokens, None, {"length"}),
    (at_a_stop_id, None, {"stop"}),
    (at_a_stop_string, None, {"stop"}),
    *((at_the_end_of_sequence, place, {"stop", "length"}) for place in (1, 4, 8)),
    *((at_the_models_length, room, {"length"}) for room in (1, 2, 3, 6, 11)),
    *((not_before_min_tokens, least, {"stop", "length"}) for least in (3, 6, 10)),
]


@pytest.mark.sample(28)
@each_quality
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("end", "number", "reasons"), ENDS)
def test_an_answer_ends_as_in_m1_and_guesses_behind_its_end_are_in_no_cache(
    make_engine: MakeEngine,
    make_m1: Any,
    answers: Answers,
    drafts: int,
    wrong_every: int,
    page_size: int,
    end: Callable[..., Case],
    number: int | None,
    reasons: set[str],
) -> None:
    asked, changes = end(make_m1(), answers, *([] if number is None else [number]))
    theirs = make_m1(**changes)
    wanted = [theirs.generate(*one) for one in asked]
    due = {tuple(prompt): right.token_ids for (prompt, _), right in zip(asked, wanted, strict=True)}
    known = due if end is not_before_min_tokens else answers
    engine = guessing_engine(make_engine, known, drafts, wrong_every, page_size=page_size, **changes)
    outputs = all_of(engine, asked)
    check_ends(outputs, wanted)
    assert {output.finish_reason for output in outputs} <= reasons and engine.stats().num_draft_tokens > 0
    assert engine.stats().num_accepted_tokens > 5 or end is at_the_models_length
    check_flushed(engine)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_without_room_for_guesses_nobody_is_retracted_for_them(make_engine: MakeEngine, answers: Answers) -> None:
    """Two requests fill the memory to the last slot: what is left over for guesses is used, what is not is no loss."""
    tokens = len(PROMPTS[0]) + len(PROMPTS[1]) + 2 * LENGTH
    engine = guessing_engine(make_engine, answers, 7, 0, page_size=1, tokens=tokens)
    outputs = ask_all(engine, [(prompt, greedy(LENGTH)) for prompt in PROMPTS[:2]])
    assert [output.token_ids for output in outputs] == [answers[tuple(prompt)] for prompt in PROMPTS[:2]]
    assert engine.stats().num_retractions == 0 and engine.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("drafts", [1, 4, 7])
def test_right_guesses_save_steps(make_engine: MakeEngine, answers: Answers, drafts: int) -> None:
    """The prompt's step brings a token; then all but the last step bring one token more than were guessed."""
    engine = guessing_engine(make_engine, answers, drafts, 0)
    engine.generate(PROMPTS[0], greedy(LENGTH))
    assert engine.stats().num_steps == 1 + -(-(LENGTH - 1) // (1 + drafts))
