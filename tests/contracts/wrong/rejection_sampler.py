"""Typical mistakes in the verification of drafts, each with the hint that it must get."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from runpy import run_path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m1_single_request.draws import draws
from m1_single_request.errors import ForwardError
from m1_single_request.sampler import Sampler, SamplerOutput, draw, impossible_row, not_finite
from m1_single_request.tracer import Tracer
from m5_chunked_prefill_spec.speculative.rejection_sampler import (
    ACCEPT_STREAM,
    REPLACE_STREAM,
    RejectionSampler,
    distribution,
    drawn_drafts,
)
from m5_chunked_prefill_spec.speculative.spec_info import Drafts
from tests.contracts.part import STARTERS


class Deciding(RejectionSampler):
    """The starter's split: `accepted` for the tokens of a request, `decide` for drawn drafts."""

    def accepted(self, sampled: Sequence[int], drafts: Sequence[int]) -> list[int]:
        right = next((place for place, draft in enumerate(drafts) if draft != sampled[place]), len(drafts))
        return list(sampled[: right + 1])

    def numbers(self, seeds: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        accept, other = (draws(seeds, positions, stream) for stream in (ACCEPT_STREAM, REPLACE_STREAM))
        return torch.from_numpy(accept), torch.from_numpy(other)

    def is_accepted(self, p: Tensor, q: Tensor, numbers: Tensor) -> Tensor:
        """`p`, `q`: of the drafts."""
        return numbers * q < p

    def weights(self, p: Tensor, q: Tensor) -> Tensor:
        surplus = (p - q).clamp(min=0)
        return torch.where(surplus.amax(dim=-1, keepdim=True) > 0, surplus, p)

    def decide(
        self, p: Tensor, q: Tensor, drafts: Sequence[int], seeds: Sequence[int], positions: Sequence[int]
    ) -> list[int]:
        accept, other = self.numbers(seeds, positions)
        x = torch.tensor(drafts)
        own_p, own_q = (each.gather(-1, x[:, None])[:, 0] for each in (p, q))
        tokens = torch.where(self.is_accepted(own_p, own_q, accept), x, draw(self.weights(p, q), other))
        return tokens.tolist()

    def _run(
        self,
        req_id: str,
        chosen: SamplerOutput,
        first: int,
        drafts: list[int],
        broken: list[bool],
        errors: dict[str, ForwardError],
    ) -> list[int]:
        run = self.accepted(chosen.token_ids[first : first + len(drafts) + 1], drafts)
        for row in range(first, first + len(run)):
            if broken[row] or row in chosen.impossible_rows:
                errors[req_id] = not_finite(req_id) if broken[row] else impossible_row(req_id)
                return []
        return run

    def _reject(
        self, info: Any, logits: Tensor, metadata: Any, sample_lens: Sequence[int], drafts: Drafts, chosen: Any
    ) -> Any:
        assert drafts.probs is not None
        drawn = drawn_drafts(drafts.token_ids, sample_lens, info.numbers["greedy"])
        if not drawn.rows:
            return chosen
        p, q = distribution(logits, metadata)[drawn.rows], drafts.probs[drawn.numbers]
        positions = (info.positions[drawn.owners] + np.array(drawn.offsets)).tolist()
        verified = self.decide(p, q, drawn.token_ids, [info.seeds[owner] for owner in drawn.owners], positions)
        token_ids = np.array(chosen.token_ids)
        token_ids[drawn.rows] = verified
        return replace(chosen, token_ids=tuple(token_ids.tolist()))


class AddsNoToken(Deciding):
    """The target's token behind the last right draft is thrown away."""

    def accepted(self, sampled: Sequence[int], drafts: Sequence[int]) -> list[int]:
        run = super().accepted(sampled, drafts)
        return run if len(run) <= len(drafts) else run[:-1]


class KeepsTheWrongDraft(Deciding):
    """The first wrong draft stays, instead of the target's token."""

    def accepted(self, sampled: Sequence[int], drafts: Sequence[int]) -> list[int]:
        run = super().accepted(sampled, drafts)
        return run if len(run) > len(drafts) else [*run[:-1], drafts[len(run) - 1]]


class SkipsTheWrongDraft(Deciding):
    """Right drafts behind a wrong one are accepted, too."""

    def accepted(self, sampled: Sequence[int], drafts: Sequence[int]) -> list[int]:
        right = [place for place, draft in enumerate(drafts) if draft == sampled[place]]
        return list(sampled[: max(right, default=-1) + 2])


class ReadsEveryRow(Deciding):
    """A request ends for a row that is not finite, whether the row counts or not."""

    def _run(self, req_id: str, chosen: Any, first: int, drafts: list[int], broken: list[bool], errors: Any) -> Any:
        if any(broken[first : first + len(drafts) + 1]):
            errors[req_id] = not_finite(req_id)
            return []
        return super()._run(req_id, chosen, first, drafts, broken, errors)


class ComparesDraws(Deciding):
    """A drawn draft is compared with the target's own draw: right, and nearly all are rejected."""

    def _reject(self, *args: Any) -> Any:
        return args[-1]


class AcceptsByTheTarget(Deciding):
    """A draft is accepted with probability p, whatever it was drawn from."""

    def is_accepted(self, p: Tensor, q: Tensor, numbers: Tensor) -> Tensor:
        return numbers < p


class DrawsFromTheTarget(Deciding):
    """A replacement is drawn from p."""

    def weights(self, p: Tensor, q: Tensor) -> Tensor:
        return p


class DrawsFromTheDifference(Deciding):
    """The replacement is drawn from |p - q|, so also from what the draft model overrates."""

    def weights(self, p: Tensor, q: Tensor) -> Tensor:
        return (p - q).abs()


class UsesOneNumber(Deciding):
    """The number that rejects a draft draws its replacement."""

    def numbers(self, seeds: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        accept, _ = super().numbers(seeds, positions)
        return accept, accept


class ForgetsPositions(Deciding):
    """All drafts of a request are decided with the numbers of the first one."""

    def numbers(self, seeds: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        return super().numbers(seeds, [0] * len(seeds))


class HasAGenerator(Deciding):
    """The numbers come from a generator."""

    def numbers(self, seeds: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        accept, other = torch.rand(2, len(seeds), dtype=torch.float64)
        return accept, other


class ForgetsRounding(Deciding):
    """A surplus of zero is drawn from."""

    def weights(self, p: Tensor, q: Tensor) -> Tensor:
        return (p - q).clamp(min=0)


def written(decide: Callable[..., Any]) -> Any:
    """The starter's class, as if a learner had written `accepted` and this function."""
    starter = run_path(str(STARTERS / "rejection_sampler.py"))["MyRejectionSampler"]
    own = Deciding(sampler=Sampler(), token_text=str, tracer=Tracer())
    starter._reject.__globals__.update(accepted=own.accepted, decide=lambda *args: decide(own.decide(*args)))
    return starter


WRONG = [
    (AddsNoToken, "one token more than there are drafts"),
    (KeepsTheWrongDraft, "stands in place of the first wrong draft"),
    (SkipsTheWrongDraft, "stop at the first wrong one"),
    (ReadsEveryRow, "only a row that counts is an error"),
    (ComparesDraws, "not if a draw of the target is the same token"),
    (AcceptsByTheTarget, "not below p(x)"),
    (DrawsFromTheTarget, "only tokens 0 and 1 have more probability"),
    (DrawsFromTheDifference, "only tokens 0 and 1 have more probability"),
    (UsesOneNumber, "with a second number"),
    (ForgetsPositions, "with the same numbers for both"),
    (HasAGenerator, "a generator's numbers depend on the draws before"),
    (ForgetsRounding, "draw from p"),
    (written(torch.tensor), "decide() returns a list of ints, one for each draft; got Tensor"),
    (written(lambda tokens: tokens[:-1]), "one for each draft; got 299 for 300 drafts"),
    (written(lambda tokens: list(map(float, tokens))), "one for each draft; got a list with a float"),
]
