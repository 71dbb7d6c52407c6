"""Order of the waiting requests, and the requests held back for a round.

m3 tried requests in order of arrival. With a prefix cache the order changes the number of tokens to compute: a request
with a long cached prefix should run before that is evicted, and of several requests with the same uncached prefix one
should run first, so that the others find it in the cache. Retracted requests come first under every policy. SGLang:
`SchedulePolicy` in `managers/schedule_policy.py`, where requests with a common prefix only go last and may still run in
the same step; here they are held back, so that they always hit. vLLM has fcfs and priority only.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from m1_single_request.errors import ConfigError, PartError, shown
from m1_single_request.tracer import Tracer
from m4_radix_cache.config import SchedulePolicyName
from m4_radix_cache.events import PolicyOrder
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache, MatchResult
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES, RadixKey
from m4_radix_cache.request import Req

CACHE_AWARE = ("lpm", "dfs-weight")
MAX_WAITING_FOR_LPM = 128
"""With more waiting requests, `lpm` acts as `fcfs`: looking all of them up costs more than it saves."""
FEW_HIT_TOKENS = 32
"""A request with more cached tokens than this is not held back for a common prefix."""
MIN_COMMON_TOKENS = 32
"""A common prefix of fewer tokens is not worth a round's wait."""

Matches = dict[str, MatchResult]  # by request id


class Order(NamedTuple):
    """Order of the waiting requests in one round."""

    ready: list[Req]
    """Requests to try in this round, in this order."""
    held_back: list[Req]
    """Requests not to try in this round, oldest first. A request in `ready` computes their prefix."""


class SchedulePolicy:
    """Orders the waiting requests; changes none of them. All ties are broken by arrival."""

    def __init__(self, policy: str, *, tree_cache: BasePrefixCache, seed: int, tracer: Tracer) -> None:
        """Raises `ConfigError` for an unknown policy. Without a cache that shares, cache-aware ones act as fcfs.

        `seed`: seed of the policy `random`.
        """
        if policy not in get_args(SchedulePolicyName):
            known = ", ".join(get_args(SchedulePolicyName))
            raise ConfigError(f"schedule_policy={policy!r} is not known; choose one of: {known}")
        self.policy = policy
        self.tree_cache = tree_cache
        self.rng = random.Random(seed)
        self.tracer = tracer

    def calc_priority(self, waiting: Sequence[Req]) -> Order:
        """Return the order of this round. A lookup in the cache refreshes the last use of the nodes that it finds.

        A policy that looks into the cache holds a request back while an earlier one computes its prefix; every policy
        holds back the siblings of an `n > 1`. None is held back for ever: who computes the prefix is in `ready`.
        """
        active = self._active_policy(len(waiting))
        arrived = sorted(waiting, key=lambda req: req.number)
        retracted = [req for req in arrived if req.is_retracted]
        others = [req for req in arrived if not req.is_retracted]
        matches: Matches = {}
        if active in CACHE_AWARE:
            matches = {req.rid: self._match(req) for req in retracted + others}
        ready, held_back = self._hold_back(retracted, others, matches)
        order = Order(retracted + self._sorted(active, ready, matches), held_back)
        if len(waiting) > 1:
            self.tracer.emit(PolicyOrder.of, self.policy, active, order, len(retracted), matches)
        return order

    def _active_policy(self, num_waiting: int) -> str:
        """Return the policy of this round."""
        needs_cache = self.policy in CACHE_AWARE
        is_too_long = self.policy == "lpm" and num_waiting > MAX_WAITING_FOR_LPM
        return "fcfs" if (needs_cache and self.tree_cache.disable) or is_too_long else self.policy

    def _sorted(self, policy: str, requests: list[Req], matches: Matches) -> list[Req]:
        """Return `requests`, passed in order of arrival, in the order of the policy."""
        if policy == "lpm":
            return sorted(requests, key=lambda req: -_hit(matches[req.rid]))
        if policy == "dfs-weight":
            return depth_first(requests, matches)
        if policy == "lof":
            return sorted(requests, key=lambda req: -req.max_new_tokens)
        if policy == "priority":
            return sorted(requests, key=lambda req: -req.priority)
        if policy == "random":
            return self.rng.sample(requests, len(requests))
        return requests

    def _hold_back(self, first: list[Req], others: list[Req], matches: Matches) -> tuple[list[Req], list[Req]]:
        """Split `others` into requests to try now, and requests held back while another one computes their prefix.

        `first`: requests that come before all others.

        Siblings (`n > 1`) wait for the first of them, with a prompt of any length. Other requests wait only under a
        cache-aware policy, and only for a long enough prefix. SGLang lets the latter wait even if their whole common
        prefix is cached; that costs little there, because they only go last.
        """
        if self.tree_cache.disable:
            return others, []
        coming = _Coming(self.tree_cache.page_size)
        parents = {req.parent_id for req in first}
        for req in first:
            coming.add(req.key)
        ready, held_back = [], []
        for req in others:
            is_sibling = req.parent_id is not None and req.parent_id in parents
            match = matches.get(req.rid)
            if match is None and is_sibling:
                match = self._match(req)
            hit = _hit(match) if match else 0
            is_worth_it = is_sibling or (bool(matches) and coming.is_worth_waiting(req.key, hit))
            if is_worth_it and hit < self._longest_hit(req):
                held_back.append(req)
                continue
            ready.append(req)
            parents.add(req.parent_id)
            coming.add(req.key)
        return ready, held_back

    def _match(self, req: Req) -> MatchResult:
        """Return the cached prefix of a request. Limited as at admission: a longer lookup would split more nodes."""
        return self.tree_cache.match_prefix(req.key, req.match_limit)

    def _longest_hit(self, req: Req) -> int:
        """Return the number of cached tokens that a request could use if all its tokens were cached."""
        return req.match_limit // self.tree_cache.page_size * self.tree_cache.page_size


class _Coming:
    """Prefixes that are in the cache after this round (SGLang: a simulated radix tree).

    The only query is whether the first tokens of a key are cached, for one of two lengths. So a set of the first tokens
    of all keys, in both lengths, is enough.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        least_common = -(-MIN_COMMON_TOKENS // page_size) * page_size
        beyond_few_hits = (FEW_HIT_TOKENS // page_size + 1) * page_size
        self.lengths = (least_common, beyond_few_hits)
        self.heads: set[tuple[str | None, bytes]] = set()

    def add(self, key: RadixKey) -> None:
        for length in self.lengths:
            if len(key) >= length:
                self.heads.add(self._head(key, length))

    def is_worth_waiting(self, key: RadixKey, hit: int) -> bool:
        """Return whether few tokens of `key` are cached now (`hit`), and enough more will be after this round."""
        least = max(self.lengths[0], hit + self.page_size)
        return hit <= FEW_HIT_TOKENS and len(key) >= least and self._head(key, least) in self.heads

    def _head(self, key: RadixKey, num_tokens: int) -> tuple[str | None, bytes]:
        return key.extra_key, key.data[: num_tokens * TOKEN_BYTES]


def checked(answer: Any, policy: SchedulePolicy, waiting: Sequence[Req]) -> Order:
    """Return the order that a policy returned. Raises `PartError` unless it has each of `waiting` exactly once."""
    part = f"the part 'schedule_policy' ({type(policy).__name__})"
    if not isinstance(answer, Order):
        raise PartError(f"{part} returned {shown(answer)}, which is no Order")
    order = Order(*map(list, answer))
    named = sorted(id(req) for reqs in order for req in reqs)
    if named != sorted(map(id, waiting)):
        raise PartError(f"{part} must name each of the {len(waiting)} waiting requests once; it named {len(named)}")
    return order


def depth_first(requests: Sequence[Req], matches: Matches) -> list[Req]:
    """Return the requests branch by branch of the tree, so that those of a branch use its prefix before it is evicted.

    A request belongs to the node where its match ends. Of the branches below a node, the one with most requests comes
    first, of equal ones the one with the oldest request; requests of the node itself come after them. Works for any
    cache whose nodes have a `parent`, and does not depend on how it cuts a prefix into nodes.
    """
    weight: dict[Any, int] = defaultdict(int)
    branches: dict[Any, list[Any]] = defaultdict(list)  # of each node; below None: the roots
    own: dict[Any, list[Req]] = defaultdict(list)
    for req in requests:
        node = matches[req.rid].last_device_node
        own[node].append(req)
        while node is not None:
            if not weight[node]:
                branches[node.parent].append(node)
            weight[node] += 1
            node = node.parent
    backwards: list[Req] = []
    stack: list[Any] = [None]
    while stack:  # not a recursion: a long chat is a deep tree
        node = stack.pop()
        backwards += reversed(own[node])
        stack += sorted(branches[node], key=lambda branch: -weight[branch])  # the last is the next to be visited
    return backwards[::-1]


def _hit(match: MatchResult) -> int:
    return len(match.device_indices) + match.host_hit_length
