"""draws: a random number is a function of (seed, position, stream) and nothing else, and still it looks random."""

from collections.abc import Callable

import numpy as np
import pytest

from m1_single_request import SamplingParams
from m1_single_request.draws import derive_seed, draws, uniforms
from tests.m1_single_request.helpers import fits, reference_uniform

NUM = 20_000
HUGE = [-(2**63), -(2**40), -1, 2**32, 2**62, 2**63 - 1]
LAST_BELOW_ONE = 1 - 2**-53


def over_seeds(stream: int = 0, first: int = 0, position: int = 0) -> np.ndarray:
    return draws(range(first, first + NUM), [position] * NUM, stream)


def over_positions(stream: int = 0, seed: int = 1234, first: int = 0) -> np.ndarray:
    return draws([seed] * NUM, range(first, first + NUM), stream)


def looks_uniform(values: np.ndarray, bins: int = 64) -> bool:
    return fits(np.histogram(values, bins=bins, range=(0, 1))[0].tolist(), [1 / bins] * bins)


def look_independent(a: np.ndarray, b: np.ndarray, bins: int = 12) -> bool:
    """Uniform on the square, and no correlation beyond four standard errors."""
    counts = np.histogram2d(a, b, bins=bins, range=[(0, 1), (0, 1)])[0].ravel()
    correlation = np.corrcoef(a, b)[0, 1]
    return fits(counts.tolist(), [1 / bins**2] * bins**2) and abs(correlation) < 4 / np.sqrt(len(a))


def test_the_same_arguments_give_the_same_number_whatever_was_drawn_before() -> None:
    first = uniforms([5], [7])
    uniforms(range(100), range(100))
    np.random.default_rng(0).random()
    assert uniforms([5], [7]) == first


def test_numbers_are_float64_in_the_half_open_unit_interval_with_53_bits() -> None:
    values = np.concatenate([over_seeds(), over_positions(), uniforms(HUGE, [0] * len(HUGE))])
    assert values.dtype == np.float64
    assert values.min() >= 0 and values.max() <= LAST_BELOW_ONE
    assert (values * 2.0**53 % 1 == 0).all()
    assert (values * 2.0**52 % 1 != 0).any(), "the last bit is used"


@pytest.mark.parametrize("seed", [0, 1, 42, *HUGE])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**40])
@pytest.mark.parametrize("stream", [0, 1, 3])
def test_numbers_are_those_of_the_reference(seed: int, position: int, stream: int) -> None:
    """Later milestones, other processes and other machines must draw these very numbers."""
    assert draws([seed], [position], stream)[0] == reference_uniform(seed, position, stream)


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    seeds, positions = [3, -9, 2**61, 3, 0], [0, 5, 17, 1, 4000]
    together = uniforms(seeds, positions)
    assert together.shape == (5,)
    assert together.tolist() == [uniforms([s], [p])[0] for s, p in zip(seeds, positions, strict=True)]
    backwards = uniforms(seeds[::-1], positions[::-1])
    assert together.tolist() == backwards.tolist()[::-1]


@pytest.mark.parametrize("first", [0, 10**6, -(2**63), 2**63 - NUM, -NUM // 2])
def test_numbers_over_seeds_are_uniform(first: int) -> None:
    assert looks_uniform(over_seeds(first=first))


@pytest.mark.parametrize("seed", [0, 1, 1234, *HUGE])
def test_numbers_over_positions_are_uniform(seed: int) -> None:
    assert looks_uniform(over_positions(seed=seed))


@pytest.mark.parametrize("axis", [over_seeds, over_positions])
def test_the_low_bits_are_uniform_too(axis: Callable[[], np.ndarray]) -> None:
    assert looks_uniform(axis() * 2.0**40 % 1)


@pytest.mark.parametrize("axis", [over_seeds, over_positions])
def test_neighbours_are_independent(axis: Callable[[], np.ndarray]) -> None:
    values = axis()
    assert look_independent(values[:-1], values[1:])
    assert look_independent(values[:-2], values[2:])


def test_neighbouring_requests_and_neighbouring_positions_are_independent() -> None:
    assert look_independent(over_positions(seed=7), over_positions(seed=8))
    assert look_independent(over_seeds(position=0), over_seeds(position=1))
    assert look_independent(over_positions(seed=7), over_positions(seed=8, first=1)), "seed + position is no short cut"


@pytest.mark.parametrize("axis", [over_seeds, over_positions])
def test_streams_are_uniform_and_independent(axis: Callable[..., np.ndarray]) -> None:
    assert looks_uniform(axis(1)) and looks_uniform(axis(2))
    assert look_independent(axis(0), axis(1))
    assert look_independent(axis(1), axis(2))


def test_no_two_of_many_draws_are_the_same() -> None:
    pairs = [(seed, position) for seed in [*range(-50, 50), 2**40, 2**62] for position in range(200)]
    seeds, positions = zip(*pairs, strict=True)
    values = np.concatenate([draws(seeds, positions, stream) for stream in range(3)])
    assert len(np.unique(values)) == 3 * len(pairs)


def test_nothing_asked_is_nothing_drawn() -> None:
    assert uniforms([], []).shape == (0,)


def test_a_derived_seed_differs_per_request_and_per_engine_seed() -> None:
    seeds = [derive_seed(engine, number) for engine in (0, 1, 2, -1, 2**40) for number in range(2000)]
    assert len(set(seeds)) == len(seeds)


def test_a_derived_seed_is_reproducible_and_one_that_a_user_could_have_given() -> None:
    for engine in (0, -5, 2**63 - 1):
        for number in (0, 1, 10**6):
            seed = derive_seed(engine, number)
            assert seed == derive_seed(engine, number)
            assert SamplingParams(seed=seed).seed == seed >= 0


def test_draws_from_derived_seeds_are_uniform_and_independent_of_the_next_requests() -> None:
    firsts = uniforms([derive_seed(0, number) for number in range(NUM)], [0] * NUM)
    assert looks_uniform(firsts)
    assert look_independent(firsts[:-1], firsts[1:])
