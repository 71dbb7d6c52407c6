"""How much of what running requests may still say is expected to be said.

Nobody knows how long an answer becomes. To keep memory for the longest possible ones would leave most of it unused, to
keep none would throw requests out all the time. So admission counts on a share, which falls while all goes well and is
measured anew when it was too small. m3 only kept a block for each request. SGLang: `new_token_ratio` in its scheduler
and in `retract_decode`; vLLM has no such estimate.
"""

from collections.abc import Sequence

from m4_radix_cache.request import Req

FIRST_RATIO = 0.7
"""Of a conservativeness of 1, as long as nothing is known."""
LEAST_SHARE = 0.14
"""How far the ratio falls: to this share of what it was at first."""
DECAY_STEPS = 600
"""Decode steps that it takes to get there."""
STEPS_AHEAD = 20
"""Tokens that each request is expected to say beyond what it has said, after a retraction."""


class NewTokenRatio:
    """One number in 0..1; it changes with the steps of the engine, never with time."""

    def __init__(self, conservativeness: float = 1.0) -> None:
        self.init = min(FIRST_RATIO * conservativeness, 1.0)
        self.min = self.init * LEAST_SHARE
        self.value = self.init
        """The share of its remaining `max_new_tokens` that a running request is expected to use."""

    def decay(self) -> None:
        """A decode step had room enough."""
        self.value = max(self.value - (self.init - self.min) / DECAY_STEPS, self.min)

    def after_retraction(self, running: Sequence[Req]) -> None:
        """The estimate was too low: take what those that still run have said by now, and a few steps more.

        If that is little, because they have only begun, the ratio falls all the same; `decay` then brings it to `min`.
        """
        expected = sum(len(req.output_ids) for req in running) + STEPS_AHEAD * len(running)
        self.value = min(1.0, expected / (sum(req.max_new_tokens for req in running) + 1))

    def reset(self) -> None:
        """The engine is idle: what was learnt from the last requests says nothing about the next."""
        self.value = self.init
