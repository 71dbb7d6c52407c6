"""Who goes first and who waits a round: every rule against its own statement in words, on plain lists of tokens."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from m1_single_request.errors import ConfigError
from m1_single_request.tracer import Tracer
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_policy import Order, SchedulePolicy
from tests.m4_radix_cache.caches import SHARING, make_cache
from tests.m4_radix_cache.reqs import fill, make_req
from tests.support.amounts import examples
from tests.support.engines import Recorder

POLICIES = ["fcfs", "lpm", "dfs-weight", "lof", "random", "priority"]
Tokens = tuple[int, ...]


def make_policy(name: str, cache: BasePrefixCache, seed: int = 0, tracer: Tracer | None = None) -> SchedulePolicy:
    return SchedulePolicy(name, tree_cache=cache, seed=seed, tracer=tracer or Tracer())


def numbers(order: Order) -> tuple[list[int], list[int]]:
    return [req.number for req in order.ready], [req.number for req in order.held_back]


# --- the rules in words -----------------------------------------------------------------------------------------------


class Words:
    """What a policy must say, computed from lists of tokens. `cached`: what the cache has, with its namespaces."""

    def __init__(self, cached: Sequence[tuple[str | None, Tokens]], page_size: int) -> None:
        self.cached, self.page_size = cached, page_size

    def floor(self, num_tokens: int) -> int:
        return num_tokens // self.page_size * self.page_size

    def common(self, req: Req, others: Sequence[tuple[str | None, Tokens]]) -> int:
        """Tokens that the request has in common with one of these, in whole pages."""
        mine = tuple(req.origin_input_ids + req.output_ids)
        longest = 0
        for extra_key, tokens in others:
            if extra_key == req.extra_key:
                equal = 0
                while equal < min(len(mine), len(tokens)) and mine[equal] == tokens[equal]:
                    equal += 1
                longest = max(longest, self.floor(equal))
        return longest

    def hit(self, req: Req) -> int:
        """What it will find: never its last token."""
        return min(self.common(req, self.cached), self.floor(req.seqlen - 1))

    def held_back(self, policy: str, arrived: Sequence[Req]) -> list[Req]:
        """Whoever gains by waiting for somebody before it who goes."""
        held: list[Req] = []
        going = [req for req in arrived if req.is_retracted]
        for req in (req for req in arrived if not req.is_retracted):
            hit, coming = self.hit(req), self.common(req, [tokens_of(other) for other in going])
            gains = hit < self.floor(req.seqlen - 1)
            siblings = [other for other in going if other.parent_id is not None and other.parent_id == req.parent_id]
            worth_it = policy in ("lpm", "dfs-weight") and hit <= 32 <= coming and hit < coming
            (held if gains and (siblings or worth_it) else going).append(req)
        return held

    def order(self, policy: str, waiting: Sequence[Req]) -> tuple[list[int], list[int]]:
        """The numbers of those that may go, in order, and of those that are held back. Not for `random`."""
        arrived = sorted(waiting, key=lambda req: req.number)
        if policy == "lpm" and len(waiting) > 128:
            policy = "fcfs"
        held = self.held_back(policy, arrived)
        ready = [req for req in arrived if not req.is_retracted and req not in held]
        rules: dict[str, Callable[[Req], tuple[int, ...]]] = {
            "fcfs": lambda req: (req.number,),
            "lpm": lambda req: (-self.hit(req), req.number),
            "lof": lambda req: (-req.max_new_tokens, req.number),
            "priority": lambda req: (-req.priority, req.number),
        }
        ready = self.depth_first(ready) if policy == "dfs-weight" else sorted(ready, key=rules[policy])
        retracted = [req for req in arrived if req.is_retracted]
        return [req.number for req in retracted + ready], [req.number for req in held]

    def depth_first(self, requests: Sequence[Req], depth: int = 0) -> list[Req]:
        """Requests whose hits agree in `depth` tokens: those whose hits go on, page for page, then those that end."""
        end = [req for req in requests if self.hit(req) == depth]
        branches: dict[Any, list[Req]] = {}
        for req in requests:
            if self.hit(req) > depth:
                namespace, tokens = tokens_of(req)
                branches.setdefault((namespace, tokens[depth : depth + self.page_size]), []).append(req)
        heaviest_first = sorted(branches.values(), key=lambda branch: (-len(branch), branch[0].number))
        return [req for branch in heaviest_first for req in self.depth_first(branch, depth + self.page_size)] + end


def tokens_of(req: Req) -> tuple[str | None, Tokens]:
    return req.extra_key, (*req.origin_input_ids, *req.output_ids)


# --- random trees and queues ------------------------------------------------------------------------------------------


@st.composite
def texts(draw: st.DrawFn, part: int) -> Tokens:
    """Tokens that begin like others: a few parts of two kinds, and a tail."""
    parts = draw(st.lists(st.sampled_from([1, 2]), max_size=5))
    tail = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=4))
    return (*(kind for kind in parts for _ in range(part)), *tail)


@st.composite
def scenes(draw: st.DrawFn) -> dict[str, Any]:
    """What is cached, and who waits."""
    part = draw(st.sampled_from([3, 16, 33]))
    spaces = st.sampled_from([None, None, None, "tenant"])
    waiting = []
    for number in draw(st.permutations(range(1, draw(st.integers(1, 8)) + 1))):
        family = draw(st.sampled_from([None, None, "a"]))
        retracted = draw(st.integers(0, 5)) == 0
        req = make_req(
            number,
            (1,) * (part + 1) if family else draw(texts(part)),
            outputs=draw(texts(2)) if retracted else (),
            max_tokens=draw(st.integers(20, 22)),
            priority=draw(st.integers(-1, 1)),
            parent_id=family,
            extra_key=None if family else draw(spaces),
            is_retracted=retracted,
        )
        waiting.append(req)
    cached = draw(st.lists(st.tuples(spaces, texts(part)), max_size=6))
    return {"cached": cached, "waiting": waiting, "page_size": draw(st.sampled_from([1, 4, 16, 24, 64]))}


@settings(max_examples=examples(200))
@given(scene=scenes())
def test_the_order_is_what_the_rule_says(scene: dict[str, Any]) -> None:
    waiting = scene["waiting"]
    before = list(waiting)
    words = Words(scene["cached"], scene["page_size"])
    expected = {policy: words.order(policy, waiting) for policy in POLICIES if policy != "random"}
    for kind in SHARING:
        cache = make_cache(kind, page_size=scene["page_size"], num_pages=2048)
        for extra_key, tokens in scene["cached"]:
            fill(cache, tokens, extra_key)
        for policy, order in expected.items():
            assert numbers(make_policy(policy, cache).calc_priority(waiting)) == order, (kind, policy)
        assert waiting == before, "the queue itself is not touched"
        cache.check_invariants()


@settings(max_examples=examples(50))
@given(scene=scenes(), seed=st.integers(0, 3))
def test_random_is_an_order_that_depends_on_its_seed_only(scene: dict[str, Any], seed: int) -> None:
    cache = make_cache(page_size=scene["page_size"], num_pages=2048)
    one, other = make_policy("random", cache, seed), make_policy("random", cache, seed)
    words = Words([], scene["page_size"])
    fcfs, held = words.order("fcfs", scene["waiting"])
    for _ in range(3):
        ready = numbers(one.calc_priority(scene["waiting"]))
        assert ready == numbers(other.calc_priority(scene["waiting"][::-1]))
        assert sorted(ready[0]) == sorted(fcfs) and ready[1] == held
        retracted = [req.number for req in scene["waiting"] if req.is_retracted]
        assert ready[0][: len(retracted)] == sorted(retracted)


def test_random_draws_anew_every_round_and_differs_between_seeds() -> None:
    waiting = [make_req(number, [number]) for number in range(10)]
    policies = [make_policy("random", make_cache(num_pages=2048), seed) for seed in (0, 0, 1)]
    rounds = [[numbers(policy.calc_priority(waiting))[0] for _ in range(3)] for policy in policies]
    assert rounds[0] == rounds[1] != rounds[2]
    assert all(one != other for one, other in pairwise(rounds[0]))


# --- names ------------------------------------------------------------------------------------------------------------


def test_an_unknown_policy_is_a_configuration_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'sjf'.*: fcfs, lpm, dfs-weight, lof, random, priority$") as caught:
        make_policy("sjf", make_cache(num_pages=2048))
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_without_a_cache_that_shares_who_looks_into_it_is_fcfs(policy: str) -> None:
    tracer = Tracer()
    recorder = Recorder(tracer)
    waiting = [make_req(number, [7] * 100, parent_id="a") for number in (3, 1, 2)]
    order = make_policy(policy, make_cache("chunk"), tracer=tracer).calc_priority(waiting)
    assert numbers(order) == ([1, 2, 3], [])
    (event,) = recorder.events("policy_order")
    assert (event.policy, event.active, event.hits) == (policy, "fcfs", ())
    assert event.explain() == f"Order by {policy}, here as fcfs: r1, r2, r3."


def test_more_than_128_that_wait_are_not_looked_up() -> None:
    cache = make_cache(num_pages=2048)
    fill(cache, [9] * 40)
    waiting = [make_req(number, [7] * 100) for number in range(127)] + [make_req(127, [9] * 50)]
    policy = make_policy("lpm", cache)
    assert numbers(policy.calc_priority(waiting)) == ([127, 0], list(range(1, 127)))
    waiting.append(make_req(128, [9] * 50))
    assert numbers(policy.calc_priority(waiting)) == (list(range(129)), []), "first come, first served"
    by_weight = make_policy("dfs-weight", cache)
    assert numbers(by_weight.calc_priority(waiting)) == ([127, 128, 0], list(range(1, 127))), "which has no such limit"


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SHARING)
def test_a_deep_tree_is_no_deep_recursion(kind: str) -> None:
    cache, depth = make_cache(kind, num_pages=4096), 1200
    tokens = list(range(depth))
    for end in range(1, depth + 1):  # in the radix tree, too, each token is a node
        fill(cache, tokens[:end])
    waiting = [make_req(1, tokens[:-1]), make_req(2, tokens)]
    assert numbers(make_policy("dfs-weight", cache).calc_priority(waiting)) == ([2, 1], [])


@pytest.mark.parametrize(
    ("page_size", "common", "waits"),
    [(1, 31, False), (1, 32, True), (16, 47, True), (24, 47, False), (24, 48, True), (64, 63, False)],
)
def test_a_common_prefix_must_be_worth_a_round(page_size: int, common: int, waits: bool) -> None:
    """At least 32 tokens, and of them only whole pages are shared."""
    waiting = [make_req(1, [7] * common + [1] * 60), make_req(2, [7] * common + [2] * 60)]
    order = make_policy("lpm", make_cache(page_size=page_size)).calc_priority(waiting)
    assert numbers(order) == (([1], [2]) if waits else ([1, 2], []))


@pytest.mark.parametrize(("cached", "waits"), [(16, True), (32, True), (33, False)])
def test_whoever_hits_more_than_a_little_does_not_wait_for_the_rest(cached: int, waits: bool) -> None:
    cache = make_cache(num_pages=2048)
    fill(cache, [7] * cached)
    waiting = [make_req(1, [7] * 100), make_req(2, [7] * 100)]
    order = make_policy("lpm", cache).calc_priority(waiting)
    assert numbers(order) == (([1], [2]) if waits else ([1, 2], []))


def test_strangers_with_a_short_common_prompt_are_no_siblings() -> None:
    waiting = [make_req(number, [7] * 5, parent_id=f"parent-{number}") for number in (1, 2)] + [make_req(3, [7] * 5)]
    waiting += [make_req(4, [7] * 5)]
    for policy in ("fcfs", "lpm"):
        assert numbers(make_policy(policy, make_cache(page_size=4)).calc_priority(waiting)) == ([1, 2, 3, 4], [])


# --- who waits a round ------------------------------------------------------------------------------------------------


def test_whoever_wants_its_prompt_s_logprobs_uses_no_cache_and_does_not_wait_for_it() -> None:
    cache = make_cache(num_pages=2048)
    fill(cache, [9] * 40)
    waiting = [
        make_req(1, [7] * 100),
        make_req(2, [7] * 100, prompt_logprobs=1),
        make_req(3, [9] * 50, prompt_logprobs=1),
        make_req(4, [9] * 50),
    ]
    assert numbers(make_policy("lpm", cache).calc_priority(waiting)) == ([4, 1, 2, 3], [])


@settings(max_examples=examples(100))
@given(scene=scenes(), policy=st.sampled_from(POLICIES))
def test_everybody_goes_in_the_end(scene: dict[str, Any], policy: str) -> None:
    """Each round those who may go compute their tokens, and somebody may always go."""
    cache = make_cache(page_size=scene["page_size"], num_pages=2048)
    orders = make_policy(policy, cache)
    waiting = scene["waiting"]
    while waiting:
        order = orders.calc_priority(waiting)
        assert order.ready and len(order.ready) + len(order.held_back) == len(waiting)
        for req in order.ready:
            fill(cache, req.origin_input_ids + req.output_ids, req.extra_key)
        waiting = order.held_back
