"""Where the running sum passes a share: at the right place, on every run the same, and never at a weight of zero.

A GPU's way of adding is a function of its own, so it runs here on a CPU as well: `way` puts it in the place of the
CPU's. What only a GPU can show, that its kernels have one order too, is marked `gpu`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from m1_single_request import SamplingParams
from m1_single_request.draws import uniforms
from m1_single_request.running_sums import BLOCK, search_in_blocks, search_in_sequence, search_running_sums
from m1_single_request.sampler import Sampler, draw, filtered_probs
from m1_single_request.sampling_metadata import SamplingMetadata, SamplingRow
from tests.m1_single_request.helpers import metadata_of, row, sample
from tests.support.amounts import examples
from tests.support.memory import peak_bytes
from tests.support.operations import results

LARGE = 151_936  # Qwen3's vocabulary
LARGEST_UNIFORM = 1 - 2**-53
ALL = {"top_k": 900, "top_p": 0.9, "min_p": 1e-5}


def random_logits(num_rows: int, vocab: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return (torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(device)


# --- the right place --------------------------------------------------------------------------------------------------


def exact_place(weights: list[int], share: Fraction, *, right: bool) -> int:
    """The definition, in whole numbers."""
    limit, so_far = share * sum(weights), 0
    for place, weight in enumerate(weights):
        so_far += weight
        if so_far > limit or (so_far == limit and not right):
            return place
    raise AssertionError("a share below 1 is passed")


@settings(max_examples=examples(200))
@given(
    pieces=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 700)), min_size=1, max_size=6),
    eighths=st.integers(1, 63),
    right=st.booleans(),
)
def test_the_place_is_that_of_whole_numbers(pieces: list[tuple[int, int]], eighths: int, right: bool) -> None:
    """Weights in eighths and shares in 64ths have sums without rounding; runs of equal ones end on both sides of a
    block."""
    weights = [weight for weight, times in pieces for _ in range(times)]
    if not any(weights):
        weights[-1] = 1
    values, shares = torch.tensor([weights]) / 8, torch.tensor([eighths / 64], dtype=torch.float64)
    expected = exact_place(weights, Fraction(eighths, 64), right=right)
    for search in (search_in_sequence, search_in_blocks):
        assert search(values, shares, right=right).tolist() == [expected]


def only(*places: int, n: int = LARGE) -> Tensor:
    weights = torch.zeros(n)
    weights[list(places)] = 1.0
    return weights


ADVERSARIAL: dict[str, Callable[[], Tensor]] = {
    "the last token": lambda: only(LARGE - 1),
    "one in the middle": lambda: only(77_777),
    "the edges of blocks": lambda: only(BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 9 * BLOCK),
    "all equal": lambda: torch.ones(LARGE),
    "all equal and not exact": lambda: torch.full((LARGE,), 0.1),
    "one and many that are lost beside it": lambda: torch.cat([torch.ones(1), torch.full((LARGE - 1,), 1e-9)]),
    "many that are lost, and one": lambda: torch.cat([torch.full((LARGE - 1,), 1e-9), torch.ones(1)]),
    "tiny ones only": lambda: only(5, 600, 1200) * 1e-37,
    "every second block": lambda: (torch.arange(LARGE) // BLOCK % 2).float() / 3,
    "falling": lambda: 0.5 ** (torch.arange(LARGE) / 100).clamp(max=200),
    "random": lambda: torch.rand(LARGE, generator=torch.Generator().manual_seed(3)) ** 20,
}
ENDS = [0.0, 2**-53, 1e-9, 0.25, 0.5, 1 - 1e-7, 1 - 2**-24, 1 - 2**-25, LARGEST_UNIFORM, 1.0]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_a_weight_of_zero_is_never_found(name: str) -> None:
    weights = ADVERSARIAL[name]().expand(len(ENDS), -1)
    found = draw(weights, torch.tensor(ENDS, dtype=torch.float64))
    assert (weights.gather(-1, found[:, None]) > 0).all()
    share = weights[0].double().cumsum(-1) / weights[0].double().sum()
    upper, lower = share[found], share[found] - weights[0].double()[found] / weights[0].double().sum()
    wanted = torch.tensor(ENDS, dtype=torch.float64)
    assert (lower <= wanted + 1e-5).all() and (upper >= wanted - 1e-5).all()


def test_a_row_of_nan_leads_to_some_token_in_a_gpu_s_way() -> None:
    """Nobody uses that token; but what reads outside of a table takes the whole device with it."""
    for vocab in (3, 1000):
        weights = torch.full((3, vocab), torch.nan)
        weights[1] = 1.0
        found = search_in_blocks(weights, torch.tensor([0.0, 0.5, 0.999], dtype=torch.float64), right=True)
        assert found[1] == vocab // 2 and ((found >= 0) & (found < vocab)).all()


# --- alone and in company, now and again ------------------------------------------------------------------------------


def random_rows(num: int, vocab: int, seed: int) -> list[SamplingRow]:
    """Rows of which each has its own mixture of settings."""
    rng = np.random.default_rng(seed)

    def one() -> SamplingRow:
        kinds: dict[str, Any] = {
            "temperature": float(rng.choice([0.0, 0.5, 1.0, 2.0], p=[0.1, 0.3, 0.3, 0.3])),
            "top_k": int(rng.choice([-1, 1, 5, 100, vocab])),
            "top_p": float(rng.choice([1.0, 0.3, 0.9, 0.999])),
            "min_p": float(rng.choice([0.0, 0.001, 0.2])),
            "frequency_penalty": float(rng.choice([0.0, 0.7])),
            "repetition_penalty": float(rng.choice([1.0, 1.4])),
            "logit_bias": {int(rng.integers(vocab)): 3.0} if rng.random() < 0.3 else None,
        }
        history = rng.integers(vocab, size=(2, 5)).tolist()
        return row(SamplingParams(**kinds), seed=int(rng.integers(2**40)), prompt=history[0], output=history[1])

    return [one() for _ in range(num)]


def probs_of(logits: Tensor, rows: list[SamplingRow]) -> Tensor:
    metadata = SamplingMetadata.from_rows(rows, vocab_size=logits.shape[-1], device=logits.device)
    return filtered_probs(logits, metadata)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    yield torch.set_num_threads
    torch.set_num_threads(1)


def test_repeats_are_the_same_bit_for_bit(way: str, threads: Callable[[int], None]) -> None:
    """Also where torch has other threads: a sum that it cuts into pieces would show here."""
    rows = [row(temperature=1.0, seed=i, **(ALL if i % 2 else {})) for i in range(4)]
    logits = random_logits(4, 4096)
    first, probs = sample(logits, rows).token_ids, probs_of(logits, rows)
    large = torch.rand(2, LARGE, generator=torch.Generator().manual_seed(1)) ** 9
    shares = torch.tensor([0.3, 0.99999], dtype=torch.float64)
    place = search_running_sums(large, shares, right=True)
    for repeat in range(30):
        threads(1 + repeat % 3)
        assert sample(logits, rows).token_ids == first and torch.equal(probs_of(logits, rows), probs)
        assert torch.equal(search_running_sums(large, shares, right=True), place)


@pytest.mark.gpu
def test_a_hundred_repeats_on_a_gpu_are_the_same_bit_for_bit() -> None:
    """With 64 rows of a large vocabulary, of which half have every filter; other work runs in between."""
    device = torch.device("cuda")
    rows = [row(temperature=1.0, seed=i, **(ALL if i % 2 else {})) for i in range(64)]
    logits = random_logits(64, LARGE, device="cuda")
    metadata = SamplingMetadata.from_rows(rows, vocab_size=LARGE, device=device)
    probs, tokens = filtered_probs(logits, metadata), Sampler().choose(logits, metadata)
    for repeat in range(100):
        torch.rand(1 + 97 * repeat, 1000, device=device).sort()
        assert torch.equal(filtered_probs(logits, metadata), probs)
        assert torch.equal(Sampler().choose(logits, metadata), tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1501, 50_257, LARGE])
def test_a_row_among_64_others_on_a_gpu_draws_what_it_draws_alone(vocab: int) -> None:
    """Vocabularies that are no multiple of four begin their rows at odd addresses."""
    rows, logits = random_rows(64, vocab, seed=1), random_logits(64, vocab, device="cuda")

    def chosen(which: slice) -> Tensor:
        metadata = SamplingMetadata.from_rows(rows[which], vocab_size=vocab, device=logits.device)
        return Sampler().choose(logits[which], metadata)

    together, probs = chosen(slice(64)), probs_of(logits, rows)
    for i in range(64):
        which = slice(i, i + 1)
        assert torch.equal(chosen(which), together[which])
        assert torch.equal(probs_of(logits[which], rows[which]), probs[which])


@pytest.mark.gpu
def test_a_gpu_draws_what_its_way_of_adding_draws_on_a_cpu() -> None:
    """From the same weights, the same place: both only add, element by element, and count."""
    weights = torch.rand(64, LARGE, generator=torch.Generator().manual_seed(2)) ** 20
    shares = torch.from_numpy(uniforms(range(64), [0] * 64))
    for right in (True, False):
        found = search_running_sums(weights.cuda(), shares.cuda(), right=right)
        assert torch.equal(found.cpu(), search_in_blocks(weights, shares, right=right))


# --- memory -----------------------------------------------------------------------------------------------------------


def largest_step(num_rows: int) -> tuple[Tensor, SamplingMetadata]:
    """Rows with every filter."""
    metadata = metadata_of([row(temperature=0.9, seed=i, **ALL) for i in range(num_rows)], LARGE)
    return random_logits(num_rows, LARGE), metadata


@pytest.mark.usefixtures("way")
def test_no_float64_is_as_long_as_the_vocabulary() -> None:
    logits, metadata = largest_step(1)
    metadata = dataclasses.replace(metadata, num_logprobs=(5,))
    with results() as seen:
        Sampler()(logits, metadata)
    assert max(size for dtype, size in seen if dtype == torch.float32) >= LARGE
    assert max([size for dtype, size in seen if dtype == torch.float64], default=0) < LARGE / 100


def test_a_row_takes_few_bytes_per_token_of_the_vocabulary(way: str) -> None:
    """Four are the probabilities, four their ranking, eight the tokens in its order; the sums take at most seven for a
    moment, and the sort of one row twelve bytes per token. In float64 there were 61."""
    logits, metadata = largest_step(4)
    assert peak_bytes(lambda: Sampler()(logits, metadata)) / logits.numel() < 24 + 12 / 4
