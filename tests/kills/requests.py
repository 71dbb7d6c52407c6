"""Requests for engines that are killed: long prompts of texts and pictures, greedy and drawn answers."""

from typing import Any

from benchmarks.texts import SMALL, message, pixels
from m6_multimodal_pd import SamplingParams

WORDS = "the cache keeps keys and values of tokens that were computed before so that nobody computes them again".split()
Asked = tuple[list[dict[str, Any]], SamplingParams]
"""A conversation and its parameters."""


def words(number: int, first: int = 0, step: int = 5) -> str:
    """Return so many words, other ones for each `first`."""
    return " ".join(WORDS[(first + step * i) % len(WORDS)] for i in range(number))


def requests() -> list[Asked]:
    """Return conversations whose prompts take many steps, and whose answers n-grams guess in part."""
    first, second = pixels(0, SMALL), pixels(1, SMALL)
    messages = [
        message(f"Repeat this text:\n{words(100)}"),
        message(words(130, 1)),
        message(first, words(160, 2)),
        message(words(190, 3)),
        message(first, words(220, 4), second),
        message(f"{words(250, 5)} What is a KV cache?"),
    ]
    found = []
    for number, asked in enumerate(messages):
        drawn = {"temperature": 0.8, "seed": number} if number == 4 else {}
        params = SamplingParams(max_tokens=24 + 4 * number, ignore_eos=True, **drawn)
        found.append(([asked], params))
    return found
