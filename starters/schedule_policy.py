"""Build the schedule policy of m4: the order of the waiting requests, and those that are held back for a round.

With a prefix cache the order changes how much is computed. A request with a long cached prefix goes first, before the
prefix is evicted (longest prefix match). And of thirty requests with the same new system prompt, all of which fit into
one step, only the first may go: the others would compute the same tokens beside it, and one round later they find them
in the cache. It is hard because waiting costs, too: hold back only where it saves enough, and nobody for ever.

    cp starters/schedule_policy.py my_policy.py
    pytest --part schedule_policy=my_policy.py:MySchedulePolicy
"""

from collections.abc import Sequence

from m1_single_request.tracer import Tracer
from m4_radix_cache.events import PolicyOrder
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_policy import (
    FEW_HIT_TOKENS,  # noqa: F401 - for you
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
        """Return `Order(ready, held_back)`: the requests to try in this round, in order, and those held back.

        Of a request: `number` is smaller for one that arrived earlier; `rid` is its id; `is_retracted`; `parent_id`;
        and `key` has its tokens, in `key.data` as 4 bytes each, and its namespace, `key.extra_key`. `waiting` may be in
        any order.

        *The order.* Retracted requests come first, in order of arrival. `fcfs`: the others in order of arrival. `lpm`:
        those with more cached tokens first, of equal ones the earlier. The cached tokens of a request, its hit, are
        those of `tree_cache.match_prefix(req.key, req.match_limit).device_indices`: a request uses at most
        `match_limit` tokens of the cache, because the last one must be computed. If `tree_cache.disable`, or if more
        than `MAX_WAITING_FOR_LPM` requests wait, `lpm` is `fcfs`. Under `fcfs` only siblings are looked up.

        *Held back.* Go through the requests in order of arrival, but the retracted ones first. One that is not
        retracted is held back if it gains by that. Both of these must be so:

        - Its hit is less than it can use: `match_limit`, rounded down to whole pages of `tree_cache.page_size` tokens.
        - One before it, which is not held back itself, computes what it lacks. For siblings, with the same `parent_id`
          (not None), that is so under each policy, however short the prompt is. For others it is so under `lpm` only,
          if they have the same namespace, and if their common first tokens, in whole pages, are at least
          `MIN_COMMON_TOKENS` and more than the hit of this one, which is at most `FEW_HIT_TOKENS`.

        `held_back` is in order of arrival. If `tree_cache.disable`, no request is held back. End with
        `return self.traced(order, matches)`, where `matches` has under `lpm` the result of `match_prefix` for each
        request, by its `rid`.
        """
        raise NotImplementedError
