"""draws: a random number is a function of (seed, position, stream) and nothing else, and still it looks random."""

from itertools import combinations

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


def of_derived_seeds() -> np.ndarray:
    """The first draws of consecutive requests without a seed of their own."""
    return uniforms([derive_seed(0, number) for number in range(NUM)], [0] * NUM)


def looks_uniform(values: np.ndarray, bins: int = 64) -> bool:
    return fits(np.histogram(values, bins=bins, range=(0, 1))[0].tolist(), [1 / bins] * bins)


def look_independent(a: np.ndarray, b: np.ndarray, bins: int = 12) -> bool:
    """Uniform on the square, and no correlation beyond four standard errors."""
    counts = np.histogram2d(a, b, bins=bins, range=[(0, 1), (0, 1)])[0].ravel()
    correlation = np.corrcoef(a, b)[0, 1]
    return fits(counts.tolist(), [1 / bins**2] * bins**2) and abs(correlation) < 4 / np.sqrt(len(a))


# --- one number -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 42, *HUGE])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**40])
@pytest.mark.parametrize("stream", [0, 1, 3])
def test_numbers_are_those_of_the_reference(seed: int, position: int, stream: int) -> None:
    """Later milestones, other processes and other machines must draw these very numbers."""
    assert draws([seed], [position], stream)[0] == reference_uniform(seed, position, stream)


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    seeds, positions = [3, -9, 2**61, 3, 0], [0, 5, 17, 1, 4000]
    together = uniforms(seeds, positions)
    assert together.tolist() == [uniforms([s], [p])[0] for s, p in zip(seeds, positions, strict=True)]
    assert uniforms([], []).shape == (0,)


def test_numbers_are_float64_in_the_half_open_unit_interval_with_53_bits() -> None:
    values = np.concatenate([over_seeds(), over_positions(), uniforms(HUGE, [0] * len(HUGE))])
    assert values.dtype == np.float64
    assert values.min() >= 0 and values.max() <= LAST_BELOW_ONE
    assert (values * 2.0**53 % 1 == 0).all()
    assert (values * 2.0**52 % 1 != 0).any(), "the last bit is used"


def test_derived_seeds_differ_are_reproducible_and_could_have_been_given_by_a_user() -> None:
    engines = (0, 1, -5, 2**40, 2**63 - 1)
    seeds = [derive_seed(engine, number) for engine in engines for number in range(2000)]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [derive_seed(engine, number) for engine in engines for number in range(2000)]
    assert all(SamplingParams(seed=seed).seed == seed >= 0 for seed in seeds[::99])


# --- many numbers -----------------------------------------------------------------------------------------------------

SERIES = {
    **{f"seeds from {first}": over_seeds(first=first) for first in (0, 10**6, -(2**63), 2**63 - NUM, -NUM // 2)},
    **{f"positions of seed {seed}": over_positions(seed=seed) for seed in (0, 1, 1234, *HUGE)},
    **{f"seeds in stream {stream}": over_seeds(stream) for stream in (1, 2)},
    **{f"positions in stream {stream}": over_positions(stream) for stream in (1, 2)},
    "derived seeds": of_derived_seeds(),
}


@pytest.mark.parametrize("name", SERIES)
def test_numbers_and_their_low_bits_are_uniform_and_neighbours_independent(name: str) -> None:
    values = SERIES[name]
    assert looks_uniform(values) and looks_uniform(values * 2.0**40 % 1)
    assert look_independent(values[:-1], values[1:]) and look_independent(values[:-2], values[2:])


def test_requests_positions_and_streams_are_independent_of_each_other() -> None:
    by_seed = [over_positions(seed=7), over_positions(seed=8), over_positions(seed=8, first=1)]
    by_position = [over_seeds(position=0), over_seeds(position=1), over_seeds(1), over_seeds(2)]
    for series in (by_seed[:2], by_seed[::2], by_position, [over_positions(stream) for stream in range(3)]):
        assert all(look_independent(a, b) for a, b in combinations(series, 2)), "seed + position is no short cut"
    together = np.concatenate([over_positions(stream, seed=seed) for stream in range(3) for seed in range(5)])
    assert len(np.unique(together)) == len(together), "no two of many draws are the same"
