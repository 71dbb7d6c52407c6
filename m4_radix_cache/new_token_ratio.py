"""Estimate of the share of their remaining output tokens that running requests will use.

The length of an output is unknown before it ends. Memory reserved for the longest possible outputs would stay mostly
unused; without a reserve, requests would be retracted all the time. So admission reserves a share. It falls with every
decode step that has room, and is measured again after a retraction. m3 reserved only one block per request. SGLang:
`new_token_ratio` in its scheduler and in `retract_decode`; vLLM has no such estimate.
"""

from collections.abc import Sequence

from m4_radix_cache.request import Req

FIRST_RATIO = 0.7
"""Initial ratio with a conservativeness of 1."""
LEAST_SHARE = 0.14
"""Minimum of the ratio, as a share of its initial value."""
DECAY_STEPS = 600
"""Number of decode steps from the initial ratio to its minimum."""
STEPS_AHEAD = 20
"""Further output tokens expected of each running request after a retraction."""


class NewTokenRatio:
    """Ratio between 0 and 1 that changes with the steps of the engine, never with time."""

    def __init__(self, conservativeness: float = 1.0) -> None:
        self.init = min(FIRST_RATIO * conservativeness, 1.0)
        self.min = self.init * LEAST_SHARE
        self.value = self.init
        """The share of its remaining `max_new_tokens` that a running request is expected to use."""

    def decay(self) -> None:
        """Lower the ratio after a decode step that had enough memory."""
        self.value = max(self.value - (self.init - self.min) / DECAY_STEPS, self.min)

    def after_retraction(self, running: Sequence[Req]) -> None:
        """Set the ratio from the output tokens of the requests that still run, plus `STEPS_AHEAD` for each.

        If they have few output tokens, the ratio may fall, even below `min`; the next `decay` raises it to `min`.
        """
        expected = sum(len(req.output_ids) for req in running) + STEPS_AHEAD * len(running)
        self.value = min(1.0, expected / (sum(req.max_new_tokens for req in running) + 1))

    def reset(self) -> None:
        """Set the initial ratio: the engine is idle, and earlier requests do not predict later ones."""
        self.value = self.init
