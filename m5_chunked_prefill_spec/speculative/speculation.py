"""How many tokens are guessed for each request: as many as are likely to pay.

A guess that is right saves a step; one that is wrong has cost its verification, and with a draft model its making. What
is likely is counted for each request: how many of its guesses were looked at, and how many of these were right. What it
costs stands in the table (`cost_table.py`). With the same table both are the same in every run, so the number of
guesses is, too. A request whose guesses do not pay gets one more, then none for some tokens, and so on: that is how it
is found out whether they have become better. vLLM and SGLang guess the
same number always (SGLang: `speculative_num_steps`), or switch it by the size of the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.config import SpeculativeConfig
from m5_chunked_prefill_spec.cost_table import CostTable
from m5_chunked_prefill_spec.speculative.proposer import Proposer, drafts_of
from m5_chunked_prefill_spec.speculative.spec_info import UNKNOWN, SpeculativeAlgorithm

FIRST_TRIED, FIRST_RIGHT = 4.0, 3.0
"""Where the counts begin: three of four guesses right, which a few real ones soon outweigh."""
MEMORY = 32.0
"""Once so many guesses were looked at, all counts are halved: what was long ago counts less."""
PAUSE = 16
"""Tokens without a guess, for a request that does not gain by them."""


@dataclass
class SpecState:
    """How the guesses for one request fared."""

    tried: float = FIRST_TRIED
    """Guesses that were looked at: those that were right, and the first wrong one."""
    right: float = FIRST_RIGHT
    paused_until: int = 0
    """No guess before it has so many output tokens."""

    @property
    def rate(self) -> float:
        """How likely the next guess is right."""
        return self.right / self.tried

    def count(self, drafted: int, accepted: int) -> None:
        """A step has verified `drafted` guesses, and the first `accepted` of them were right."""
        self.tried += accepted + (accepted < drafted)
        self.right += accepted
        if self.tried > MEMORY:
            self.tried, self.right = self.tried / 2, self.right / 2


class Speculation:
    """Asks the proposer, for as many tokens as are worth it."""

    def __init__(
        self,
        *,
        proposer: Proposer | None,
        config: SpeculativeConfig,
        max_model_len: int,
        vocab_size: int,
        cost_table: CostTable | None,
    ) -> None:
        """`proposer`: None guesses nothing. `cost_table`: None never backs off."""
        self.proposer = proposer
        self.algorithm = SpeculativeAlgorithm.from_string(config.method)
        self.num_speculative_tokens = config.num_speculative_tokens
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.cost_table = cost_table
        self._best = lru_cache(maxsize=4096)(self._best_number)
        self.num_draft_tokens = self.num_accepted_tokens = self.num_verifications = 0

    def propose(self, reqs: Sequence[Req], max_draft_tokens: int) -> list[list[int]]:
        """The guesses of a step, by request; all together at most `max_draft_tokens`. Empty: there are none.

        Raises `PartError` if the proposer fails, and `InvalidDraftsError` for the requests whose drafts are invalid.
        """
        if self.proposer is None or max_draft_tokens < 1:
            return []
        limits = share_out([self.limit(req, len(reqs)) for req in reqs], max_draft_tokens)
        if not any(limits):
            return []
        lowest = UNKNOWN if self.algorithm is SpeculativeAlgorithm.DRAFT_MODEL else 0
        drafts = drafts_of(self.proposer, reqs, limits, vocab_size=self.vocab_size, lowest=lowest)
        return drafts if any(drafts) else []

    def limit(self, req: Req, num_running: int) -> int:
        """How many tokens to guess for a request in a batch of so many. Its pause begins here if none are worth it."""
        state: SpecState | None = req.spec_state
        if state is None:  # it was added with `speculate=False`
            return 0
        num_output = len(req.output_ids)
        # One token comes anyway: a guess in the place of the last one that may come would never be used.
        to_come = min(req.max_new_tokens - num_output, self.max_model_len - req.seqlen)
        most = min(self.num_speculative_tokens, to_come - 1)
        if self.cost_table is None or most < 1:
            return max(most, 0)
        if num_output < state.paused_until:
            return 0
        best = self._best(round(state.rate, 3), num_running)
        if best == 0:
            state.paused_until = num_output + PAUSE
            return 1  # one guess before the pause, so that it is ever found out whether they have become better
        return min(best, most)

    def _best_number(self, rate: float, num_running: int) -> int:
        assert self.cost_table is not None
        return best_number(rate, self.num_speculative_tokens, num_running, self.cost_table)

    def verified(self, req: Req, drafted: int, accepted: int) -> None:
        """Count what came of the guesses for a request."""
        req.num_draft_tokens += drafted
        req.num_accepted_tokens += accepted
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.num_verifications += 1
        if req.spec_state is not None:
            req.spec_state.count(drafted, accepted)


def best_number(rate: float, most: int, num_running: int, table: CostTable) -> int:
    """How many guesses make a token cheapest, if each is right at this rate and everybody in the batch does the same.

    `k` guesses bring `1 + rate + ... + rate^k` tokens, for a step of `1 + k` tokens a request and `k` drafts.
    """
    costs, tokens, expected = [], 1.0, 1.0
    for k in range(most + 1):
        step = table.step(num_running * (1 + k)) + k * table.draft(num_running)
        costs.append(step / expected)
        tokens *= rate
        expected += tokens
    return costs.index(min(costs))


def share_out(wanted: Sequence[int], most: int) -> list[int]:
    """`wanted`, or as much of it as makes `most` together: each gives up the same share, the last ones what is left."""
    if sum(wanted) <= most:
        return list(wanted)
    level = 0  # everybody gets so many, if it wants them
    while sum(min(w, level + 1) for w in wanted) <= most:
        level += 1
    given = [min(w, level) for w in wanted]
    left = most - sum(given)
    for i, w in enumerate(wanted):  # the first ones get one more
        if left and w > level:
            given[i], left = given[i] + 1, left - 1
    return given
