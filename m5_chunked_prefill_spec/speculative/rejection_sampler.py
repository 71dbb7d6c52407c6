"""Verifies drafts: from the logits behind them to the tokens that a request gets.

The forward returns a row of logits behind each new token of a request: for the token after the newest one, after the
first draft, and so on. A row is used only if all drafts before it are accepted. There are two rules.

A draft that was not drawn (n-gram, or the draft model's most likely token) is compared with the target's own token in
that row, greedy or drawn; so the output is the same, token for token, as without drafts. A draft `x` that was drawn
from a distribution `q` is accepted with probability `min(1, p(x) / q(x))`, and otherwise replaced by a draw from
`max(p - q, 0)`, normalised: then every token has the distribution `p` (Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", 2023; Chen et al., 2023). The random numbers are functions of seed and position,
as for all draws. vLLM: `v1/sample/rejection_sampler.py`; SGLang: `speculative/eagle_info.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from m1_single_request.draws import draws as stream_draws
from m1_single_request.errors import ForwardError
from m1_single_request.output_events import Sampled
from m1_single_request.running_sums import SCALE, as_integers, in_blocks, sums_of_blocks
from m1_single_request.sampler import (
    LogprobRow,
    Sampler,
    SamplerOutput,
    adjusted,
    draw,
    filtered_probs,
    gather_logprobs,
    impossible_row,
    not_finite,
)
from m1_single_request.sampling_metadata import SamplingMetadata
from m1_single_request.tracer import Tracer
from m3_paged_attention.attention.host_to_device import to_device
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.row_sampler import RowSampler, without_broken_rows
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m5_chunked_prefill_spec.speculative.spec_info import Drafts

ACCEPT_STREAM, REPLACE_STREAM, DRAFT_STREAM = 1, 2, 3
"""Streams of random numbers at one position; stream 0 is the target's own draw."""


class RejectionSampler:
    """Runs the sampler once for all rows of a step, and compares each request's drafts with the sampled tokens."""

    def __init__(self, *, sampler: Sampler, token_text: Callable[[int], str], tracer: Tracer) -> None:
        self.sampler = sampler
        self.token_text = token_text
        self.tracer = tracer
        self.one_each = RowSampler(sampler=sampler, token_text=token_text, tracer=tracer)

    def __call__(
        self,
        req_ids: Sequence[str],
        info: SamplingBatchInfo,
        logits: Tensor,
        metadata: SamplingMetadata,
        sample_lens: Sequence[int],
        drafts: Drafts | None,
    ) -> ModelRunnerOutput:
        """Return the tokens of each request: the accepted drafts, and one token of the target.

        `logits` float32 `[sum(sample_lens), vocab]`: `sample_lens[i]` rows of the i-th request, one more than it has
        drafts; or none, if no token is sampled for it. `metadata`: of these rows.
        """
        if drafts is None and all(count == 1 for count in sample_lens):
            return self.one_each(req_ids, info, logits, metadata)
        draft_token_ids = drafts.token_ids if drafts is not None else [[] for _ in req_ids]
        logits, is_broken = without_broken_rows(logits)
        chosen = self.sampler(logits, metadata)
        broken = is_broken.tolist()
        if drafts is not None and drafts.probs is not None:
            chosen = self._reject(info, logits, metadata, sample_lens, drafts, chosen)
        errors: dict[str, ForwardError] = {}
        sampled = ModelRunnerOutput([], [], [], errors=errors)
        first = 0
        for place, (req_id, count) in enumerate(zip(req_ids, sample_lens, strict=True)):
            if count:
                run = self._run(req_id, chosen, first, draft_token_ids[place], broken, errors)
                if run:
                    rows = range(first, first + len(run))
                    sampled.req_ids.append(req_id)
                    sampled.sampled_token_ids.append(run)
                    sampled.logprobs.append([chosen.logprobs[row] for row in rows])
                    params, text = info.params[place], self.token_text
                    for row in rows:
                        position = int(info.positions[place]) + row - first
                        self.tracer.emit(Sampled.of, req_id, params, position, logits, metadata, chosen, row, text)
            first += count
        return sampled

    def _run(
        self,
        req_id: str,
        chosen: SamplerOutput,
        first: int,
        drafts: list[int],
        broken: list[bool],
        errors: dict[str, ForwardError],
    ) -> list[int]:
        """Return the tokens of one request, whose rows begin at `first`; none, and an error, if a row is unusable."""
        run: list[int] = []
        for offset in range(len(drafts) + 1):
            row = first + offset
            if broken[row] or row in chosen.impossible_rows:
                errors[req_id] = not_finite(req_id) if broken[row] else impossible_row(req_id)
                return []
            run.append(chosen.token_ids[row])
            if offset < len(drafts) and run[-1] != drafts[offset]:
                break
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
        """Return `chosen` with the tokens of drawn drafts' rows replaced by the result of rejection sampling."""
        assert drafts.probs is not None
        drawn = drawn_drafts(drafts.token_ids, sample_lens, info.numbers["greedy"])
        if not drawn.rows:
            return chosen
        rows, numbers = to_device((torch.tensor(drawn.rows), torch.tensor(drawn.numbers)), logits.device)
        p, q = distribution(logits, metadata)[rows], drafts.probs[numbers]
        positions = (info.positions[drawn.owners] + np.array(drawn.offsets)).tolist()
        seeds = [info.seeds[owner] for owner in drawn.owners]
        verified = decide(p, q, drawn.token_ids, seeds, positions)
        token_ids = list(chosen.token_ids)
        for row, token_id in zip(drawn.rows, verified, strict=True):
            token_ids[row] = token_id
        changed = [row for row in drawn.rows if token_ids[row] != chosen.token_ids[row]]
        logprobs = _with_logprobs(logits, metadata, token_ids, changed, chosen)
        return replace(chosen, token_ids=tuple(token_ids), logprobs=logprobs)


class DrawnDrafts(NamedTuple):
    """The drafts of a step that were drawn from a distribution; an entry of each list per draft."""

    token_ids: list[int]
    rows: list[int]
    """The row of the logits in front of the draft: it gives the target's probability of the draft."""
    numbers: list[int]
    """Index among all drafts of the step."""
    owners: list[int]
    """Row of the request in the batch."""
    offsets: list[int]
    """Index among the request's drafts."""


def drawn_drafts(token_ids: Sequence[Sequence[int]], sample_lens: Sequence[int], greedy: np.ndarray) -> DrawnDrafts:
    """Return the drafts of the requests that are not greedy. All arguments are by row of the batch."""
    drawn = DrawnDrafts([], [], [], [], [])
    first = num_drafts = 0
    for owner, (count, own) in enumerate(zip(sample_lens, token_ids, strict=True)):
        if not greedy[owner]:
            drawn.token_ids.extend(own)
            drawn.rows.extend(range(first, first + len(own)))
            drawn.numbers.extend(range(num_drafts, num_drafts + len(own)))
            drawn.owners.extend([owner] * len(own))
            drawn.offsets.extend(range(len(own)))
        first += count
        num_drafts += len(own)
    return drawn


def decide(p: Tensor, q: Tensor, drafts: Sequence[int], seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """Return for each draft, drawn from `q`, the draft itself if it is accepted, else its replacement.

    `p`, `q` float32 `[drafts, vocab]`, the sum of each row 1. A draft is accepted if a uniform number is below
    `p(x) / q(x)`; its replacement is drawn from `max(p - q, 0)`.
    """
    draws = [torch.from_numpy(stream_draws(seeds, positions, stream)) for stream in (ACCEPT_STREAM, REPLACE_STREAM)]
    x, accept, replacing = to_device((torch.tensor(drafts)[:, None], *draws), p.device)
    is_accepted = accept * q.gather(-1, x)[:, 0] < p.gather(-1, x)[:, 0]
    surplus = (p - q).clamp(min=0)
    # If p and q are equal except for rounding, the surplus is 0, and only rounding can reject the draft.
    surplus = torch.where(surplus.amax(dim=-1, keepdim=True) > 0, surplus, p)
    other = draw(surplus, replacing)
    return torch.where(is_accepted, x[:, 0], other).tolist()


def _with_logprobs(
    logits: Tensor,
    metadata: SamplingMetadata,
    token_ids: Sequence[int],
    rows: Sequence[int],
    chosen: SamplerOutput,
) -> tuple[LogprobRow | None, ...]:
    """Return the log-probabilities of `chosen`; those of `rows` are computed again, for their replaced tokens."""
    found, asked = list(chosen.logprobs), metadata.num_logprobs
    for row in rows:
        num_best = None if asked is None else asked[row]
        if num_best is not None:
            token = torch.tensor([token_ids[row]], device=logits.device)
            (found[row],) = gather_logprobs(logits[row : row + 1], token, num_best)
    return tuple(found)


def distribution(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Return the distribution from which non-greedy rows draw, float32 `[rows, vocab]`, the sum of each row 1.

    `logits` is float32. The result is undefined for rows in which no token is possible.
    """
    probs = filtered_probs(adjusted(logits, metadata), metadata)
    return probs.div_(total_in_sequence(probs) if probs.is_cpu else total_in_blocks(probs))


def total_in_sequence(probs: Tensor) -> Tensor:
    """Return the sum of each row, `[rows, 1]`. The order of `sum` would depend on the number of threads."""
    return probs.cumsum(dim=-1)[:, -1:]


def total_in_blocks(probs: Tensor) -> Tensor:
    """Return the sum of each row, `[rows, 1]`, with the additions of `search_in_blocks`: the same on every run."""
    return as_integers(sums_of_blocks(in_blocks(probs))).sum(dim=-1, keepdim=True) / SCALE
