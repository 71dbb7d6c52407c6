"""Build the rejection sampler of m5: which drafts are accepted, and what takes the place of the others.

Behind each new token of a request stands a row of logits of the target, the large model. A draft is a guess of what
such a row gives. A certain draft is compared with the target's token. But two draws from the same distribution are
seldom equal, so a draft that was drawn is accepted by chance, as often as is right: then every token has exactly the
distribution of the target, however bad the draft model is. You write two functions; the class below calls them. The
lesson calls a draft a guess.

Explained in docs/m5_chunked_prefill_spec.md#rejectionsampler-which-guesses-are-accepted.

    cp starters/rejection_sampler.py my_rejection.py
    pytest --part rejection_sampler=my_rejection.py:MyRejectionSampler
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m1_single_request.draws import draws  # noqa: F401 - for you
from m1_single_request.errors import ForwardError
from m1_single_request.sampler import (
    SamplerOutput,
    draw,  # noqa: F401 - for you
    impossible_row,
    not_finite,
)
from m1_single_request.sampling_metadata import SamplingMetadata
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m5_chunked_prefill_spec.speculative.rejection_sampler import (
    ACCEPT_STREAM,  # noqa: F401 - for you
    REPLACE_STREAM,  # noqa: F401 - for you
    RejectionSampler,
    _with_logprobs,
    distribution,
    drawn_drafts,
)
from m5_chunked_prefill_spec.speculative.spec_info import Drafts


def accepted(sampled: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Return the tokens that a request gets in this step, one at least.

    `sampled`: the target's token in each row of the request, one more than there are drafts: that of the row behind
    the newest token, of the row behind the first draft, and so on. `sampled[i]` is what `drafts[i]` should have been.
    A row counts only if all drafts before it are right: otherwise it was computed on a text that is not the request's.
    The tokens are those of all rows that count, in order: the drafts that are right, and one token of the target, which
    corrects the first wrong draft or follows the last one.
    """
    raise NotImplementedError


def decide(p: Tensor, q: Tensor, drafts: Sequence[int], seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return for each draft that was drawn the token in its place: the draft itself if it is accepted, otherwise its
    replacement.

    `p`, `q`: float32 `[drafts, vocab]`, the target's distribution in front of each draft, and the distribution from
    which the draft was drawn; the sum of each row is 1, except for rounding. `seeds`, `positions`: of each draft.

    A draft x is accepted with probability min(1, p(x) / q(x)). A rejected one is replaced by a draw from the surplus of
    the target, max(p - q, 0) of every token. Where no token has a surplus (p and q are equal except for rounding), draw
    from p.

    The random numbers depend on seed and position alone, so that neither another run nor another request changes an
    answer: `draws(seeds, positions, ACCEPT_STREAM)` has a number in [0, 1) for each draft, a float64 array, and with
    `REPLACE_STREAM` a second one that is independent of it. `draw(weights, numbers)` returns one token for each draft,
    an int64 tensor: `weights` float32 `[drafts, vocab]`, at most 1, need not sum to 1; `numbers` is a float64 tensor
    `[drafts]` on the same device.
    """
    raise NotImplementedError


def must_be_tokens(answer: Any, num_drafts: int) -> None:
    """Given: raise `TypeError` unless `decide` has returned a list with an int for each draft."""
    if not isinstance(answer, list):
        got = type(answer).__name__
    elif others := [each for each in answer if not isinstance(each, int | np.integer)]:
        got = f"a list with a {type(others[0]).__name__}"
    elif len(answer) != num_drafts:
        got = f"{len(answer):,} for {num_drafts:,} drafts"
    else:
        return
    raise TypeError(f"decide() returns a list of ints, one for each draft; got {got}")


class MyRejectionSampler(RejectionSampler):
    """Given: runs the sampler once for all rows of a step, and asks your functions for each request.

    m5's class has `__call__`. It samples the target's token in all rows, lets `_reject` replace those in front of drawn
    drafts, and then collects the tokens of each request from `_run`.
    """

    def _run(
        self,
        req_id: str,
        chosen: SamplerOutput,
        first: int,
        drafts: list[int],
        broken: list[bool],
        errors: dict[str, ForwardError],
    ) -> list[int]:
        """Given: return the tokens of one request, whose rows begin at `first`; none, and an error, if a row that
        counts is unusable."""
        run = accepted(chosen.token_ids[first : first + len(drafts) + 1], drafts)
        for row in range(first, first + len(run)):
            if broken[row] or row in chosen.impossible_rows:
                errors[req_id] = not_finite(req_id) if broken[row] else impossible_row(req_id)
                return []
        return run

    def _reject(
        self,
        info: SamplingBatchInfo,
        logits: Tensor,
        metadata: SamplingMetadata,
        sample_lens: Sequence[int],
        drafts: Drafts,
        chosen: SamplerOutput,
    ) -> SamplerOutput:
        """Given: return `chosen` with the tokens that `decide` puts in the place of drawn drafts. Requests that are
        greedy have none."""
        drawn = drawn_drafts(drafts.token_ids, sample_lens, info.numbers["greedy"])
        if not drawn.rows or drafts.probs is None:
            return chosen
        p, q = distribution(logits, metadata)[drawn.rows], drafts.probs[drawn.numbers]
        positions = (info.positions[drawn.owners] + np.array(drawn.offsets)).tolist()
        verified = decide(p, q, drawn.token_ids, [info.seeds[owner] for owner in drawn.owners], positions)
        must_be_tokens(verified, len(drawn.rows))
        token_ids = torch.tensor(chosen.token_ids)
        token_ids[drawn.rows] = torch.tensor(verified)
        changed = [row for row in drawn.rows if int(token_ids[row]) != chosen.token_ids[row]]
        logprobs = _with_logprobs(logits, metadata, token_ids.tolist(), changed, chosen)
        return replace(chosen, token_ids=tuple(token_ids.tolist()), logprobs=logprobs)
