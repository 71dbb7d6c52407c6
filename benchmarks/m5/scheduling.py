"""Scheduling in m5 beside m4: without guesses, with n-grams that are searched in vain, and with four right guesses."""

from collections.abc import Sequence
from typing import Any

from benchmarks import scheduling
from benchmarks.scheduling import FIRST_NEW, LIMITS, TOKEN, WithoutModel

GUESSES = 4


class AlwaysRight:
    """A proposer of the tokens that will come."""

    def __init__(self, config: Any) -> None:
        """Accept the configuration of the part that this one replaces."""

    def propose(self, reqs: Sequence[Any], limits: Sequence[int]) -> list[list[int]]:
        """Return the tokens of the next step."""
        return [[TOKEN] * limit for limit in limits]


def schedule(num_steps: int) -> Any:
    """Return medians over the decode steps, in seconds per sequence, and the ratios to m4."""
    num_tokens = num_steps * (1 + GUESSES) + 1
    limits = LIMITS | {"max_num_batched_tokens": LIMITS["max_num_batched_tokens"] * (1 + GUESSES)}
    ngram = {"method": "ngram", "num_speculative_tokens": GUESSES}
    with scheduling.engines_without_model(num_tokens) as engines:
        right = engines("m5", parts={"proposer": AlwaysRight}, scheduler=limits, speculative=ngram)
        sides = {
            "m4": WithoutModel(engines("m4", scheduler=limits), num_tokens),
            "m5, no guesses": WithoutModel(engines("m5", scheduler=limits), num_tokens),
            "m5, n-grams looked for in vain": WithoutModel(
                engines("m5", scheduler=limits, speculative=ngram), num_tokens, lambda number: [FIRST_NEW + number]
            ),
            f"m5, {GUESSES} guesses, all right": WithoutModel(
                right, num_tokens, lambda number: [TOKEN] * (1 + GUESSES if number else 1)
            ),
        }
        part = scheduling.scheduling(sides, num_steps=num_steps)
    for name, side in part["sides"].items():
        side["tokens_per_step"] = 1 + GUESSES if "all right" in name else 1
        side["times_m4"] = side["schedule_and_update"] / part["sides"]["m4"]["schedule_and_update"]
    return part
