"""Proposers: the drafts of a request, made on the host before the step runs.

The scheduler calls the proposer while it decides a step, so that drafts take their part of the token budget and of the
memory. `NgramProposer` finds its drafts in the request's own tokens (Saxena, "Prompt Lookup Decoding", 2023).
`DraftModelProposer` returns only the number of drafts; `draft_runner.py` makes them on the device. vLLM:
`NgramProposer`, `DraftModelProposer` in `v1/spec_decode`; SGLang: `NGRAMWorker`, `StandaloneWorker`.

A head that drafts a tree would also have these two halves. In addition `SpecInput` must store the parent of each draft,
positions and attention must follow it, and an accepted path may leave gaps in the KV (`verify_rows.py`, `ForwardBatch`,
`RejectionSampler`, `ScheduleBatch.roll_back`).
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from m1_single_request.errors import LONGEST_REASON, PartError, shown
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES, RadixKey
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.config import SpeculativeConfig
from m5_chunked_prefill_spec.speculative.spec_info import UNKNOWN


class Proposer(Protocol):
    """Proposes drafts. It changes no request; drafts change the speed of an output, not its distribution."""

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
        """Return for each request at most `limits[i]` next tokens, in order; `UNKNOWN` for drafts of the draft model.

        An exception ends all requests that use speculation. An invalid row ends its own request.
        """
        ...


class NgramProposer:
    """Finds an earlier occurrence of the last tokens, and proposes the tokens that followed it."""

    def __init__(self, *, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self.prompt_lookup_min, self.prompt_lookup_max = prompt_lookup_min, prompt_lookup_max

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
        """Return the drafts of each request, by `lookup`."""
        return [self.lookup(req.key, limit) if limit else [] for req, limit in zip(reqs, limits, strict=True)]

    def lookup(self, key: RadixKey, limit: int) -> list[int]:
        """Return up to `limit` tokens that followed the first occurrence of the last tokens of `key`.

        The longest run of last tokens that occurs before is used.
        """
        data, after = key.data, 0
        # A run occurs only where its shorter suffix does. The shortest is searched first: most searches end there.
        for size in range(self.prompt_lookup_min, min(self.prompt_lookup_max, len(key) - 1) + 1):
            found = first_end(data, size * TOKEN_BYTES, after)
            if found is None:
                break
            after = found
        start = after // TOKEN_BYTES
        return key.token_ids(start, start + limit) if after else []


def first_end(data: bytes, size: int, least: int) -> int | None:
    """Return the end of the first earlier copy of the last `size` bytes of `data`; None if there is no other copy.

    The copy ends at a whole token, at `least` or later.
    """
    last, start = data[-size:], max(least - size, 0)
    while (start := data.find(last, start, len(data) - 1)) >= 0:
        if start % TOKEN_BYTES == 0:
            return start + size
        start += 1
    return None


class InvalidDraftsError(Exception):
    """A proposer returned drafts that cannot be verified, for some requests."""

    def __init__(self, errors: Mapping[str, PartError]) -> None:
        super().__init__(errors)
        self.errors = errors
        """By request id."""


class DraftModelProposer:
    """Proposes the largest number of drafts; the draft model makes them."""

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
        """Return `limits[i]` placeholders for each request."""
        return [[UNKNOWN] * limit for limit in limits]


def drafts_of(
    proposer: Proposer, reqs: Sequence[Req], limits: Sequence[int], *, vocab_size: int, lowest: int = 0
) -> list[list[int]]:
    """Return the proposer's drafts after a check. The row of a request whose limit is 0 is not read.

    A wrong draft costs time only. But there is no memory for more drafts than the limit, and no embedding for an id
    outside the vocabulary. `lowest`: the least valid id; `UNKNOWN` where the draft model replaces all drafts.

    Raises `PartError` unless the proposer returns one row for each request; `InvalidDraftsError` for rows that are not
    lists of at most `limits[i]` token ids.
    """
    part = f"the part 'proposer' ({type(proposer).__name__})"
    rows = _rows(part, proposer.propose(list(reqs), list(limits)), len(reqs))
    drafts: list[list[int]] = [[] for _ in reqs]
    errors: dict[str, PartError] = {}
    for index, (req, row, limit) in enumerate(zip(reqs, rows, limits, strict=True)):
        if limit:
            try:
                drafts[index] = _drafts_of_row(part, req.rid, row, limit, range(lowest, vocab_size))
            except PartError as error:
                errors[req.rid] = error
    if errors:
        raise InvalidDraftsError(errors)
    return drafts


def _rows(part: str, answer: Iterable[Any], number: int) -> list[Any]:
    """Return the rows of a proposer's answer. Raises `PartError` unless there are `number` rows."""
    try:
        rows = list(islice(answer, number + 1))  # the answer may be endless
    except Exception as error:
        reason = shown(str(error), LONGEST_REASON)
        raise PartError(f"{part} returned {shown(answer)}, whose rows cannot be read: {reason}") from error
    if len(rows) != number:
        found = len(rows) if len(rows) < number else "more"
        raise PartError(f"{part} must return a row of drafts for each of {number} requests; it returned {found}")
    return rows


def _drafts_of_row(part: str, rid: str, row: Iterable[Any], limit: int, valid: range) -> list[int]:
    """Return the drafts of one request. Raises `PartError` for more than `limit`, and for ids that are not `valid`."""
    try:
        drafts = [operator.index(token_id) for token_id in islice(row, limit + 1)]
    except Exception as error:
        raise PartError(f"{part} failed: {shown(error, LONGEST_REASON)}") from error
    if len(drafts) > limit:
        raise PartError(f"{part} may return {limit} drafts for request {shown(rid)}; it returned more")
    if strange := [token_id for token_id in drafts if token_id not in valid]:
        raise PartError(
            f"{part} drafted {shown(strange[0])} for {shown(rid)}, which is none of {valid.stop:,} token ids"
        )
    return drafts


def make_proposer(config: SpeculativeConfig) -> Proposer | None:
    """Return the proposer of `config.method`; None without a method."""
    if config.method == "ngram":
        return NgramProposer(prompt_lookup_min=config.prompt_lookup_min, prompt_lookup_max=config.prompt_lookup_max)
    return None if config.method is None else DraftModelProposer()
