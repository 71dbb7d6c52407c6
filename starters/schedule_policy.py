"""Build the schedule policy of m4: the order of the waiting requests, and those that are held back for a round.

With a prefix cache the order changes how much is computed. A request with a long cached prefix goes first, before the
prefix is evicted (longest prefix match). And of thirty requests with the same new system prompt, all of which fit into
one step, only the first may go: the others would compute the same tokens beside it, and one round later they find them
in the cache. It is hard because waiting costs, too: hold back only where it saves enough, and nobody for ever.

Explained in docs/m4_radix_cache.md#schedulepolicy-the-order-of-waiting-requests.

    cp starters/schedule_policy.py my_policy.py
    pytest --part schedule_policy=my_policy.py:MySchedulePolicy
"""

from collections.abc import Sequence

from m1_single_request.tracer import Tracer
from m4_radix_cache.events import PolicyOrder
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES  # noqa: F401 - for you
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_policy import (
    FEW_HIT_TOKENS,  # noqa: F401
    MAX_WAITING_FOR_LPM,  # noqa: F401
    MIN_COMMON_TOKENS,  # noqa: F401
    Matches,
    Order,
)


class GivenPolicy:
    """What is given: the fields, and the trace. There is nothing to write here."""

    policy: str
    tracer: Tracer

    def traced(self, order: Order, matches: Matches) -> Order:
        """Trace an order, and return it. `matches`: of all requests, by `rid`; empty if none was looked up."""
        active = "lpm" if matches else "fcfs"
        num_retracted = sum(req.is_retracted for req in order.ready)
        if len(order.ready) + len(order.held_back) > 1:
            self.tracer.emit(PolicyOrder.of, self.policy, active, order, num_retracted, matches)
        return order


class MySchedulePolicy(GivenPolicy):
    """Orders the waiting requests; changes none of them, nor the list. Policies: `lpm` and `fcfs`."""

    def __init__(self, policy: str, *, tree_cache: BasePrefixCache, seed: int, tracer: Tracer) -> None:
        """Given. `policy`: `lpm` or `fcfs`. `seed`: for policies that draw, so not for these."""
        self.policy = policy
        self.tree_cache = tree_cache
        self.tracer = tracer

    def calc_priority(self, waiting: Sequence[Req]) -> Order:
        """Return `Order(ready: list[Req], held_back: list[Req])`: the requests to try in this round, in their order,
        and those held back.

        Of a request: `number` is smaller for one that arrived earlier; `rid` is its id; `is_retracted`; `parent_id`;
        and `key` has its namespace, `key.extra_key`, and its tokens, in `key.data` as `TOKEN_BYTES` bytes each: compare
        bytes, and round the number of common bytes down to whole tokens. `waiting` may be in any order.

        *The order.* Retracted requests come first, in order of arrival. `fcfs`: the others in order of arrival. `lpm`:
        those with more cached tokens first, of equal ones the earlier. The cached tokens of a request, its hit, are
        `len(tree_cache.match_prefix(req.key, req.match_limit).device_indices)`: a request uses at most `match_limit`
        tokens of the cache, because the last one must be computed. If `tree_cache.disable`, or if more than
        `MAX_WAITING_FOR_LPM` requests wait, `lpm` is `fcfs`.

        *Held back.* Go through the requests in order of arrival, but the retracted ones first. A retracted one is never
        held back, and so computes its tokens in this round. Another one is held back if its hit is less than it can use
        (`match_limit`, rounded down to whole pages of `tree_cache.page_size` tokens) and one before it, which is not
        held back itself, computes what it lacks. That is so

        - for siblings, which have the same `parent_id`, not None: under each policy, whatever the hit, and however
          short the prompt is. The four conditions below are not asked of them;
        - for two others under `lpm`, if all four are true:
            1. they have the same namespace;
            2. their common first tokens, in whole pages, are at least `MIN_COMMON_TOKENS`;
            3. these are more than the hit of the later one;
            4. this hit is at most `FEW_HIT_TOKENS`.

        `held_back` is in order of arrival. If `tree_cache.disable`, no request is held back.

        Under `lpm` look up each request. Under `fcfs` look up only one that has a sibling before it: its hit decides
        whether it is held back. End with `return self.traced(order, matches)`. `Matches` is `dict[str, MatchResult]`:
        under `lpm` what `match_prefix` returned for each request, by its `rid`; under `fcfs` it is `{}`, also if
        siblings were looked up.
        """
        raise NotImplementedError
