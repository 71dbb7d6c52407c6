"""Contract of the schedule policy of m4: longest prefix first, and one round's wait for a prefix that is computed."""

from collections.abc import Sequence
from itertools import count, groupby
from random import Random
from typing import Any

from m1_single_request.tracer import Tracer, TraceRecord
from m4_radix_cache.schedule_policy import Order
from tests.contracts.part import Broken, Part, same
from tests.m4_radix_cache.caches import make_cache
from tests.m4_radix_cache.reqs import fill, make_req

PART = Part(
    name="schedule_policy",
    target="m4_radix_cache.schedule_policy:SchedulePolicy",
    role="schedule_policy",
    lesson="docs/m4_radix_cache.md#schedulepolicy-the-order-of-waiting-requests",
    starter="MySchedulePolicy",
    variant="m4_radix_cache-radix-16",
    changes={"cache_config": {"debug": True}},
)

Tokens = list[int]


def order_of(part: Any, waiting: Sequence[Any], cache: Any, policy: str = "lpm") -> Any:
    return part(policy, tree_cache=cache, seed=0, tracer=Tracer()).calc_priority(waiting)


def check(
    part: Any,
    waiting: Sequence[Any],
    ready: str,
    held_back: str = "",
    *,
    cached: Sequence[Tokens] = (),
    policy: str = "lpm",
    page_size: int = 1,
    kind: str = "radix",
    hint: str = "",
) -> None:
    """Compare the order of these requests with that of the ids in `ready` and `held_back`."""
    cache = make_cache(kind, page_size=page_size, num_pages=1024)
    for tokens in cached:
        fill(cache, tokens)
    on = f"{policy}, page_size={page_size}{', a cache that keeps nothing' if cache.disable else ''}; "
    on += f"cached: {', '.join(map(run_lengths, cached)) or 'nothing'}; waiting: {worded(waiting)}"
    before = list(waiting)
    order = order_of(part, waiting, cache, policy)
    if not isinstance(order, Order):
        raise Broken(on, "an Order", order)
    got = {"ready": [req.rid for req in order.ready], "held back": [req.rid for req in order.held_back]}
    hint += " Nobody is to be held back here." if got["held back"] and not held_back else ""
    same(got, {"ready": ready.split(), "held back": held_back.split()}, on=on, hint=hint.strip())
    same([req.rid for req in waiting], [req.rid for req in before], on=f"{on}: the list", hint="Sort a copy of it.")


def worded(waiting: Sequence[Any]) -> str:
    """The requests, as a learner would write them."""
    return ", ".join(f"{req.rid}: {run_lengths(req.origin_input_ids + req.output_ids)}{more(req)}" for req in waiting)


def more(req: Any) -> str:
    """What is special about a request."""
    named = {"retracted": req.is_retracted, f"parent_id={req.parent_id!r}": req.parent_id is not None}
    named[f"extra_key={req.extra_key!r}"] = req.extra_key is not None
    named[f"match_limit={req.match_limit}"] = req.match_limit == 0
    words = [name for name, holds in named.items() if holds]
    return f" ({', '.join(words)})" if words else ""


def run_lengths(tokens: Sequence[int]) -> str:
    """Tokens as a sum: `[7]*40 + [1]*3`."""
    return " + ".join(f"[{token}]*{len(list(run))}" for token, run in groupby(tokens))


# --- the order --------------------------------------------------------------------------------------------------------


def test_fcfs_is_the_order_of_arrival(part: Any) -> None:
    """Under `fcfs` requests are tried in order of arrival, whatever is cached."""
    waiting = [make_req(number, [number] * 5) for number in (3, 1, 2)]
    hint = "The list may be in any order; `number` is smaller for a request that arrived earlier."
    check(part, waiting, "r1 r2 r3", policy="fcfs", cached=[[3] * 5], hint=hint)


def test_the_longest_cached_prefix_goes_first(part: Any) -> None:
    """Under `lpm` the request with most cached tokens is tried first."""
    waiting = [make_req(1, [1] * 50), make_req(2, [2] * 50), make_req(3, [3] * 50)]
    hint = "More cached tokens go first."
    check(part, waiting, "r2 r3 r1", cached=[[2] * 40, [3] * 10], hint=hint)
    waiting = [make_req(1, [1] * 90), make_req(2, [2] * 20)]
    hint = "The number of cached tokens decides, not the length of the request or what is left to compute."
    check(part, waiting, "r1 r2", cached=[[1] * 40, [2] * 19], hint=hint)


def test_ties_are_broken_by_arrival(part: Any) -> None:
    """Of two requests with as many cached tokens the one that arrived earlier is tried first."""
    waiting = [make_req(number, [number] * 50) for number in (4, 2, 3, 1)]
    hint = "Sort by arrival first; Python's sort keeps that order for equal keys."
    check(part, waiting, "r3 r4 r1 r2", cached=[[3] * 40, [4] * 40], hint=hint)


def test_the_last_token_is_never_taken_from_the_cache(part: Any) -> None:
    """A request finds at most `match_limit` tokens: not its last one, and none with prompt log-probabilities."""
    hint = "Look up match_prefix(req.key, req.match_limit): a request cannot use more."
    waiting = [make_req(1, [1] * 40), make_req(2, [2] * 41)]
    check(part, waiting, "r2 r1", cached=[[1] * 40, [2] * 40], hint=hint)
    waiting = [make_req(1, [1] * 60, prompt_logprobs=1), make_req(2, [2] * 60)]
    check(part, waiting, "r2 r1", cached=[[1] * 50, [2] * 40], hint=hint)


def test_retracted_requests_come_first(part: Any) -> None:
    """Retracted requests are tried before all others, in order of arrival, under each policy."""
    waiting = [
        make_req(1, [1] * 50),
        make_req(4, [4] * 50, is_retracted=True),
        make_req(2, [2] * 50),
        make_req(3, [3] * 50, is_retracted=True),
    ]
    hint = "They have waited once already. Among them the number of cached tokens does not count."
    check(part, waiting, "r3 r4 r2 r1", cached=[[4] * 40, [2] * 40], hint=hint)
    check(part, waiting, "r3 r4 r1 r2", policy="fcfs", cached=[[4] * 40, [2] * 40], hint=hint)


# --- held back --------------------------------------------------------------------------------------------------------


def test_one_request_computes_a_common_prefix(part: Any) -> None:
    """Of several requests with a long common prefix that is not cached, only the first to arrive is tried."""
    waiting = [make_req(number, [7] * 40 + [number] * 5) for number in (3, 1, 2)]
    hint = "The others find the prefix in the cache one round later. They are held back in order of arrival."
    check(part, waiting, "r1", "r2 r3", hint=hint)
    waiting = [make_req(number, [number % 2] * 40 + [number] * 5) for number in (1, 2, 3, 4)]
    check(part, waiting, "r1 r2", "r3 r4", hint="Each prefix has a request that computes it.")
    waiting = [make_req(1, [7] * 40 + [1] * 5), make_req(2, [7] * 40 + [2] * 5, is_retracted=True)]
    hint = "A retracted request is never held back, comes first, and computes the prefix for the others."
    check(part, waiting, "r2", "r1", hint=hint)
    waiting = [make_req(number, [7] * 40 + [number] * 5, is_retracted=True) for number in (1, 2)]
    check(part, waiting, "r1 r2", hint="A retracted request is never held back.")
    waiting = [make_req(1, [7] * 30, outputs=[8] * 20, is_retracted=True), make_req(2, [7] * 30 + [8] * 30)]
    check(part, waiting, "r1", "r2", hint="Outputs of a retracted request are computed again, so they count as tokens.")
    waiting = [make_req(number, [7] * 40 + [number] * 5) for number in (1, 2)]
    hint = "Under fcfs only siblings are held back."
    check(part, waiting, "r1 r2", policy="fcfs", hint=hint)


def test_a_short_common_prefix_is_not_worth_a_round(part: Any) -> None:
    """A request waits only for at least MIN_COMMON_TOKENS common tokens, 32, in whole pages."""
    hint = "The common tokens count in whole pages, because only these are shared: at least 32 of them."
    for page_size, common, waits in ((1, 31, False), (1, 32, True), (16, 47, True), (24, 47, False), (24, 48, True)):
        waiting = [make_req(number, [7] * common + [number] * 60) for number in (1, 2)]
        ready, held_back = ("r1", "r2") if waits else ("r1 r2", "")
        check(part, waiting, ready, held_back, page_size=page_size, hint=hint)


def test_a_request_with_a_good_hit_does_not_wait(part: Any) -> None:
    """A request with more than FEW_HIT_TOKENS cached tokens, 32, is not held back, nor one that would not get more."""
    waiting = [make_req(1, [7] * 100), make_req(2, [7] * 100)]
    hint = "With more than 32 cached tokens a request has what waiting could mostly give."
    check(part, waiting, "r1", "r2", cached=[[7] * 32], hint=f"{hint} These are 32.")
    check(part, waiting, "r1 r2", cached=[[7] * 33], hint=hint)
    waiting = [make_req(1, [7] * 32 + [1] * 50), make_req(2, [7] * 32 + [2] * 50)]
    hint = "All that the two have in common is cached: the common tokens must be more than the hit."
    check(part, waiting, "r1 r2", cached=[[7] * 32], hint=hint)


def test_a_request_that_gains_nothing_does_not_wait(part: Any) -> None:
    """A request whose hit is all that it can use is not held back, even if an earlier one has the same tokens."""
    hint = "It can use match_limit tokens, in whole pages. If it has these, it is not held back."
    waiting = [make_req(1, [7] * 48), make_req(2, [7] * 48)]
    check(part, waiting, "r1 r2", page_size=16, cached=[[7] * 32], hint=hint)
    check(part, waiting, "r1", "r2", page_size=16, cached=[[7] * 16], hint=hint)
    waiting = [make_req(1, [7] * 60), make_req(2, [7] * 60, prompt_logprobs=1)]
    check(part, waiting, "r1 r2", hint=hint)
    waiting = [make_req(1, [7] * 4, parent_id="a"), make_req(2, [7] * 4, parent_id="a")]
    check(part, waiting, "r1 r2", page_size=4, hint=f"{hint} This holds for siblings, too.")


def test_a_namespace_shares_with_no_other(part: Any) -> None:
    """The same tokens in another namespace are no common prefix."""
    keys = {1: None, 2: "x", 3: "x", 4: "y"}
    waiting = [make_req(number, [7] * 50, extra_key=extra_key) for number, extra_key in keys.items()]
    hint = "Compare extra_key as well as the tokens: the cache shares nothing between namespaces."
    check(part, waiting, "r1 r2 r4", "r3", hint=hint)


def test_siblings_wait_for_the_first_of_them(part: Any) -> None:
    """Of siblings, the answers to one prompt, only the first is tried: under each policy, however short the prompt."""
    waiting = [make_req(number, [7] * 9, parent_id="a") for number in (1, 2)]
    waiting += [make_req(number, [7] * 9) for number in (3, 4)]
    waiting += [make_req(5, [7] * 9, parent_id="b")]
    hint = "Siblings have the same parent_id. None is no parent, and another parent's short prompt is not worth a wait."
    for policy in ("lpm", "fcfs"):
        check(part, waiting, "r1 r3 r4 r5", "r2", policy=policy, hint=hint)
    hint = "A hit does not matter as long as a sibling can use more."
    waiting = [make_req(number, [7] * 60, parent_id="a") for number in (1, 2)]
    check(part, waiting, "r1", "r2", cached=[[7] * 40], hint=hint)
    check(part, waiting, "r1 r2", cached=[[7] * 59], hint="All that a sibling can use is cached, so it need not wait.")


def test_without_a_use_for_lookups_it_is_fcfs(part: Any) -> None:
    """With a cache that keeps nothing, or more than MAX_WAITING_FOR_LPM requests, 128, `lpm` is `fcfs`."""
    waiting = [make_req(number, [7] * 100, parent_id="a") for number in (3, 1, 2)]
    check(part, waiting, "r1 r2 r3", kind="chunk", hint="If tree_cache.disable, nobody finds anything by waiting.")
    waiting = [make_req(number, [7] * 100) for number in range(127)] + [make_req(127, [9] * 50)]
    cache = make_cache(num_pages=1024)
    fill(cache, [9] * 40)
    lookups, match_prefix = count(), cache.match_prefix
    cache.match_prefix = lambda *arguments: (next(lookups), match_prefix(*arguments))[1]
    on = "128 requests: r0 to r126 with the same 100 tokens, r127 with 40 cached ones; "
    first = order_of(part, waiting, cache).ready[0].rid
    same(first, "r127", on=f"{on}the first that is ready", hint="Up to 128 requests it is lpm.")
    before = next(lookups)
    order = order_of(part, [*waiting, make_req(128, [9] * 50)], cache)
    hint = "With 129 requests it is fcfs: nobody is looked up, or held back for a common prefix."
    expected = [f"r{number}" for number in range(129)]
    same([req.rid for req in order.ready], expected, on=f"{on}and r128: ready", hint=hint)
    same(next(lookups) - before - 1, 0, on=f"{on}and r128: calls of match_prefix", hint=hint)


class Read:
    """A reader of the trace that keeps the events."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def read(self, record: TraceRecord) -> None:
        self.events.append(record.event)

    def close(self) -> None:
        """Nothing is open."""


def test_the_order_is_traced(part: Any) -> None:
    """`lpm` traces the hit of each request, and `fcfs` none, also if it looks siblings up."""
    hint = "End with `return self.traced(order, matches)`: under lpm with a match of each request, under fcfs with {}."
    for policy, traced in (("lpm", ("lpm", (40, 0))), ("fcfs", ("fcfs", ()))):
        cache, tracer, reader = make_cache(num_pages=1024), Tracer(), Read()
        fill(cache, [2] * 40)
        tracer.attach(reader)
        waiting = [make_req(1, [2] * 50, parent_id="a"), make_req(2, [1] * 9)]
        waiting += [make_req(3, [2] * 50, parent_id="a")] if policy == "fcfs" else []
        part(policy, tree_cache=cache, seed=0, tracer=tracer).calc_priority(waiting)
        got = [(event.active, event.hits) for event in reader.events]
        same(got, [traced], on=f"{policy}, page_size=1; cached: [2]*40; waiting: {worded(waiting)}: traced", hint=hint)


# --- all of it --------------------------------------------------------------------------------------------------------


def test_a_common_prompt_is_computed_once(part: Any) -> None:
    """Eight users of one system prompt compute it once, and everybody is served."""
    waiting = [make_req(number, [7] * 64 + [number] * 8) for number in range(8)]
    cache, rounds, num_computed = make_cache(page_size=4, num_pages=1024), 0, 0
    while waiting and rounds < 20:
        order, rounds = order_of(part, waiting, cache), rounds + 1
        num_computed += sum(req.seqlen - hit(cache, req) for req in order.ready)
        for req in order.ready:
            fill(cache, req.origin_input_ids)
        waiting = list(order.held_back)
    on = "8 requests with the same 64 tokens and 8 of their own; each round those in `ready` run; "
    same(rounds, 2, on=f"{on}rounds", hint="In the second round the prefix is cached, and all others are ready.")
    same(num_computed, 72 + 7 * 8, on=f"{on}tokens that are computed", hint="Without a wait they would be 8 * 72.")


def hit(cache: Any, req: Any) -> int:
    return len(cache.match_prefix(req.key, req.match_limit).device_indices)


def test_it_is_right_for_many_queues(part: Any) -> None:
    """For any requests, retracted or not, the order is that of the rule over plain lists of tokens."""
    rng = Random(5)
    for _ in range(120):
        page_size, policy = rng.choice((1, 4, 16, 24)), rng.choice(("lpm", "lpm", "fcfs"))
        part_len = rng.choice((3, 16, 33))
        cached = [text(rng, part_len) for _ in range(rng.randrange(5))]
        waiting = [queued(rng, number, part_len) for number in rng.sample(range(1, 9), rng.randint(1, 7))]
        rule = Rule(cached, page_size)
        ready, held_back = rule.order(waiting, policy)
        hits = ", ".join(f"{req.rid} {rule.hit(req)} of {rule.most(req)}" for req in waiting)
        hint = f"Hits, each of the most that the request can use: {hits}. Go through the rules with these."
        check(part, waiting, ready, held_back, cached=cached, policy=policy, page_size=page_size, hint=hint)


def text(rng: Random, part_len: int) -> Tokens:
    """Tokens that begin like others."""
    parts = [rng.choice((1, 2)) for _ in range(rng.randrange(5))]
    tail = [rng.choice((1, 2, 3)) for _ in range(rng.randint(1, 4))]
    return [token for token in parts for _ in range(part_len)] + tail


def queued(rng: Random, number: int, part_len: int) -> Any:
    retracted, is_sibling = rng.random() < 0.2, rng.random() < 0.3
    prompt = [1] * (part_len + 1) if is_sibling else text(rng, part_len)
    outputs = text(rng, 2) if retracted else []
    parent = "a" if is_sibling else None
    return make_req(number, prompt, outputs=outputs, parent_id=parent, is_retracted=retracted)


class Rule:
    """The rule of the starter, over plain lists of tokens."""

    def __init__(self, cached: Sequence[Tokens], page_size: int) -> None:
        self.cached, self.page_size = cached, page_size

    def common(self, req: Any, others: Sequence[Tokens]) -> int:
        """Common first tokens of a request and one of the others, in whole pages."""
        tokens = req.origin_input_ids + req.output_ids
        longest = 0
        for other in others:
            equal = next((i for i, pair in enumerate(zip(tokens, other, strict=False)) if pair[0] != pair[1]), None)
            longest = max(longest, min(len(tokens), len(other)) if equal is None else equal)
        return self.whole(longest)

    def whole(self, num_tokens: int) -> int:
        return num_tokens // self.page_size * self.page_size

    def hit(self, req: Any) -> int:
        return min(self.common(req, [tokens[: self.whole(len(tokens))] for tokens in self.cached]), self.most(req))

    def most(self, req: Any) -> int:
        return self.whole(req.seqlen - 1)

    def order(self, waiting: Sequence[Any], policy: str) -> tuple[str, str]:
        arrived = sorted(waiting, key=lambda req: req.number)
        going = [req for req in arrived if req.is_retracted]
        held_back: list[Any] = []
        for req in arrived:
            if not req.is_retracted:
                (held_back if self.is_held_back(req, going, policy) else going).append(req)
        if policy == "lpm":
            going.sort(key=lambda req: (not req.is_retracted, 0 if req.is_retracted else -self.hit(req), req.number))
        return " ".join(req.rid for req in going), " ".join(req.rid for req in held_back)

    def is_held_back(self, req: Any, going: Sequence[Any], policy: str) -> bool:
        hit, coming = self.hit(req), self.common(req, [one.origin_input_ids + one.output_ids for one in going])
        has_sibling = req.parent_id is not None and any(one.parent_id == req.parent_id for one in going)
        saves = policy == "lpm" and hit <= 32 <= coming and hit < coming
        return hit < self.most(req) and (has_sibling or saves)
