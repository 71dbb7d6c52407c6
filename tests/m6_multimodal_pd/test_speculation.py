"""Guesses where some see and some read: whatever is guessed, everybody gets transformers' tokens.

A proposer that repeats what was said before needs no eyes. A draft model would need them: it guesses for texts, and
who brings pictures must say that nobody is to guess for it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import m6_multimodal_pd
from m1_single_request.model_loader import LoadedModel as LoadedTextModel
from m6_multimodal_pd import InvalidRequestError, SamplingParams
from m6_multimodal_pd.model_loader import LoadedModel
from tests.m5_chunked_prefill_spec.conftest import PairMaker
from tests.m5_chunked_prefill_spec.engines import knowing
from tests.m6_multimodal_pd.engines import (
    MakeEngine,
    Recorder,
    check_drained,
    check_flushed,
    counts,
    finish,
    greedy,
    setting,
)
from tests.m6_multimodal_pd.seeing import MOST_TOKENS, Theirs, asking

PARAMS = greedy(MOST_TOKENS)
QUESTIONS: tuple[tuple[str | int, ...], ...] = (("a", 1), ("v", 2), (3, "c", "b"), (4, 5), ("a", "d", 1))


def serve(engine: Any, asked: dict[str, tuple[Any, dict[str, Any]]], params: SamplingParams = PARAMS) -> dict[str, Any]:
    """Ask all at once and step to the end; the last output of everybody."""
    for rid, (conversation, options) in asked.items():
        engine.add_request(conversation, params, request_id=rid, **options)
    return finish(engine)


# --- guesses that need no eyes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong_every", [0, 3])
@pytest.mark.parametrize("budget", [64, 12], ids=["whole", "in pieces"])
def test_guesses_behind_pictures_are_verified(
    make_engine: MakeEngine, their_model: Theirs, budget: int, wrong_every: int
) -> None:
    plain: Any = make_engine(**setting())
    prompts = [plain.chat_prompt(asking(*parts)) for parts in QUESTIONS]
    answers = {tuple(prompt): their_model.answer(prompt).token_ids for prompt in prompts}
    limits = setting(8, budget, method="ngram", drafts=3)
    engine: Any = make_engine({"proposer": knowing(answers, wrong_every=wrong_every)}, **limits)
    recorder = Recorder(engine.tracer)
    asked: dict[str, Any] = {f"r{number}": (prompt, {}) for number, prompt in enumerate(prompts)}
    for rid, output in serve(engine, asked).items():
        assert output.token_ids == their_model.answer(asked[rid][0]).token_ids, rid
    by_request = {rid: [event.accepted for event in recorder.events("verified") if event.rid == rid] for rid in asked}
    assert all(sum(accepted) > 0 for accepted in by_request.values()), "also for those who brought pictures"
    stats = engine.stats()
    assert (stats.num_accepted_tokens == stats.num_draft_tokens) == (not wrong_every)
    assert (stats.acceptance_rate == 1) == (not wrong_every) and stats.accept_length > 1
    check_flushed(engine)


# --- a draft model ----------------------------------------------------------------------------------------------------


@pytest.fixture
def make_drafting(loaded: LoadedModel, loaded_reader: LoadedTextModel) -> Iterator[Any]:
    """Engines whose guesses come from that draft model."""
    maker = PairMaker(loaded, loaded_reader, m6_multimodal_pd)
    yield maker
    maker.check()


TEXTS: dict[str, Sequence[int]] = {"t0": (1, 2), "t1": (3, 4, 5), "t2": (6,)}
SEEN: dict[str, Sequence[str | int]] = {"s0": ("a", 1), "s1": ("v", "b", 2)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("budget", [96, 13], ids=["whole", "in pieces"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_texts_beside_pictures_are_guessed(
    make_drafting: Any, their_model: Theirs, page_size: int, budget: int
) -> None:
    limits = setting(8, budget, page_size=page_size, method="draft_model", drafts=3)
    engine: Any = make_drafting(**limits)
    recorder = Recorder(engine.tracer)
    asked = {rid: (asking(*parts), {}) for rid, parts in TEXTS.items()}
    asked |= {rid: (asking(*parts), {"speculate": False}) for rid, parts in SEEN.items()}
    for rid, output in serve(engine, asked).items():
        assert output.token_ids == their_model.answer(engine.chat_prompt(asked[rid][0])).token_ids, rid
    guessed = {event.rid for event in recorder.events("verified")}
    assert guessed == set(TEXTS) and engine.stats().num_accepted_tokens > 10
    assert any(set(TEXTS) & set(batch.rids) and set(SEEN) & set(batch.rids) for batch in recorder.events("batch"))
    check_flushed(engine)


def test_a_prefix_of_texts_and_pictures_is_right_for_both_models(make_drafting: Any, their_model: Theirs) -> None:
    """The draft model has read it whoever brought it, so its guesses are as good as without sharing."""
    alone: Any = make_drafting(**setting(page_size=1, cache="chunk", method="draft_model", drafts=3))
    engine: Any = make_drafting(**setting(page_size=1, method="draft_model", drafts=3))
    opening = (1, 2, 3, 4)
    sees, reads = asking(*opening, "c", 5), asking(*opening, 6)
    prompt = engine.chat_prompt(sees)
    output = engine.generate(sees, PARAMS, speculate=False)
    assert output.token_ids == their_model.answer(prompt).token_ids and engine.stats().num_draft_tokens == 0
    for own in (alone, engine):
        output = own.generate(reads, PARAMS)
        assert output.token_ids == their_model.answer(own.chat_prompt(reads)).token_ids
    start = prompt.multimodal_inputs.mm_items[0].start
    assert start > output.metrics.cached_tokens > 20
    accepted = [own.stats().num_accepted_tokens for own in (alone, engine)]
    assert accepted[0] == accepted[1] > 0
    again = engine.generate(asking(*opening, "c", 7), PARAMS, speculate=False)
    assert again.metrics.cached_tokens >= start + 20 and counts(engine)[0] == 1
    check_flushed(engine)


@pytest.mark.parametrize("options", [{}, {"speculate": True}], ids=str)
def test_pictures_want_no_guesses_of_a_draft_model(
    make_drafting: Any, their_model: Theirs, options: dict[str, bool]
) -> None:
    engine: Any = make_drafting(**setting(method="draft_model", drafts=3))
    recorder, before = Recorder(engine.tracer), engine.stats()
    message = "no vision tower: a request with images needs speculate=False, or .*method='ngram'"
    prompt = engine.chat_prompt(asking("a", 1))
    for ask in (engine.generate, engine.stream, engine.add_request):
        for conversation in (prompt, asking("a", 1)):
            with pytest.raises(InvalidRequestError, match=message):
                ask(conversation, PARAMS, **options)
    with pytest.raises(InvalidRequestError, match=message):
        engine.chat(asking("a", 1), PARAMS, **options)
    assert recorder.records == [] and engine.stats() == before
    outputs = list(engine.generate_batch([asking("v"), asking(1, 2), asking("a")], PARAMS, **options).values())
    assert [type(output.error) for output in outputs] == [InvalidRequestError, type(None), InvalidRequestError]
    assert outputs[1].token_ids == their_model.answer(engine.chat_prompt(asking(1, 2))).token_ids
    assert engine.stats().num_draft_tokens > 0
    assert engine.generate(prompt, PARAMS, speculate=False).token_ids == their_model.answer(prompt).token_ids
    check_drained(engine)
    check_flushed(engine)
