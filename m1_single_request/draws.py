"""Random numbers without a generator: each draw is a pure function of (seed, position, stream).

A generator has state, and the state depends on the draws before: a request that is batched with others, preempted or
retried would draw other numbers. `derive_seed` gives a request without a seed its own. Here the number for output
position t depends only on the request's seed and t, so none of these changes a sample. The hash is the finaliser of
SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014). vLLM keeps one torch.Generator
per seeded request; SGLang hashes (seed, position) in its deterministic mode.
"""

from collections.abc import Sequence

import numpy as np

TOKENS = 0  # the stream of the draws of tokens
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser: a bijection of 64-bit words in which every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return one number in [0, 1) per (seed, position) pair, for the draw of a token: float64 `[n]`."""
    return draws(seeds, positions, TOKENS)


def draws(seeds: Sequence[int], positions: Sequence[int], stream: int) -> np.ndarray:
    """Return one number in [0, 1) per (seed, position) pair: float64 `[n]`, 53 random bits each.

    `stream` separates several draws at one position.
    """
    words: np.ndarray = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in (np.asarray(positions, dtype=np.uint64), np.asarray(stream, dtype=np.uint64)):
            words = _mix(words + _GOLDEN) ^ _mix((part + np.uint64(1)) * _GOLDEN)
        words = _mix(words + _GOLDEN)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seed(engine_seed: int, request_number: int) -> int:
    """Return the seed of a request without one, from the engine's seed and the request's number."""
    words = np.array([engine_seed % 2**64], dtype=np.uint64)
    with np.errstate(over="ignore"):
        words = _mix(_mix(words + _GOLDEN) + np.uint64(request_number) * _GOLDEN)
    return int(words[0] >> np.uint64(1))
