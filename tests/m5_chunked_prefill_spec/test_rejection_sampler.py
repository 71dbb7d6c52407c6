"""Which guesses are kept: the table of greedy rows, and of drawn rows the distribution, which no guess may change.

The target is a table of logits over four tokens that depend on what was said before, so whoever reads the row behind a
wrong guess, or forgets a guess that penalties should count, has another distribution. How likely each run of three
tokens is without guesses is computed from the same table by m1's slow oracle, in float64; 200,000 requests, each with a
seed of its own, must come as close to it as so many draws can.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from m1_single_request import running_sums
from m1_single_request.draws import draws as stream_draws
from m1_single_request.request import Request
from m1_single_request.sampler import Sampler
from m1_single_request.sampling_metadata import SamplingMetadata, SamplingRow
from m1_single_request.sampling_params import SamplingParams
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m5_chunked_prefill_spec.speculative import rejection_sampler
from m5_chunked_prefill_spec.speculative.rejection_sampler import ACCEPT_STREAM, decide, distribution
from m5_chunked_prefill_spec.speculative.spec_info import Drafts
from tests.m5_chunked_prefill_spec.guesses import (
    CPU,
    VOCAB,
    Table,
    completed,
    copies_of,
    drafts_from,
    info_of,
    m1_rows,
    make_sampler,
    row_of,
    variation,
)
from tests.support.amounts import examples
from tests.support.operations import results

TARGET, DRAFT = Table.random(1), Table.random(2)
MANY, EXHAUSTIVE = 200_000, pytest.mark.exhaustive
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filters": {"temperature": 1.4, "top_k": 3, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.6, "frequency_penalty": 1.1, "presence_penalty": -0.8},
    "all": {
        "temperature": 0.8,
        "top_k": 3,
        "top_p": 0.95,
        "min_p": 0.05,
        "frequency_penalty": 1.5,
        "logit_bias": {2: 1.0},
    },
}


@pytest.fixture
def way(way: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """As for m1's sampler, and for the totals of a draft model's and a target's distributions."""
    if way == "in blocks":
        monkeypatch.setattr(rejection_sampler, "total_in_sequence", rejection_sampler.total_in_blocks)
    return way


def verify(info: SamplingBatchInfo, guesses: Tensor, probs: Tensor | None, target: Table = TARGET) -> list[list[int]]:
    """The runs that come of two guesses for each row of `info`."""
    req_ids = [str(i) for i in range(len(info))]
    drafts = Drafts(guesses.tolist(), None if probs is None else probs.reshape(-1, VOCAB))
    sampled = make_sampler()(req_ids, info, target.behind(guesses), [3] * len(info), drafts)
    assert sampled.req_ids == req_ids and not sampled.errors
    return sampled.sampled_token_ids


def kind(name: str, seed: int = 0) -> Request:
    """A request that has said two tokens."""
    return row_of(seed, prompt=[1, 3], output=[0, 0], **{"temperature": 1.0} | KINDS[name])


# --- greedy -----------------------------------------------------------------------------------------------------------

GREEDY: dict[str, tuple[list[int], list[int], list[int]]] = {  # guesses, the best token of each row, what comes of it
    "nothing guessed": ([], [2], [2]),
    "one right": ([2], [2, 3], [2, 3]),
    "one wrong": ([1], [2, 3], [2]),
    "all right": ([2, 3, 0], [2, 3, 0, 1], [2, 3, 0, 1]),
    "the first wrong": ([1, 3, 0], [2, 3, 0, 1], [2]),
    "the second wrong": ([2, 1, 0], [2, 3, 0, 1], [2, 3]),
    "the last wrong": ([2, 3, 3], [2, 3, 0, 1], [2, 3, 0]),
    "right again behind a wrong one": ([2, 1, 0], [2, 3, 0, 0], [2, 3]),
    "the same token again and again": ([3, 3, 3], [3, 3, 3, 3], [3, 3, 3, 3]),
}


@pytest.mark.parametrize("with_probs", [False, True])
def test_a_greedy_row_keeps_the_guesses_before_the_first_wrong_one(with_probs: bool) -> None:
    """All rows of the table at once, and a piece of a prompt before and behind them."""
    cases = [([], [], []), *GREEDY.values(), ([], [], [])]
    req_ids = [str(i) for i in range(len(cases))]
    best = [token_id for _, row, _ in cases for token_id in row]
    num_guesses = sum(len(guesses) for guesses, _, _ in cases)
    probs = torch.full((num_guesses, VOCAB), 0.25) if with_probs else None  # of no interest
    sampled = make_sampler()(
        req_ids,
        info_of(*(row_of() for _ in cases)),
        torch.eye(VOCAB)[best],
        [len(row) for _, row, _ in cases],
        Drafts([guesses for guesses, _, _ in cases], probs),
    )
    assert sampled.req_ids == req_ids[1:-1], "a piece of a prompt gets no token"
    assert sampled.sampled_token_ids == [expected for *_, expected in cases[1:-1]]
    assert sampled.logprobs == [[None] * len(expected) for *_, expected in cases[1:-1]]


# --- the distribution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_certain"),
    [("penalties", False), pytest.param("plain", False, marks=EXHAUSTIVE), pytest.param("all", True, marks=EXHAUSTIVE)],
)
def test_guesses_leave_the_distribution_as_it_is(
    name: str, is_certain: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a drawn one is kept as often as the two distributions allow."""
    monkeypatch.setattr(running_sums, "BLOCK", 2)  # two blocks for four tokens
    many = examples(MANY)
    info, probs = copies_of(kind(name), many), TARGET.probs(kind(name))
    guesses, drawn_from = drafts_from(DRAFT, info)
    runs = verify(info, guesses, None if is_certain else drawn_from)
    assert {len(run) for run in runs} == {1, 2, 3}
    assert variation(completed(runs, probs, seed=1), probs) < 0.01 * (MANY / many) ** 0.5
    if not is_certain:
        kept = sum(run[0] == guess for run, guess in zip(runs, guesses[:, 0].tolist(), strict=True)) / many
        p, q = probs.sum(dim=(1, 2)), DRAFT.first.double().softmax(-1)
        assert kept == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.004 * (MANY / many) ** 0.5)


# --- seeds ------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", KINDS)
def test_certain_guesses_change_no_draw(name: str) -> None:
    """What a request would draw alone, token after token, is what it gets, however good the guesses are."""
    for seed in range(50):
        req, said = kind(name, seed), list[int]()
        for _ in range(3):
            logits = (TARGET.first, TARGET.second, TARGET.third)[len(said)][tuple(said)]
            metadata = SamplingMetadata.from_rows(m1_rows(req, [said]), vocab_size=VOCAB, device=CPU)
            said.append(Sampler()(logits[None], metadata).token_ids[0])
        for guesses in ([0, 1], said[:2], [said[0], (said[1] + 1) % VOCAB]):
            (run,) = verify(info_of(req), torch.tensor([guesses]), None)
            assert run == said[: len(run)]
            assert len(run) == 1 + (guesses[0] == said[0]) + (guesses == said[:2])


@given(
    names=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5),
    greedy=st.integers(0, 3),
    probs=st.booleans(),
)
def test_who_shares_the_step_changes_nothing(names: list[str], greedy: int, probs: bool) -> None:
    reqs = [kind(name, seed) for seed, name in enumerate(names)]
    reqs[greedy:greedy] = [row_of(7)]
    guesses, drawn_from = drafts_from(DRAFT, info_of(*reqs))
    together = verify(info_of(*reqs), guesses, drawn_from if probs else None)
    for place, req in enumerate(reqs):
        own = slice(place, place + 1)
        assert verify(info_of(req), guesses[own], drawn_from[own] if probs else None) == together[own]


# --- one guess --------------------------------------------------------------------------------------------------------


def decided(p: Sequence[float], q: Sequence[float], guess: int, num_rows: int = 1000) -> list[int]:
    """What stands in the place of `guess`, drawn from `q`, for so many seeds."""
    rows = torch.tensor([p, q])[:, None].expand(-1, num_rows, -1)
    return decide(rows[0], rows[1], [guess] * num_rows, list(range(num_rows)), [5] * num_rows)


def test_a_guess_stands_where_the_draft_had_less_than_the_target_and_is_replaced_there_only() -> None:
    p, q = [0.4, 0.4, 0.1, 0.1], [0.2, 0.2, 0.3, 0.3]
    assert set(decided(p, q, 0)) == {0} and set(decided(p, q, 1)) == {1}
    assert set(decided(p, q, 2)) == {0, 1, 2} and set(decided(p, q, 3)) == {0, 1, 3}


def test_what_is_equal_but_for_rounding_is_no_trouble() -> None:
    p = torch.tensor([0.1, 0.2, 0.3, 0.4])
    q = p * (1 + 1e-6)  # nowhere has p more, so there is nothing to replace a guess from
    rejected = int(stream_draws(range(1000), [5] * 1000, ACCEPT_STREAM).argmax())
    assert decide(p[None], q[None], [3], [rejected], [5])[0] in range(VOCAB)
    assert set(decided(p.tolist(), q.tolist(), 3)) <= set(range(VOCAB))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LARGE = 151_936  # Qwen3's vocabulary


def large_distributions(device: str) -> tuple[Tensor, Tensor]:
    """Those of a target and of a draft model for two rows of a large vocabulary, one of them with filters."""
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=0.8, top_k=900, top_p=0.9, min_p=1e-5)]
    rows = [SamplingRow(each, seed, (1,), ()) for seed, each in enumerate(params)]
    metadata = SamplingMetadata.from_rows(rows, vocab_size=LARGE, device=torch.device(device))
    logits = torch.randn(2, 2, LARGE, generator=torch.Generator().manual_seed(1)).to(device) * 3
    p, q = (distribution(each, metadata) for each in logits)
    return p, q


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("device", DEVICES)
def test_a_large_vocabulary_is_verified_the_same_every_time(device: str) -> None:
    p, q = large_distributions(device)
    assert (p.double().sum(dim=-1) - 1).abs().max() < 1e-5
    numbers = [100, 5], [3, 3], [8, 9]
    guesses = q.argmax(dim=-1).tolist()
    first = [decide(p, q, guesses, seeds, [5, 6]) for seeds in numbers]
    assert len({tuple(each) for each in first}) > 1, "some guess is replaced"
    for repeat in range(30):
        seeds = numbers[repeat % 3]
        assert decide(p, q, guesses, seeds, [5, 6]) == first[repeat % 3]
        if repeat % 10 == 0:
            assert all(torch.equal(a, b) for a, b in zip(large_distributions(device), (p, q), strict=True))


@pytest.mark.usefixtures("way")
def test_no_float64_of_a_verification_is_as_long_as_the_vocabulary() -> None:
    with results() as seen:
        p, q = large_distributions("cpu")
        decide(p, q, [7, 8], [1, 2], [5, 6])
    assert max(size for dtype, size in seen if dtype == torch.float64) < LARGE / 100


@pytest.mark.usefixtures("way")
def test_what_replaces_a_guess_has_more_probability_than_the_guess_had() -> None:
    """Where the two distributions differ in few of many tokens, and the rest of the surplus is zero."""
    p, q = torch.zeros(20, LARGE), torch.zeros(20, LARGE)
    p[:, [9, 77_777]], q[:, [9, 88_888]] = torch.tensor([0.25, 0.75]), torch.tensor([0.25, 0.75])
    found = decide(p, q, [88_888] * 20, list(range(20)), [5] * 20)
    assert set(found) == {77_777}
