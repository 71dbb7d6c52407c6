"""How far a choice was from another one: the gap of two logits, or the distance of a draw from the next token.

A draw inverts the cumulative distribution at a random number. Where that number lies within 1e-5 of a boundary between
two tokens, two correct programs may draw differently: a near tie, which cuts the comparison and counts like one of two
logits. A random model is unsure among thousands of tokens, and so has thousands of boundaries: `top_k` leaves a few.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from m1_single_request.sampler import Sampler, apply_penalties, filtered_probs
from m1_single_request.sampling_metadata import SamplingMetadata
from tests.equivalence.harness import NEAR_TIE

NEAR_BOUNDARY = 1e-5


class MeasuringSampler(Sampler):
    """m1's sampler for one row at a time, which notes how clear each choice was: 1 is as close as may be."""

    def __init__(self) -> None:
        self.margins: list[float] = []

    def choose(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        chosen = super().choose(logits, metadata)
        assert len(chosen) == 1
        if metadata.bias is not None:
            logits = logits + metadata.bias
        if metadata.penalties is not None:
            logits = apply_penalties(logits, metadata)
        if metadata.uniforms is None:
            best, second = logits.topk(2, dim=-1).values[0].tolist()
            self.margins.append((best - second) / NEAR_TIE)
        else:
            cumulative = filtered_probs(logits, metadata).double().cumsum(dim=-1)
            boundaries = cumulative / cumulative[:, -1:]
            self.margins.append(float((boundaries - metadata.uniforms[:, None]).abs().min()) / NEAR_BOUNDARY)
        return chosen


def gaps_of(margins: Iterable[float]) -> tuple[float, ...]:
    """Noted margins as a `Reference` has them."""
    return tuple(margin * NEAR_TIE for margin in margins)


def noting(rows: list[Tensor]) -> type[Sampler]:
    """A sampler that keeps the logits that it sees."""

    class Noting(Sampler):
        def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> Any:
            rows.extend(logits.clone())
            return super().__call__(logits, metadata)

    return Noting
