"""Guesses beside all else that a request may ask for: it gets what m1 gives, and is told how the guesses fared."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from m1_single_request.outputs import RequestOutput
from m5_chunked_prefill_spec import InvalidRequestError, SamplingParams
from tests.equivalence.answers import assert_same_logprobs
from tests.equivalence.traffic import prompt_of
from tests.m5_chunked_prefill_spec.engines import (
    MakeEngine,
    Recorder,
    Remembered,
    ask_all,
    ask_in_turn,
    check_flushed,
    greedy,
    guessing_engine,
    run,
    setting,
)

PROMPTS = [prompt_of(length, which) for which, length in enumerate((5, 9, 16, 21))]
LENGTH = 20
DRAWN = {"temperature": 1.0, "seed": 11, "top_k": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "log-probabilities": {"logprobs": 3},
    "those of the sampled token only": {"logprobs": 0},
    "log-probabilities of the prompt": {"prompt_logprobs": 2, "logprobs": 1},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.8, "presence_penalty": 0.5, "logprobs": 1},
    "a bias": {"logit_bias": {100: 3.0, 200: -3.0}},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": list(range(0, 4096, 2))},
    "draws": DRAWN,
    "draws with everything": DRAWN
    | {"top_p": 0.9, "min_p": 0.02, "frequency_penalty": 1.1, "logprobs": 2, "prompt_logprobs": 0}
    | {"min_tokens": 9, "stop_token_ids": list(range(0, 4096, 3)), "logit_bias": {7: 2.0}},
}


def check_same(output: RequestOutput, wanted: RequestOutput) -> None:
    """Tokens, text, end and all log-probabilities are the wanted ones."""
    assert output.error is None
    (mine,), (right,) = output.outputs, wanted.outputs
    assert (mine.token_ids, mine.text) == (right.token_ids, right.text)
    assert (mine.finish_reason, mine.stop_reason) == (right.finish_reason, right.stop_reason)
    assert_same_logprobs(mine.logprobs, right.logprobs, exact_ranks=False)
    assert_same_logprobs(output.prompt_logprobs, wanted.prompt_logprobs, exact_ranks=False)


def known_of(wanted: Sequence[RequestOutput]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """These answers, by their prompts."""
    return {tuple(output.prompt_token_ids): output.token_ids for output in wanted}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("drafts", "wrong_every"), [(1, 0), (7, 0), (4, 3)])
def test_whatever_is_asked_for_comes_as_without_guesses(
    make_engine: MakeEngine, m1: Remembered, name: str, drafts: int, wrong_every: int
) -> None:
    params = SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True} | OPTIONS[name])
    wanted = [m1.generate(prompt, params) for prompt in PROMPTS]
    engine = guessing_engine(make_engine, known_of(wanted), drafts=drafts, wrong_every=wrong_every)
    for output, right in zip(ask_all(engine, [(prompt, params) for prompt in PROMPTS]), wanted, strict=True):
        check_same(output, right)
    assert engine.stats().num_accepted_tokens > 5
    check_flushed(engine)


@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("schedule", ["decode_first", "prefill_first"])
def test_all_of_it_in_mixed_steps_and_pieces(
    make_engine: MakeEngine, m1: Remembered, budget: int, schedule: str
) -> None:
    asked = [
        (prompt_of(6 + 5 * i, i), SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True} | options))
        for i, options in enumerate(OPTIONS.values())
    ]
    wanted = [m1.generate(*one) for one in asked]
    engine = guessing_engine(make_engine, known_of(wanted), max_num_batched_tokens=budget, schedule=schedule)
    for output, right in zip(ask_in_turn(engine, asked), wanted, strict=True):
        check_same(output, right)


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize(("drafts", "wrong_every"), [(1, 0), (7, 0), (4, 3)])
@pytest.mark.parametrize("stop", [(), ("e",), ("never said",)])
def test_the_deltas_of_a_stream_are_the_text(
    make_engine: MakeEngine, m1: Remembered, drafts: int, wrong_every: int, stop: Sequence[str]
) -> None:
    """Several tokens may come with one delta, and a stop within it is cut as elsewhere."""
    for prompt in PROMPTS:
        params = greedy(LENGTH, stop=stop)
        wanted = m1.generate(prompt, params)
        known = known_of([m1.generate(prompt, greedy(LENGTH))])
        engine = guessing_engine(make_engine, known, drafts, wrong_every)
        shown, tokens = [""], [0]
        for output in engine.stream(prompt, params):
            shown.append(output.text)
            tokens.append(len(output.token_ids))
        deltas = [after.removeprefix(before) for before, after in pairwise(shown)]
        assert "".join(deltas) == shown[-1] == wanted.text
        assert all(after.startswith(before) for before, after in pairwise(shown)), "what was shown is never taken back"
        assert tokens[-1] == len(wanted.token_ids) and tokens == sorted(tokens)
        assert max(after - before for before, after in pairwise(tokens)) > 1 or stop == ("e",)


# --- who is guessed for, and what came of it --------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["yes", 1, None, 0.0, [True]])
def test_speculate_is_true_or_false(make_engine: MakeEngine, value: Any) -> None:
    engine = make_engine(**setting(method="ngram"))
    with pytest.raises(InvalidRequestError, match=r"speculate=.* is not valid: Expected `bool`"):
        engine.add_request([5, 6], greedy(2), speculate=value)
    assert engine.add_request([5, 6], greedy(1), speculate=False) == "req-0", "the refused one took no number"


@pytest.mark.parametrize("wrong_every", [0, 1, 3])
def test_metrics_of_requests_add_up_to_the_engine_s(make_engine: MakeEngine, m1: Remembered, wrong_every: int) -> None:
    wanted = [m1.generate(prompt, greedy(LENGTH)) for prompt in PROMPTS]
    engine = guessing_engine(make_engine, known_of(wanted), wrong_every=wrong_every)
    recorder = Recorder(engine.tracer)
    metrics = [output.metrics for output in ask_all(engine, [(prompt, greedy(LENGTH)) for prompt in PROMPTS])]
    stats = engine.stats()
    assert stats.num_draft_tokens == sum(m.num_draft_tokens for m in metrics) > 0
    assert stats.num_accepted_tokens == sum(m.num_accepted_tokens for m in metrics)
    verified = recorder.events("verified")
    assert stats.num_verifications == len(verified)
    assert stats.num_accepted_tokens == sum(event.accepted for event in verified)
    assert stats.num_draft_tokens == sum(len(event.drafted) for event in verified)
    if wrong_every == 0:
        assert stats.acceptance_rate == 1 and stats.accept_length == 1 + stats.num_accepted_tokens / len(verified)
    if wrong_every == 1:
        assert stats.num_accepted_tokens == stats.acceptance_rate == 0 and stats.accept_length == 1


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_a_parent_counts_the_guesses_of_all_its_children(make_engine: MakeEngine, m1: Remembered, method: str) -> None:
    engine = make_engine(**setting(8, method=method))
    params = SamplingParams(
        max_tokens=LENGTH, n=3, temperature=0.7 if method == "ngram" else 0.0, seed=5, ignore_eos=True
    )
    prompt = [31, 32, 33] * 4
    engine.add_request(prompt, params, request_id="parent")
    output = run(engine)["parent"]
    assert len(output.outputs) == 3
    for i, completion in enumerate(output.outputs):
        own = SamplingParams(max_tokens=LENGTH, temperature=params.temperature, seed=5 + i, ignore_eos=True)
        assert completion.token_ids == m1.generate(prompt, own).token_ids
    stats = engine.stats()
    assert output.metrics.num_draft_tokens == stats.num_draft_tokens > 0
    assert output.metrics.num_accepted_tokens == stats.num_accepted_tokens
    without = make_engine(**setting(8, method=method)).generate(prompt, params, speculate=False)
    assert without.metrics.num_draft_tokens == 0
    assert [c.token_ids for c in without.outputs] == [c.token_ids for c in output.outputs]
