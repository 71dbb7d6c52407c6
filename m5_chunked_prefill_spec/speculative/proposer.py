"""Who guesses the next tokens of a request.

A proposer is asked on the host, while the step is decided, so that its guesses are part of the step's budget and of its
memory. `NgramProposer` answers at once: it reads what stands there already (Saxena, "Prompt Lookup Decoding", 2023).
`DraftModelProposer` only says how many there will be; the tokens are made on the device (`draft_runner.py`), where the
small model's KV is. vLLM: `NgramProposer`, `DraftModelProposer` in `v1/spec_decode`; SGLang: `NGRAMWorker`,
`StandaloneWorker`.

A head that drafts a tree comes in the same two halves, but a tree is more than a chain: `SpecInput` must name each
guess's parent, positions and attention must go by it, and of the KV an accepted path may leave gaps (`verify_rows.py`,
`ForwardBatch`, `RejectionSampler`, `ScheduleBatch.roll_back`).
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from m1_single_request.errors import LONGEST_REASON, PartError, shown
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES, RadixKey, decode
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.config import SpeculativeConfig
from m5_chunked_prefill_spec.speculative.spec_info import UNKNOWN


class Proposer(Protocol):
    """Guesses. It changes no request, and what it says decides how fast an answer comes, never what it says."""

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
        """For each request at most so many tokens that may come next, in order; `UNKNOWN` where the device will say.

        If it raises, all requests that use speculation end. An invalid row ends its own request.
        """
        ...


class NgramProposer:
    """Looks for the last tokens further up, and proposes what followed them there."""

    def __init__(self, *, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self.prompt_lookup_min, self.prompt_lookup_max = prompt_lookup_min, prompt_lookup_max

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
        """The longest run of last tokens that stood there before decides, at its earliest place."""
        return [
            self.lookup(req.key, limit, req.origin_input_ids) if limit else []
            for req, limit in zip(reqs, limits, strict=True)
        ]

    def lookup(self, key: RadixKey, limit: int, prompt: Sequence[int] = ()) -> list[int]:
        """Up to `limit` tokens that followed the last ones of `key` where they stood first.

        The draft ends before the first image. There `key` holds a number outside the vocabulary, which stands for the
        image's content, and `prompt` holds a placeholder token.
        """
        data, after = key.data, 0
        # Where a run stands, a shorter one does: so the shortest is looked for first, and mostly that is all.
        for size in range(self.prompt_lookup_min, min(self.prompt_lookup_max, len(key) - 1) + 1):
            found = first_end(data, size * TOKEN_BYTES, after)
            if found is None:
                break
            after = found
        draft = decode(data[after : after + limit * TOKEN_BYTES]) if after else []
        start = after // TOKEN_BYTES
        read = prompt[start : start + limit]
        if draft[: len(read)] == read:  # nearly always
            return draft
        return draft[: next((i for i, pair in enumerate(zip(draft, read, strict=False)) if pair[0] != pair[1]), limit)]


def first_end(data: bytes, size: int, least: int) -> int | None:
    """Where the first copy of the last `size` bytes of `data` ends that ends at `least` or later, at a whole token.

    None if there is no other than the last one.
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
    """Leaves it to the draft model, which always has something to say."""

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
        """As many as may be, all of them unknown here."""
        return [[UNKNOWN] * limit for limit in limits]


def drafts_of(
    proposer: Proposer, reqs: Sequence[Req], limits: Sequence[int], *, vocab_size: int, lowest: int = 0
) -> list[list[int]]:
    """The proposer's drafts, checked. The row of a request whose limit is 0 is not read.

    A wrong guess costs a little time. But more guesses than were asked for have no memory, and what is no token the
    model cannot read. `lowest`: the least id; `UNKNOWN` where a draft model replaces them all.

    Raises `PartError` unless the proposer returns one row for each request; `InvalidDraftsError` if some rows are
    anything but lists of at most so many token ids.
    """
    part = f"the part 'proposer' ({type(proposer).__name__})"
    answer = proposer.propose(list(reqs), list(limits))
    try:
        rows = list(islice(answer, len(reqs) + 1))  # an endless answer ends here
    except Exception as error:
        reason = shown(str(error), LONGEST_REASON)
        raise PartError(f"{part} returned {shown(answer)}, whose rows cannot be read: {reason}") from error
    if len(rows) != len(reqs):
        number = len(rows) if len(rows) < len(reqs) else "more"
        raise PartError(f"{part} must guess for {len(reqs)} requests; it did for {number}")
    drafts: list[list[int]] = [[] for _ in reqs]
    errors: dict[str, PartError] = {}
    for index, (row, limit) in enumerate(zip(rows, limits, strict=True)):
        if not limit:
            continue
        rid = reqs[index].rid
        try:
            own = drafts[index] = _token_ids(proposer, row, limit)
        except PartError as error:
            errors[rid] = error
            continue
        if len(own) > limit:
            errors[rid] = PartError(f"{part} may guess {limit} tokens for request {shown(rid)}; it guessed more")
        elif strange := [token_id for token_id in own if not lowest <= token_id < vocab_size]:
            errors[rid] = PartError(
                f"{part} guessed {shown(strange[0])} for {shown(rid)}, which is none of {vocab_size:,} token ids"
            )
    if errors:
        raise InvalidDraftsError(errors)
    return drafts


def _token_ids(proposer: Proposer, row: Iterable[Any], limit: int) -> list[int]:
    """The first `limit + 1` token ids of a row. Raises `PartError`."""
    try:
        return [operator.index(token_id) for token_id in islice(row, limit + 1)]
    except Exception as error:
        part = f"the part 'proposer' ({type(proposer).__name__})"
        raise PartError(f"{part} failed: {shown(error, LONGEST_REASON)}") from error


def make_proposer(config: SpeculativeConfig) -> Proposer | None:
    """The proposer that the configuration names; None: nothing is guessed."""
    if config.method == "ngram":
        return NgramProposer(prompt_lookup_min=config.prompt_lookup_min, prompt_lookup_max=config.prompt_lookup_max)
    return None if config.method is None else DraftModelProposer()
