"""The number of drafts that a request gets in a step: a fixed one.

Every request that decodes gets `num_speculative_tokens` drafts, less where its answer ends earlier, where the step's
token budget ends, or where the request has `speculate=False`. The number does not depend on how many drafts were
accepted before. vLLM (`num_speculative_tokens`) and SGLang (`speculative_num_steps`) also use a fixed number. A policy
that lowers it for requests with wrong drafts is exercise 4 of the lesson.
"""

from collections.abc import Sequence

from m1_single_request.request import Request
from m5_chunked_prefill_spec.config import SpeculativeConfig
from m5_chunked_prefill_spec.request import Req
from m5_chunked_prefill_spec.speculative.proposer import Proposer, drafts_of
from m5_chunked_prefill_spec.speculative.spec_info import UNKNOWN


class Speculation:
    """Limits the drafts of each request, asks the proposer for them, and counts the accepted ones."""

    def __init__(
        self, *, proposer: Proposer | None, config: SpeculativeConfig, max_model_len: int, vocab_size: int
    ) -> None:
        """`proposer`: None disables speculation."""
        self.proposer = proposer
        self.method: str = config.method or "none"
        self.num_speculative_tokens = config.num_speculative_tokens
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.totals = {"num_draft_tokens": 0, "num_accepted_tokens": 0, "num_verifications": 0}
        """Fields of `EngineStats`."""

    def propose(self, reqs: Sequence[Req], max_draft_tokens: int) -> list[list[int]]:
        """Return the drafts of a step, one list per request, together at most `max_draft_tokens`; `[]` without any.

        Raises `PartError` if the proposer fails, and `InvalidDraftsError` for the requests whose drafts are invalid.
        """
        if self.proposer is None or max_draft_tokens < 1:
            return []
        limits = share_out([self.limit(req) for req in reqs], max_draft_tokens)
        if not any(limits):
            return []
        lowest = UNKNOWN if self.method == "draft_model" else 0
        drafts = drafts_of(self.proposer, reqs, limits, vocab_size=self.vocab_size, lowest=lowest)
        return drafts if any(drafts) else []

    def limit(self, req: Req) -> int:
        """Return the largest number of drafts that the next step can use for a request."""
        if not req.speculate:
            return 0
        # A verification returns one token in addition to the accepted drafts: the last token needs no draft.
        to_come = min(req.max_new_tokens - len(req.output_ids), self.max_model_len - req.seqlen)
        return max(min(self.num_speculative_tokens, to_come - 1), 0)

    def verified(self, req: Request, drafted: int, accepted: int) -> None:
        """Count the drafts of a request in one step, and the accepted ones among them."""
        req.num_draft_tokens += drafted
        req.num_accepted_tokens += accepted
        self.totals["num_draft_tokens"] += drafted
        self.totals["num_accepted_tokens"] += accepted
        self.totals["num_verifications"] += 1


def share_out(wanted: Sequence[int], most: int) -> list[int]:
    """Return `wanted`, lowered to a sum of at most `most`.

    The largest entries are lowered to one common level. The remainder goes to the first of them, one each.
    """
    if sum(wanted) <= most:
        return list(wanted)
    level = 0
    while sum(min(number, level + 1) for number in wanted) <= most:
        level += 1
    shares = [min(number, level) for number in wanted]
    left = most - sum(shares)
    for i, number in enumerate(wanted):
        if left and number > level:
            shares[i], left = shares[i] + 1, left - 1
    return shares
