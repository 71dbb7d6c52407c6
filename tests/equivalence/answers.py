"""Comparisons with m1 for every milestone with batches: draws in company, draws without a seed, logprobs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from m1_single_request import SamplingParams
from tests.equivalence.traffic import prompt_of


def check_drawn_in_company(make_engine: Callable[[], Any], m1: Any, drawn: SamplingParams, *, longest: int) -> None:
    """A drawn answer is m1's whether it comes first, third or last among others, with prompts of `longest` tokens."""
    expected = m1.generate(prompt_of(8), drawn).token_ids
    others = [SamplingParams(max_tokens=n + 3, temperature=0.5 + n / 4, seed=n, ignore_eos=True) for n in range(5)]
    for place in (0, 2, 5):
        params = [*others[:place], drawn, *others[place:]]
        prompts = [prompt_of(3 * n + 1) for n in range(place)] + [prompt_of(8)] + [prompt_of(longest)] * (5 - place)
        outputs = list(make_engine().generate_batch(prompts, params).values())
        assert outputs[place].token_ids == expected, f"place {place}"


def check_unseeded(engine: Any, m1: Any) -> None:
    """Without a seed the engine's seed and the number of the request decide, as in m1: both have the same seed here."""
    params = SamplingParams(max_tokens=6, temperature=1.0)
    prompts = [prompt_of(n) for n in (5, 8, 3, 13)]
    ours, theirs = ([o.token_ids for o in one.generate_batch(prompts, params).values()] for one in (engine, m1))
    assert ours == theirs, f"{ours} are not {theirs}"


def check_logprobs(engine: Any, m1: Any, *, lengths: Sequence[int], top_k: int, exact_ranks: bool) -> None:
    """Logprobs of six prompts and of their outputs are m1's. One of them is drawn, from `top_k` tokens."""
    prompts = [prompt_of(length) for length in lengths]
    drawn = {"temperature": 1.0, "seed": 3, "top_k": top_k, "repetition_penalty": 1.5}
    asked = [
        SamplingParams(max_tokens=5, logprobs=3, prompt_logprobs=2),
        SamplingParams(max_tokens=7, prompt_logprobs=0),
        SamplingParams(max_tokens=3, logprobs=0),
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=4, **drawn),
        SamplingParams(max_tokens=6, logprobs=2, prompt_logprobs=1),
    ]
    outputs = engine.generate_batch(prompts, asked)
    expected = m1.generate_batch(prompts, asked)
    for output, wanted in zip(outputs.values(), expected.values(), strict=True):
        assert output.token_ids == wanted.token_ids, f"{output.token_ids} are not {wanted.token_ids}"
        assert_same_logprobs(output.prompt_logprobs, wanted.prompt_logprobs, exact_ranks=exact_ranks)
        assert_same_logprobs(output.outputs[0].logprobs, wanted.outputs[0].logprobs, exact_ranks=exact_ranks)


def assert_same_logprobs(rows: Any, wanted: Any, *, exact_ranks: bool) -> None:
    """The same tokens in every row, logprobs equal up to rounding, ranks 1 % apart at most unless `exact_ranks`."""
    if wanted is None:
        assert rows is None
        return
    assert len(rows) == len(wanted), f"{len(rows)} rows, {len(wanted)} are wanted"
    for row, other in zip(rows, wanted, strict=True):
        if other is None:
            assert row is None
            continue
        assert row.keys() == other.keys(), f"{row} is not {other}"
        for token_id, entry in other.items():
            found = row[token_id]
            assert found.logprob == pytest.approx(entry.logprob, abs=1e-4), f"{found} is not {entry}"
            assert found.decoded_token == entry.decoded_token, f"{found} is not {entry}"
            assert abs(found.rank - entry.rank) <= (0 if exact_ranks else entry.rank // 100), f"{found} is not {entry}"
