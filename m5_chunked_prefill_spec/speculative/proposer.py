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
from collections.abc import Sequence
from typing import Protocol

from m1_single_request.errors import shown
from m3_paged_attention.errors import PartError
from m4_radix_cache.errors import blamed_on
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES, RadixKey, decode
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.config import SpeculativeConfig
from m5_chunked_prefill_spec.speculative.spec_info import UNKNOWN


class Proposer(Protocol):
    """Guesses. It changes no request, and what it says decides how fast an answer comes, never what it says."""

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
        """For each request at most so many tokens that may come next, in order; `UNKNOWN` where the device will say."""
        ...


class NgramProposer:
    """Looks for the last tokens further up, and proposes what followed them there."""

    def __init__(self, *, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self.prompt_lookup_min, self.prompt_lookup_max = prompt_lookup_min, prompt_lookup_max

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
        """The longest run of last tokens that stood there before decides, at its earliest place."""
        return [self.lookup(req.key, limit) if limit else [] for req, limit in zip(reqs, limits, strict=True)]

    def lookup(self, key: RadixKey, limit: int) -> list[int]:
        """Up to `limit` tokens that followed the last ones of `key` where they stood first."""
        data, after = key.data, 0
        # Where a run stands, a shorter one does: so the shortest is looked for first, and mostly that is all.
        for size in range(self.prompt_lookup_min, min(self.prompt_lookup_max, len(key) - 1) + 1):
            found = first_end(data, size * TOKEN_BYTES, after)
            if found is None:
                break
            after = found
        return decode(data[after : after + limit * TOKEN_BYTES]) if after else []


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


class DraftModelProposer:
    """Leaves it to the draft model, which always has something to say."""

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
        """As many as may be, all of them unknown here."""
        return [[UNKNOWN] * limit for limit in limits]


def drafts_of(
    proposer: Proposer, reqs: Sequence[Req], limits: Sequence[int], *, vocab_size: int, lowest: int = 0
) -> list[list[int]]:
    """What the proposer says. Raises `PartError` if it fails, or says anything but lists of at most so many token ids.

    A wrong guess costs a little time. But more guesses than were asked for have no memory, and what is no token the
    model cannot read. `lowest`: the least id; `UNKNOWN` where a draft model replaces them all.
    """
    with blamed_on("proposer", proposer):
        drafts = [[operator.index(token_id) for token_id in own] for own in proposer.propose(list(reqs), list(limits))]
    part = f"the part 'proposer' ({type(proposer).__name__})"
    if len(drafts) != len(reqs):
        raise PartError(f"{part} must guess for {len(reqs)} requests; it did for {len(drafts)}")
    for req, own, limit in zip(reqs, drafts, limits, strict=True):
        if len(own) > limit:
            raise PartError(f"{part} may guess {limit} tokens for request {req.rid!r}; it guessed {len(own)}")
        if strange := [token_id for token_id in own if not lowest <= token_id < vocab_size]:
            raise PartError(
                f"{part} guessed {shown(strange[0])} for {req.rid!r}, which is none of {vocab_size:,} token ids"
            )
    return drafts


def make_proposer(config: SpeculativeConfig) -> Proposer | None:
    """The proposer that the configuration names; None: nothing is guessed."""
    if config.method == "ngram":
        return NgramProposer(prompt_lookup_min=config.prompt_lookup_min, prompt_lookup_max=config.prompt_lookup_max)
    return None if config.method is None else DraftModelProposer()
