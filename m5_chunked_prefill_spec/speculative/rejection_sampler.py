"""From the logits of guessed tokens to the tokens that a request gets: which guesses are kept, and what comes after.

Behind each new token of a request stands a row of logits: for the token after the newest one, after the first guess,
and so on. A row counts only if all guesses before it were right. There are two ways to decide that.

A guess that was certain (n-gram, or a draft model's best token) is compared with what the target itself takes in that
row, best token or draw; so the answer is the same, token for token, as without guesses. A guess `x` that was drawn from
a distribution `q` is kept with probability `min(1, p(x) / q(x))`, and otherwise replaced by a draw from what `p` has
more than `q`: then every token is distributed as by `p` (Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", 2023; Chen et al., 2023). Its numbers are functions of seed and position, as all draws. vLLM:
`v1/sample/rejection_sampler.py`; SGLang: `speculative/eagle_info.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from m1_single_request.draws import draws as stream_draws
from m1_single_request.errors import ForwardError
from m1_single_request.output_events import Sampled
from m1_single_request.sampler import (
    LARGEST,
    LogprobRow,
    Sampler,
    SamplerOutput,
    adjusted,
    draw,
    filtered_probs,
    gather_logprobs,
    impossible_row,
    not_finite,
    suspect_rows,
)
from m1_single_request.sampling_metadata import SamplingMetadata
from m1_single_request.tracer import Tracer
from m3_paged_attention.row_sampler import RowSampler, SampledRows
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m5_chunked_prefill_spec.speculative.spec_info import Drafts
from m5_chunked_prefill_spec.speculative.verify_rows import metadata_of_rows

ACCEPT_STREAM, REPLACE_STREAM, DRAFT_STREAM = 1, 2, 3
"""Which draw at a position: stream 0 is the target's own."""


class RejectionSampler:
    """Runs the sampler once for all rows of a step, and reads each request's guesses against what it says."""

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
        sample_lens: Sequence[int],
        drafts: Drafts | None,
    ) -> SampledRows:
        """The tokens of each request: the guesses that are kept, and one more.

        `logits` float32 `[sum(sample_lens), vocab]`: `sample_lens[i]` rows of the i-th request, one more than it has
        guesses; or none, if nothing is to be sampled for it.
        """
        if drafts is None and all(count == 1 for count in sample_lens):
            return self.one_each(req_ids, info, logits)
        guesses = drafts.token_ids if drafts is not None else [[] for _ in req_ids]
        broken = {i for i, suspect in enumerate(suspect_rows(logits)) if suspect and not logits[i].isfinite().all()}
        if broken:
            index = torch.tensor(sorted(broken), device=logits.device)
            logits = logits.index_fill(0, index, 0.0)  # any numbers will do
        metadata = metadata_of_rows(info, sample_lens, guesses)
        chosen = self.sampler(logits, metadata)
        if drafts is not None and drafts.probs is not None:
            chosen = self._reject(info, logits, metadata, sample_lens, drafts, chosen)
        sampled = SampledRows([], [], [], {})
        first = 0
        for place, (req_id, count) in enumerate(zip(req_ids, sample_lens, strict=True)):
            if count:
                run = self._run(req_id, chosen, first, guesses[place], broken, sampled.errors)
                if run:
                    rows = range(first, first + len(run))
                    sampled.req_ids.append(req_id)
                    sampled.token_ids.append(run)
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
        guesses: list[int],
        broken: set[int],
        errors: dict[str, ForwardError],
    ) -> list[int]:
        """The tokens of one request, whose rows begin at `first`; none, and an error, if one of them cannot be used."""
        run: list[int] = []
        for offset in range(len(guesses) + 1):
            row = first + offset
            if row in broken or row in chosen.impossible_rows:
                errors[req_id] = not_finite(req_id) if row in broken else impossible_row(req_id)
                return []
            run.append(chosen.token_ids[row])
            if offset < len(guesses) and run[-1] != guesses[offset]:
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
        """`chosen`, with the rows of drawn guesses decided by rejection sampling: a guess that is kept stands there."""
        assert drafts.probs is not None
        greedy = info.numbers["greedy"]
        rows: list[int] = []  # of the logits, of the guesses that were drawn
        which: list[int] = []  # their places among all guesses
        owners: list[int] = []
        offsets: list[int] = []
        tokens: list[int] = []
        first = num_drafts = 0
        for place, (count, guesses) in enumerate(zip(sample_lens, drafts.token_ids, strict=True)):
            if not greedy[place]:
                rows += range(first, first + len(guesses))
                which += range(num_drafts, num_drafts + len(guesses))
                tokens += guesses
                owners += [place] * len(guesses)
                offsets += range(len(guesses))
            first += count
            num_drafts += len(guesses)
        if not rows:
            return chosen
        index = torch.tensor(rows, device=logits.device)
        p = distribution(logits, metadata)[index]
        positions = (info.positions[owners] + np.array(offsets)).tolist()
        seeds = [info.seeds[place] for place in owners]
        kept = decide(p, drafts.probs[torch.tensor(which, device=p.device)], tokens, seeds, positions)
        token_ids = list(chosen.token_ids)
        for row, token_id in zip(rows, kept, strict=True):
            token_ids[row] = token_id
        asked = [
            row for row in rows if metadata.num_logprobs[row] is not None and token_ids[row] != chosen.token_ids[row]
        ]
        return replace(
            chosen, token_ids=tuple(token_ids), logprobs=_with_logprobs(logits, metadata, token_ids, asked, chosen)
        )


def decide(p: Tensor, q: Tensor, drafts: Sequence[int], seeds: Sequence[int], positions: Sequence[int]) -> list[int]:
    """For each guess, drawn from `q`: itself if it is kept, else what stands in its place.

    `p`, `q` float64 `[guesses, vocab]`, their rows' sums 1. A guess is kept where a uniform number is below `p(x) /
    q(x)`; its replacement is drawn from `max(p - q, 0)`.
    """
    x = torch.tensor(drafts, device=p.device)[:, None]
    accept = torch.from_numpy(stream_draws(seeds, positions, stream=ACCEPT_STREAM)).to(p.device)
    is_kept = accept * q.gather(-1, x)[:, 0] < p.gather(-1, x)[:, 0]
    surplus = (p - q).clamp(min=0)
    # Where p and q are equal but for rounding nothing is left, and nothing is rejected but by rounding.
    surplus = torch.where(surplus.sum(dim=-1, keepdim=True) > 0, surplus, p)
    other = draw(surplus, torch.from_numpy(stream_draws(seeds, positions, stream=REPLACE_STREAM)).to(p.device))
    return torch.where(is_kept, x[:, 0], other).tolist()


def _with_logprobs(
    logits: Tensor,
    metadata: SamplingMetadata,
    token_ids: Sequence[int],
    rows: Sequence[int],
    chosen: SamplerOutput,
) -> tuple[LogprobRow | None, ...]:
    """The log-probabilities of `chosen`, those of `rows` for other tokens."""
    found = list(chosen.logprobs)
    for row in rows:
        (found[row],) = gather_logprobs(
            logits[row : row + 1],
            torch.tensor([token_ids[row]], device=logits.device),
            metadata.num_logprobs[row] or 0,
        )
    return tuple(found)


def distribution(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Return the distribution that non-greedy rows draw from, float64 `[rows, vocab]`, each row's sum 1.

    `logits` is float32. The result is undefined for rows in which no token is possible.
    """
    scaled = (adjusted(logits, metadata) / metadata.temperature[:, None]).clamp(max=LARGEST)
    probs = filtered_probs(scaled, metadata)
    return probs / probs.cumsum(dim=-1)[:, -1:]  # `sum` of one long row depends on the number of threads
