"""The sampler against a slow oracle: the right distribution, row by row, whatever stands in the rows beside it."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

from m1_single_request import SamplingParams
from m1_single_request.draws import uniforms
from m1_single_request.sampler import Sampler, best_tokens, filtered_probs, gather_logprobs
from m1_single_request.sampling_metadata import SamplingRow
from tests.m1_single_request.helpers import (
    adjusted_logits,
    exact_distribution,
    filtered,
    measured_distribution,
    metadata_of,
    row,
    sample,
    sample_at,
    softmax,
)
from tests.support.amounts import examples
from tests.support.operations import operations

VOCAB = 12
LARGEST_UNIFORM = 1 - 2**-53
FOUR = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]


def some_logits(num_rows: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def kept(logits: list[float], **params: Any) -> set[int]:
    """The tokens that a row can draw at all."""
    shares = measured_distribution(logits, row(**{"temperature": 1.0} | params))
    return set(np.flatnonzero(shares).tolist())


# --- the pipeline -----------------------------------------------------------------------------------------------------

a_number = st.floats(-2, 2).map(lambda x: round(x, 3))
some_params = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 9e-6, 0.3, 0.7, 1.0, 1.8])},
    optional={
        "top_k": st.integers(1, VOCAB + 3),
        "top_p": st.floats(0.05, 1.0).map(lambda x: round(x, 3)),
        "min_p": st.floats(0.0, 0.9).map(lambda x: round(x, 3)),
        "presence_penalty": a_number,
        "frequency_penalty": a_number,
        "repetition_penalty": st.floats(0.2, 2.0).map(lambda x: round(x, 3)),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), a_number.map(lambda x: 5 * x), max_size=3),
        "min_tokens": st.integers(0, 4),
    },
)
some_ids = st.lists(st.integers(0, VOCAB - 1), max_size=6)


def is_clear_cut(logits: list[float], params: SamplingParams, history: dict[str, Any]) -> bool:
    """Whether a filter's limit is far enough from every token for float32 to see it where the oracle sees it."""
    values = adjusted_logits(logits, params, **history)
    if params.is_greedy:
        second, best = np.sort(values)[-2:]
        return float(best - second) > 1e-4
    probs = softmax(values / params.temperature)
    supports = set()
    for nudge in (-1e-5, 0.0, 1e-5):
        ranked = np.sort(probs)[::-1]
        if 0 < params.top_k < len(ranked) and ranked[params.top_k - 1] - ranked[params.top_k] < 1e-6:
            return False
        min_p = min(1.0, max(0.0, params.min_p * (1 + nudge)))
        top_p = params.top_p if params.top_p == 1 else min(1 - 1e-9, params.top_p * (1 + nudge))
        supports.add(tuple(filtered(probs, min_p=min_p, top_k=params.top_k, top_p=top_p) > 0))
    return len(supports) == 1


@pytest.mark.usefixtures("way")
@settings(max_examples=examples(150))
@given(
    logits=st.lists(st.floats(-6, 6, width=32), min_size=VOCAB, max_size=VOCAB),
    params=some_params,
    prompt=some_ids.filter(bool),
    output=some_ids,
    stop_ids=st.sets(st.integers(0, VOCAB - 1), max_size=2),
)
def test_any_row_draws_from_the_distribution_of_the_oracle(
    logits: list[float], params: dict[str, Any], prompt: list[int], output: list[int], stop_ids: set[int]
) -> None:
    wanted = SamplingParams(**params)
    history: dict[str, Any] = {"prompt": prompt, "output": output, "stop_ids": sorted(stop_ids)}
    assume(is_clear_cut(logits, wanted, history))
    measured = measured_distribution(logits, row(wanted, **history), num=2048)
    exact = exact_distribution(logits, wanted, **history)
    assert np.abs(measured - exact).max() <= 2 / 2048
    assert not (measured[exact == 0] > 0).any(), "a filtered token was drawn"


KEPT: list[tuple[list[float], dict[str, Any], set[int]]] = [
    # top_p keeps the fewest tokens that reach it; equal logits have shares that are exact numbers
    (FOUR, {"top_p": 1e-300}, {0}),
    (FOUR, {"top_p": 0.69}, {0, 1}),
    ([0.0] * 4, {"top_p": 0.75}, {0, 1, 2}),
    # min_p drops tokens that are less likely than its share of the best, and no equal one
    ([1.0, 1.0, 0.0, 1.0], {"min_p": 1.0}, {0, 1, 3}),
    # top_k keeps exactly the k best, of equal ones the lowest ids
    ([1.0, 3.0, 1.0, 1.0, 2.0], {"top_k": 3}, {0, 1, 4}),
    # each filter acts on what the one before left: of .4 and .3 the first has .57
    (FOUR, {"top_k": 2, "top_p": 0.5}, {0}),
    (FOUR, {"min_p": 0.6, "top_p": 0.5}, {0}),
    # temperature acts before the filters
    (FOUR, {"top_p": 0.38, "temperature": 2.0}, {0, 1}),
    (FOUR, {"min_p": 0.3, "temperature": 2.0}, {0, 1, 2, 3}),
]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("logits", "params", "expected"), KEPT, ids=lambda value: str(value)[:40])
def test_filters_keep(logits: list[float], params: dict[str, Any], expected: set[int]) -> None:
    assert kept(logits, **params) == expected


# --- draws ------------------------------------------------------------------------------------------------------------


def test_the_number_of_a_row_is_that_of_its_seed_and_output_position() -> None:
    rows = [row(temperature=1.0, seed=s, output=[1] * t) for s, t in ((3, 0), (3, 1), (-8, 5))]
    assert metadata_of(rows, VOCAB).uniforms.tolist() == uniforms([3, 3, -8], [0, 1, 5]).tolist()  # type: ignore[union-attr]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"min_p": 0.2, "top_k": 3, "top_p": 0.9}]
)
@pytest.mark.parametrize("uniform", [0.0, LARGEST_UNIFORM])
def test_a_token_of_probability_zero_is_never_drawn_even_at_the_ends(filters: dict[str, Any], uniform: float) -> None:
    never = -math.inf
    for logits in (
        [never, never, 1.0, 0.5, never, 0.0, 0.2, never, never],
        [0.0, never, never, never],
        [never, never, never, 0.0],
        [-800.0, 0.0, -800.0, 0.1, -800.0],  # far too small for a float64: exp(-800) is 0
    ):
        (token,) = sample_at(logits, row(temperature=1.0, **filters), [uniform])
        assert exact_distribution(logits, SamplingParams(temperature=1.0, **filters))[token] > 0


@pytest.mark.usefixtures("way")
def test_the_extreme_numbers_draw_the_first_and_the_last_possible_token() -> None:
    logits = [-math.inf, 0.0, 1.0, 2.0, -math.inf]
    assert sample_at(logits, row(temperature=1.0), [0.0, LARGEST_UNIFORM]) == (1, 3)
    assert sample_at(logits, row(temperature=1.0, top_k=2), [0.0, LARGEST_UNIFORM]) == (2, 3)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("temperature", [1e-5, 1e5])
@pytest.mark.parametrize(
    "settings", [{"logit_bias": {1: 100.0}}, {"repetition_penalty": 1e-30}, {"repetition_penalty": 1e-300}]
)
def test_extreme_settings_draw_a_token_that_exists(temperature: float, settings: dict[str, Any]) -> None:
    """Whatever overflows on the way: a softmax of something infinite would be no distribution at all."""
    one = row(temperature=temperature, prompt=[1], **settings)
    tokens = sample_at([1.0, 2.0, 3.0, -1e38, 1e38], one, [0.0, 0.5, LARGEST_UNIFORM])
    assert set(tokens) <= {0, 1, 2, 4}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("temperature", [1e35, 1e300, 10**300], ids=["1e35", "1e300", "10**300"])
def test_an_endless_temperature_makes_all_tokens_equally_likely(temperature: float) -> None:
    assert np.abs(measured_distribution(FOUR, row(temperature=temperature)) - 0.25).max() < 2 / 4096


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_single_possible_token_is_named_and_harms_no_other(temperature: float) -> None:
    impossible = row(temperature=temperature, min_tokens=1, stop_ids=[0, 1, 2, 3])
    others = [row(temperature=1.0, seed=3, logprobs=1), row(logprobs=2)]
    mixed = sample([FOUR] * 3, [others[0], impossible, others[1]])
    assert mixed.impossible_rows == (1,)
    alone = sample([FOUR] * 2, others)
    assert alone.impossible_rows == ()
    assert (mixed.token_ids[0], mixed.token_ids[2]) == alone.token_ids
    assert (mixed.logprobs[0], mixed.logprobs[2]) == alone.logprobs


# --- penalties and bias -----------------------------------------------------------------------------------------------

LAST = 0.0  # the last token is in no history: the others are measured against it


@pytest.mark.parametrize(
    ("logits", "settings", "expected"),
    [
        # repetition divides positive and multiplies negative logits of prompt and output, once; below one it encourages
        (
            [2.0, -1.0, 1.0, -0.5, 1.0],
            {"prompt": [0, 1], "output": [2, 3, 3], "repetition_penalty": 2.0},
            [1.0, -2.0, 0.5, -1.0, 1.0],
        ),
        ([0.5, -1.0, 1.0], {"prompt": [0, 1], "repetition_penalty": 0.5}, [1.0, -0.5, 1.0]),
        # frequency and presence count the output only, presence once
        ([1.0, 1.0, 1.0], {"prompt": [0, 0, 1], "output": [1, 2, 2], "frequency_penalty": 1.0}, [1.0, 0.0, -1.0]),
        ([1.0, 1.0, 1.0], {"prompt": [0, 0, 1], "output": [1, 2, 2], "presence_penalty": 1.0}, [1.0, 0.0, 0.0]),
        # repetition acts before the others: the other way round it would be (2 - 0.75) / 2 = 0.625
        (
            [2.0],
            {"output": [0], "repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25},
            [0.25],
        ),
        # a bias acts before the penalties: the other way round it would be 1 / 2 + 1 = 1.5
        ([1.0], {"output": [0], "repetition_penalty": 2.0, "logit_bias": {0: 1.0}}, [1.0]),
    ],
)
def test_penalties_change_the_logits(logits: list[float], settings: dict[str, Any], expected: list[float]) -> None:
    shares = measured_distribution([*logits, LAST], row(temperature=1.0, **settings), num=200_000)
    assert [math.log(share / shares[-1]) for share in shares[:-1]] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_forces_and_bans(temperature: float) -> None:
    logits = some_logits(50, seed=6)
    forced = [row(temperature=temperature, seed=i, logit_bias={3: 100}) for i in range(50)]
    assert set(sample(logits, forced).token_ids) == {3}
    banned = [row(temperature=temperature, seed=i, logit_bias=dict.fromkeys(range(11), -100)) for i in range(50)]
    assert set(sample(logits, banned).token_ids) == {11}


def test_no_bias_lifts_the_block_of_min_tokens() -> None:
    one = row(min_tokens=2, stop_ids=[0], logit_bias={0: 100.0})
    assert sample([[0.0, 1.0, 2.0]], [one]).token_ids == (2,)


# --- batches ----------------------------------------------------------------------------------------------------------


def mixed_rows(num: int, vocab: int, seed: int = 0) -> list[SamplingRow]:
    """Rows of every kind, from plain greedy to all settings at once."""
    rng = np.random.default_rng(seed)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.9, "min_p": 0.01, "top_k": 40, "top_p": 0.95, "logprobs": 3},
        {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 0},
        {"temperature": 1.0, "frequency_penalty": 0.7, "presence_penalty": -0.3},
        {"temperature": 1.0, "logit_bias": {1: 3.0, 2: -3.0}, "logprobs": 5},
        {"temperature": 1.5, "min_tokens": 4},
    ]
    return [
        row(
            SamplingParams(**kinds[i % len(kinds)]),
            seed=int(rng.integers(2**40)),
            prompt=rng.integers(vocab, size=3).tolist(),
            output=rng.integers(vocab, size=int(rng.integers(7))).tolist(),
            stop_ids=rng.integers(vocab, size=2).tolist(),
        )
        for i in range(num)
    ]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("vocab", [33, 4096])
def test_a_row_of_a_mixed_batch_gets_exactly_what_it_gets_alone(vocab: int) -> None:
    """Its mates switch on sorting, penalties and bias for the whole batch; not even what it draws from may move."""
    rows, logits = mixed_rows(40, vocab), some_logits(40, vocab, seed=8)
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], rows[i : i + 1]) for i in range(40)]
    assert together.token_ids == tuple(one.token_ids[0] for one in alone)
    assert together.logprobs == tuple(one.logprobs[0] for one in alone)
    probs = filtered_probs(logits, metadata_of(rows, vocab))
    for i in range(40):
        assert torch.equal(filtered_probs(logits[i : i + 1], metadata_of(rows[i : i + 1], vocab)), probs[i : i + 1])


# --- fast paths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(top_p=0.5, top_k=2, min_p=0.1, seed=i) for i in range(3)], set()),
        (
            [row(temperature=1.0), row(temperature=0.0, top_p=0.5), row(temperature=0.5, top_k=VOCAB, top_p=1.0)],
            {"exp_", "cumsum", "searchsorted"},
        ),
        (
            [row(temperature=1.0), row(temperature=1.0), row(temperature=1.0, top_p=0.9)],
            {"exp_", "cumsum", "searchsorted", "sort"},
        ),
    ],
    ids=["all greedy", "temperature only", "one filtered row"],
)
def test_a_batch_computes_only_what_its_rows_need(rows: list[SamplingRow], expected: set[str]) -> None:
    metadata = metadata_of(rows, VOCAB)
    with operations() as seen:
        Sampler()(some_logits(3), metadata)
    assert {"sort", "cumsum", "exp_", "searchsorted", "_log_softmax", "topk"} & set(seen) == expected


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"top_p": 0.5, "top_k": 2, "min_p": 0.1}, "uniforms top_k top_p min_p"),
        (
            {"temperature": 0.5, "top_k": VOCAB, "top_p": 1.0},
            "top_k top_p min_p bias penalties seen output_counts",
        ),
        ({"logit_bias": {1: 1.0}}, "penalties"),
        ({"presence_penalty": 1.0}, "bias"),
        ({"min_tokens": 1, "stop_ids": [2], "output": [0]}, "bias"),
        ({"min_tokens": 1}, "bias"),  # there is no stop id to block
    ],
    ids=str,
)
def test_a_tensor_that_no_row_needs_is_not_built(settings: dict[str, Any], names: str) -> None:
    metadata = metadata_of([row(**settings)], VOCAB)
    assert [getattr(metadata, name) for name in names.split()] == [None] * len(names.split())


# --- logits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_float_type_give_the_tokens_of_their_values(dtype: torch.dtype) -> None:
    rows, logits = mixed_rows(20, 50), some_logits(20, 50, seed=11).to(dtype)
    result, expected = sample(logits, rows), sample(logits.float(), rows)
    assert (result.token_ids, result.logprobs) == (expected.token_ids, expected.logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_logits_are_not_modified(dtype: torch.dtype) -> None:
    logits = some_logits(20, 50, seed=12).to(dtype)
    before = logits.clone()
    sample(logits, mixed_rows(20, 50))
    assert torch.equal(logits, before)


def test_logits_with_gaps_in_memory_are_read_right() -> None:
    rows, logits = mixed_rows(10, 50), some_logits(10, 50, seed=13)
    strided = torch.stack([logits, logits + 1], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    assert sample(strided, rows) == sample(logits, rows)


# --- log-probabilities ------------------------------------------------------------------------------------------------


def log_softmax(logits: Tensor) -> np.ndarray:
    values: np.ndarray = logits.double().numpy()
    top = values.max(-1, keepdims=True)
    return np.asarray(values - top - np.log(np.exp(values - top).sum(-1, keepdims=True)))


def test_logprobs_are_those_of_the_untouched_logits() -> None:
    num, vocab = 30, 500
    rows = [dataclasses.replace(r, params=dataclasses.replace(r.params, logprobs=4)) for r in mixed_rows(num, vocab)]
    logits = some_logits(num, vocab, seed=14, scale=5.0)
    result, exact = sample(logits, rows), log_softmax(logits)
    for i, (token, columns) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        assert columns is not None and columns.token_ids[0] == token
        for token_id, logprob in zip(columns.token_ids, columns.logprobs, strict=True):
            assert logprob == pytest.approx(exact[i, token_id], abs=1e-5)


def test_ranks_say_how_many_tokens_are_at_least_as_likely() -> None:
    num, vocab = 30, 100
    logits = some_logits(num, vocab, seed=15)
    result = sample(logits, [row(temperature=3.0, logprobs=3, seed=i) for i in range(num)])
    for values, token, columns in zip(logits.tolist(), result.token_ids, result.logprobs, strict=True):
        assert columns is not None
        assert columns.ranks[0] == sum(value >= values[token] for value in values)
        best = sorted(range(vocab), key=lambda token_id: -values[token_id])[:3]
        assert columns.token_ids == (token, *best) and columns.ranks[1:] == (1, 2, 3)
    assert any(columns.ranks[0] > 3 for columns in result.logprobs if columns)


def test_each_row_gets_as_many_logprobs_as_it_asked_for() -> None:
    rows = [row(logprobs=k) for k in (None, 0, 7, None, 2)]
    result = sample(some_logits(5, seed=17), rows)
    assert [None if columns is None else len(columns.token_ids) for columns in result.logprobs] == [None, 1, 8, None, 3]


def test_asking_for_logprobs_changes_no_token() -> None:
    rows, logits = mixed_rows(20, 64, seed=3), some_logits(20, 64, seed=19)
    asking = [dataclasses.replace(r, params=dataclasses.replace(r.params, logprobs=5)) for r in rows]
    assert sample(logits, rows).token_ids == sample(logits, asking).token_ids


def test_a_banned_token_has_the_logprob_of_minus_infinity() -> None:
    (columns,) = gather_logprobs(torch.tensor([[0.0, -math.inf]]), torch.tensor([1]), 2)
    assert columns.logprobs == (-math.inf, 0.0, -math.inf) and columns.ranks == (2, 1, 2)


def test_a_tie_worsens_the_rank() -> None:
    (columns,) = gather_logprobs(torch.tensor([[1.0, 1.0, 0.0, 2.0]]), torch.tensor([0]), 0)
    assert columns.ranks == (3,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_best_tokens_are_those_of_argmax_in_every_precision(dtype: torch.dtype) -> None:
    logits = some_logits(5).to(dtype)
    logits[1, [3, 7]] = logits[1].max() + 1  # the first of equal ones
    logits[2] = -torch.inf
    assert torch.equal(best_tokens(logits), logits.argmax(dim=-1))
    assert torch.equal(best_tokens(logits[:, ::2]), logits[:, ::2].argmax(dim=-1))
    assert best_tokens(logits[:0]).shape == (0,)
