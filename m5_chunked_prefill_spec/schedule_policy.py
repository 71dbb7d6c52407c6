"""Order of the waiting requests beside a prompt that is in pieces.

m4's policy. But when the last piece of a prompt runs in this step, a request that would compute the same prefix waits
for it, as it would for a waiting request before it. New in this milestone, where a step may complete a prompt and admit
others. SGLang: `SchedulePolicy` in `managers/schedule_policy.py`.
"""

from collections.abc import Sequence

from m4_radix_cache.request import Req
from m4_radix_cache.schedule_policy import Matches, Order, SchedulePolicy as WholePromptsPolicy


class SchedulePolicy(WholePromptsPolicy):
    """m4's policy, whose `calc_priority` and `_hold_back` include the prompts that this step completes."""

    _prefilling: Sequence[Req] = ()

    def calc_priority(  # type: ignore[override]  # required, so that a policy written for m4 is refused as a part
        self, waiting: Sequence[Req], prefilling: Sequence[Req]
    ) -> Order:
        """Return the order of this round. `prefilling`: the requests whose prompts this step completes."""
        self._prefilling = prefilling
        return super().calc_priority(waiting)

    def _hold_back(self, first: list[Req], others: list[Req], matches: Matches) -> tuple[list[Req], list[Req]]:
        """Split `others` into those that are asked and those that wait for a prefix. `first`: those before all others.
        The prompts that this step completes are before them."""
        return super()._hold_back([*self._prefilling, *first], others, matches)
