"""The graders of m4's notebook, `check` as in `checks.py`, and what it replays again and again: an hour of traffic.

The reference is always the package itself: its tree, its policies, its requests, and the tokens that m1 gives to the
same prompts.
"""

import csv
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from m1_single_request.tracer import Tracer
from m4_radix_cache import CacheConfig, LLMEngine, SamplingParams, SchedulerConfig
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.eviction import STRATEGIES, EvictionHeap, EvictionStrategy
from m4_radix_cache.mem_cache.radix_cache import RadixCache, TreeNode
from m4_radix_cache.mem_cache.radix_key import RadixKey, decode
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_policy import Order, SchedulePolicy
from m4_radix_cache.views.radix_tree import RadixTreeView

try:  # in the checkout, for the tests
    from notebooks.checks import Mismatch, check, grader, ids_of, run_steps, short, show_source, tokens_alone
except ModuleNotFoundError:  # beside the notebook
    from checks import (  # type: ignore[no-redef]
        Mismatch,
        check,
        grader,
        ids_of,
        run_steps,
        short,
        show_source,
        tokens_alone,
    )

__all__ = ["check", "ids_of", "policy_of", "recorded_hour", "replay", "show_source", "tiny_cache", "view_of"]


def tiny_cache(*, num_tokens: int, page_size: int, strategy: str = "lru", tracer: Tracer | None = None) -> RadixCache:
    """A tree of its own, over real pools."""
    return RadixCache(
        req_to_token_pool=ReqToTokenPool(size=1, max_context_len=num_tokens),
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(size=num_tokens, page_size=page_size, checked=True),
        eviction_policy=strategy,
        tracer=tracer or Tracer(),
    )


class Letters:
    """A tokenizer for which a token is a letter."""

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        """The text."""
        return "".join(map(chr, token_ids))


class LettersView(RadixTreeView):
    """Draws a cache whose tokens are letters."""

    def draw(self, tokenizer: Any = None) -> Any:
        """The tree, with letters as texts."""
        return super().draw(tokenizer or Letters())


def view_of(cache: BasePrefixCache) -> LettersView:
    """Follow a cache that belongs to no engine, from now on."""
    view = LettersView()
    cache.tracer.attach(view)
    return view


# --- an hour of many tenants ------------------------------------------------------------------------------------------

RECORDED = Path(__file__).parents[1] / "benchmarks" / "data" / "m4_tenants.csv"
HOUR = slice(1000, 1600)
"""Of the recorded day: when other tenants than in the morning become busy, and two piles of documents come."""
SYSTEM_PROMPTS = (128, 256, 512, 1024)  # tokens; the n-th tenant has the n-th of them, and so on
READER, INSTRUCTION = 24, 96  # the tenant that reads documents, and the length of its system prompt
STREAM = 4096  # tokens of one stream
PAGE_SIZE = 16
Asked = tuple[RadixKey, int, int]
"""Prompt and answer, tokens of the prompt, priority."""


def recorded_hour() -> list[Asked]:
    """The requests of an hour. What the tokens are does not matter, only which are the same: so they are numbers."""
    with RECORDED.open(encoding="utf-8", newline="") as file:
        rows = [{name: int(value) for name, value in row.items()} for row in csv.DictReader(file)]
    return [(RadixKey(_tokens(**row)), row["prompt"], row["priority"]) for row in rows[HOUR]]


def _tokens(*, tenant: int, chat: int, prompt: int, output: int, priority: int) -> list[int]:
    """The tenant's system prompt, and then the chat as far as it has come."""
    system = INSTRUCTION if tenant == READER else SYSTEM_PROMPTS[tenant % len(SYSTEM_PROMPTS)]
    return [STREAM * tenant + i for i in range(system)] + [
        STREAM * (1000 + chat) + i for i in range(prompt + output - system)
    ]


def replay(
    requests: Sequence[Asked],
    num_tokens: int,
    strategy: str | EvictionStrategy = "lru",
    *,
    cache_class: type[BasePrefixCache] = RadixCache,
    page_size: int = PAGE_SIZE,
    num_locked: int = 0,
) -> float:
    """Pass requests through a cache, one after another; returns the share of prompt tokens that were found.

    Each is looked up, locked, gets slots (something is evicted if there are too few), is inserted and unlocked; what
    would be computed in between costs nothing here. With `num_locked` the last ones stay locked, and everything is
    checked after each of them.
    """
    cache = _cache_with(strategy, cache_class, num_tokens, page_size)
    allocator = cache.token_to_kv_pool_allocator
    locked: deque[Any] = deque()
    found = asked = 0
    for key, num_prompt, priority in requests:
        match = cache.match_prefix(key, num_prompt - 1)
        cache.inc_lock_ref(match.last_device_node)
        cache.record_hit(match.last_device_node)
        locked.append((match.last_device_node, key, len(match.device_indices)))
        hit, whole = len(match.device_indices), len(key) // page_size * page_size
        cache.evict(max(0, whole - hit - allocator.available_size()))
        slots = allocator.alloc(whole - hit)
        assert slots is not None, f"{whole - hit} tokens more do not fit into {num_tokens}"
        existing = cache.insert(key, np.concatenate((match.device_indices, slots)), priority)
        allocator.free(slots[: max(0, existing - hit)])  # the whole prompt was there: its last page was computed again
        found, asked = found + hit, asked + num_prompt
        if num_locked:
            _check_locked(cache, locked)
        while len(locked) > num_locked:
            cache.dec_lock_ref(locked.popleft()[0])
    return found / asked


def _cache_with(
    strategy: str | EvictionStrategy, cache_class: type[BasePrefixCache], size: int, page_size: int
) -> BasePrefixCache:
    """A cache of this size that evicts by a strategy of the engine's or by any other."""
    own = {"own": strategy} if callable(strategy) else {}

    class Tree(RadixCache):
        eviction_policies = STRATEGIES | own

        def _start_empty(self) -> None:
            super()._start_empty()
            if callable(strategy):
                self._candidates: EvictionHeap = EvictionHeap(strategy)

    return (Tree if cache_class is RadixCache else cache_class)(
        req_to_token_pool=ReqToTokenPool(size=1, max_context_len=1),  # no request runs, so there are no rows
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(size=size, page_size=page_size),
        eviction_policy="lru" if callable(strategy) else strategy,
        tracer=Tracer(),
    )


def _check_locked(cache: BasePrefixCache, locked: Sequence[tuple[Any, RadixKey, int]]) -> None:
    try:
        cache.check_invariants()
    except AssertionError as error:
        if "another rank" in str(error):
            raise Mismatch(
                "A rank has changed while its node stood in the heap. It may depend on what the cache watches, "
                "`last_access_time`, `creation_time`, `hit_count`, `priority` and `id`, and on nothing else."
            ) from error
        raise Mismatch(f"check_invariants() fails: {error}.") from error
    for _, key, hit in locked:
        if len(cache.match_prefix(key, hit).device_indices) < hit:
            raise Mismatch("What a running request had locked was evicted. A strategy ranks nodes and changes nothing.")


# --- exercises: match and split ---------------------------------------------------------------------------------------

Node = dict[str, Any]
"""`tokens`, `slots`, `parent`, `children` by first page, `lock_ref`: a node as plain data."""
PAGE_SIZES = (1, 2, 4)
SHORT_TREE = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 9, 9], [7, 7, 7, 7])
QUERIES = (
    (
        [1, 2, 3, 4, 5, 6, 9, 9, 1],
        "It goes on over several nodes: go down as long as a child begins with the next whole page.",
    ),
    ([1, 2, 3, 4], "A request may end within a node: as much of the node as it has is found."),
    ([7, 7, 7, 1], "Only whole pages count."),
    ([1, 2, 8, 8, 5, 6, 7, 8], "Behind the first token that differs nothing counts, even if it is the same again."),
    ([1, 9, 3, 4], "Children are found by their whole first page."),
    ([5, 6, 7, 8], "What stands in the middle of another text is no prefix."),
    ([7], "A request shorter than a page finds nothing."),
    ([], "Nothing is the prefix of nothing."),
)


@grader("m4.match")
def grade_match(match: Callable[[Node, list[int], int], list[int]]) -> str:
    """`match(root, tokens, page_size)`: the slots of the longest cached prefix, in whole pages."""
    for page_size in (2, 1, 4):
        for tokens, hint in QUERIES:
            cache = _tree_of(SHORT_TREE, page_size)  # anew: to look tokens up splits nodes
            _compare_match(match, cache, tokens, page_size, hint)
    rng = Random(0)
    for _ in range(60):
        page_size = rng.choice(PAGE_SIZES)
        cache = _tree_of([_random_tokens(rng) for _ in range(6)], page_size)
        for _ in range(10):
            _compare_match(match, cache, _random_tokens(rng), page_size, "")
    return "60 random trees with pages of 1, 2 and 4: your slots are those that RadixCache finds."


def _compare_match(match: Any, cache: RadixCache, tokens: list[int], page_size: int, hint: str) -> None:
    root = _plain(cache.root, page_size)
    before = _paths(root)
    got = match(root, list(tokens), page_size)
    wanted = _find(cache, tokens)
    if _paths(root) != before:
        raise Mismatch("match() has changed the tree. This one only looks; to split is the next exercise.")
    if not isinstance(got, Sequence | np.ndarray) or list(got) != wanted:
        raise Mismatch(
            f"In a tree of {_told(before)}, pages of {page_size}: of {tokens} the slots {wanted} are found, you say "
            f"{short(got)}.{' ' if hint else ''}{hint}"
        )


@grader("m4.split")
def grade_split(split: Callable[[Node, int, int], Node]) -> str:
    """`split(node, num_tokens, page_size)`: puts a new node with the first tokens above `node`, and returns it."""
    _grade_split_by_hand(split)
    rng = Random(0)
    for _ in range(100):
        page_size = rng.choice(PAGE_SIZES)
        root = _plain(_tree_of([_random_tokens(rng) for _ in range(6)], page_size).root, page_size)
        long = [node for node in _nodes(root) if len(node["tokens"]) > page_size]
        if not long:
            continue
        node = rng.choice(long)
        before, way = _paths(root), _way(node)
        pages = len(node["tokens"]) // page_size
        split(node, page_size * rng.randrange(1, pages), page_size)
        if _paths(root) != before or _way(node) != way:
            raise Mismatch(
                f"A tree of {_told(before)} is {_told(_paths(root))} after a split. It must hold the same prefixes, "
                f"with the same slots."
            )
    return "By hand and in 100 random trees: the same prefixes and slots, and no handle or lock has moved."


def _grade_split_by_hand(split: Callable[[Node, int, int], Node]) -> None:
    root, below = _node((), [], None, {}, 1), _node((7, 8), [46, 47], None, {}, 1)
    node = _node((1, 2, 3, 4, 5, 6), [20, 21, 22, 23, 44, 45], root, {(7, 8): below}, 2)
    root["children"][(1, 2)], below["parent"] = node, node
    upper = split(node, 4, 2)

    def expect(what: str, got: object, wanted: object, why: str) -> None:
        if got != wanted or type(got) is not type(wanted):
            why = why if type(got) is type(wanted) else f"A {type(wanted).__name__} is wanted."
            raise Mismatch(
                f"Node 1 2 3 4 5 6 with slots 20-23 44 45 and 2 locks, split at 4: {what} should be {wanted!r}, yours "
                f"is {short(got)}. {why}"
            )

    if not isinstance(upper, dict) or set(upper) < set(node):
        raise Mismatch(f"split() returns the new node, a dict with the same keys; you return {short(upper)}.")
    if upper is node or upper["tokens"] == (5, 6):
        raise Mismatch(
            "The new node takes the head, and the old object keeps the tail: a running request has locked the old one "
            "as the end of its prefix, and it would end too early."
        )
    expect("the new node's tokens", upper["tokens"], (1, 2, 3, 4), "It takes the first 4.")
    expect("the new node's slots", upper["slots"], [20, 21, 22, 23], "Slots go with their tokens.")
    expect("the old node's tokens", node["tokens"], (5, 6), "It keeps the tail.")
    expect("the old node's slots", node["slots"], [44, 45], "Slots go with their tokens.")
    expect("the new node's lock_ref", upper["lock_ref"], 2, "Who reads the tail reads the head, too.")
    expect("the old node's lock_ref", node["lock_ref"], 2, "Nobody has let go of it.")
    if root["children"].get((1, 2)) is not upper or len(root["children"]) != 1:
        raise Mismatch("The new node takes the old one's place among the children of the root.")
    if list(upper["children"]) != [(5, 6)] or upper["children"][(5, 6)] is not node:
        raise Mismatch("The old node is the new one's only child, found by its own first page: (5, 6).")
    if upper["parent"] is not root or node["parent"] is not upper:
        raise Mismatch("The root is the new node's parent, and the new node is the old one's: locks walk upwards.")
    if list(node["children"].items()) != [((7, 8), below)] or below["parent"] is not node:
        raise Mismatch("What hung below the old node begins where it ends, so it hangs there still.")


def _tree_of(prompts: Sequence[Sequence[int]], page_size: int) -> RadixCache:
    """The engine's own tree of some prompts."""
    cache = tiny_cache(num_tokens=160, page_size=page_size)
    for tokens in prompts:
        slots = cache.token_to_kv_pool_allocator.alloc(len(tokens) // page_size * page_size)
        assert slots is not None
        existing = cache.insert(RadixKey(tokens), slots)
        cache.token_to_kv_pool_allocator.free(slots[:existing])
    return cache


def _find(cache: RadixCache, tokens: Sequence[int]) -> list[int]:
    """What the tree finds."""
    return cache.match_prefix(RadixKey(tokens)).device_indices.tolist()


def _random_tokens(rng: Random) -> list[int]:
    """Few kinds of tokens, so that much is shared."""
    return [rng.randrange(2) for _ in range(rng.randrange(12))]


def _node(tokens: tuple[int, ...], slots: list[int], parent: Node | None, children: dict, lock_ref: int) -> Node:
    return {"tokens": tokens, "slots": slots, "parent": parent, "children": children, "lock_ref": lock_ref}


def _plain(node: TreeNode, page_size: int, parent: Node | None = None) -> Node:
    """A node of the engine's tree and all below it as plain data."""
    plain = _node(tuple(decode(node.key)), node.value.tolist(), parent, {}, node.lock_ref)
    for child in node.children.values():
        below = _plain(child, page_size, plain)
        plain["children"][below["tokens"][:page_size]] = below
    return plain


def _nodes(root: Node) -> Iterator[Node]:
    for child in root["children"].values():
        yield child
        yield from _nodes(child)


def _paths(root: Node, before: tuple[tuple[int, int], ...] = ()) -> list[tuple[tuple[int, int], ...]]:
    """What the tree holds: tokens with their slots, from the root to each leaf."""
    here = before + tuple(zip(root["tokens"], root["slots"], strict=True))
    below = [path for child in root["children"].values() for path in _paths(child, here)]
    return sorted(below) or [here]


def _way(node: Node) -> list[tuple[int, int]]:
    """Tokens and slots from the root to a node, found by its parents."""
    way: list[tuple[int, int]] = []
    for _ in range(100):
        way = [*zip(node["tokens"], node["slots"], strict=True), *way]
        if node["parent"] is None:
            return way
        node = node["parent"]
    raise Mismatch("From a node upwards one never comes to the root: its parents form a circle.")


def _told(paths: Sequence[Sequence[tuple[int, int]]]) -> str:
    """A tree in words."""
    told = [" ".join(str(token) for token, _ in path) or "nothing" for path in paths]
    return " | ".join(told[:4]) + (" | ..." if len(told) > 4 else "")


# --- exercises: who goes first ----------------------------------------------------------------------------------------

Waiting = list[tuple[str, list[int]]]
WhoGoesFirst = Callable[[Waiting, Callable[[list[int]], int], int], tuple[list[str], list[str]]]


def policy_of(who_goes_first: WhoGoesFirst) -> type[SchedulePolicy]:
    """A part `schedule_policy` that asks a function of the reader's."""

    class Policy(SchedulePolicy):
        def calc_priority(self, waiting: Sequence[Req]) -> Order:
            arrived = sorted(waiting, key=lambda req: req.number)
            by_name = {req.rid: req for req in arrived}
            prompts = [(req.rid, req.key.token_ids(0, len(req.key))) for req in arrived]
            order, held_back = who_goes_first(prompts, self.cached, self.tree_cache.page_size)
            return Order([by_name[rid] for rid in order], [by_name[rid] for rid in held_back])

        def cached(self, tokens: list[int]) -> int:
            """How many of them a request may take from the cache now."""
            return len(self.tree_cache.match_prefix(RadixKey(tokens), len(tokens) - 1).device_indices)

    return Policy


A, B, C = ([digit] * 8 for digit in (1, 2, 3))
"""Two pages of 4 each; of these, `A` is in the cache."""
ROUNDS: tuple[tuple[str, dict[str, list[int]], tuple[list[str], list[str]], str], ...] = (
    ("strangers", {"b": [*B, 4], "c": [*C, 4]}, (["b", "c"], []), "Who finds equally much goes in order of arrival."),
    (
        "a hit among them",
        {"b": [*B, 4], "a": [*A, 4]},
        (["a", "b"], []),
        "Whoever finds most of its prompt goes first.",
    ),
    (
        "two hits",
        {"a1": [*A, 4], "b": [*B, 4], "a2": [*A, 5]},
        (["a1", "a2", "b"], []),
        "The one that finds most is first; what two of them share is cached already, so neither waits.",
    ),
    (
        "two with the same new prefix",
        {"b1": [*B, 4], "b2": [*B, 5]},
        (["b1"], ["b2"]),
        "'b1' computes what 'b2' would compute, too: 'b2' is held back for a round, and finds it then.",
    ),
    (
        "three with the same new prefix, and a hit",
        {"b1": [*B, 4], "b2": [*B, 5], "a": [*A, 4], "b3": [*B, 6]},
        (["a", "b1"], ["b2", "b3"]),
        "Of several with the same new prefix the first to arrive goes.",
    ),
    (
        "less than a page in common",
        {"b": [*B, 4], "d": [2, 2, 2, 9, 9, 9, 9]},
        (["b", "d"], []),
        "What they share is less than a page, so neither would find it.",
    ),
    (
        "a common prefix that goes on where the cache ends",
        {"a1": [*A, *C, 4], "a2": [*A, *C, 5], "a3": [*A, 6]},
        (["a1", "a3"], ["a2"]),
        "'a1' and 'a2' find 8 tokens and share 16: 'a2' finds more if it waits. 'a3' shares only what is there.",
    ),
    (
        "a prompt that is the beginning of another",
        {"long": [*B, *C], "short": [*B]},
        (["long"], ["short"]),
        "Of 'short' at most 7 tokens may come from the cache, which is one page: it is worth a round.",
    ),
    (
        "twins of one page",
        {"one": [2, 2, 2, 2], "two": [2, 2, 2, 2]},
        (["one", "two"], []),
        "The last token of a prompt is computed in any case, so 'two' would find no whole page.",
    ),
)
SHARED = {"a": [300 + i for i in range(96)], "b": [500 + i for i in range(96)]}
"""Two prefixes, of which a memory of `SMALL` tokens holds one."""
SMALL = 160


@grader("m4.who_goes_first")
def grade_who_goes_first(who_goes_first: WhoGoesFirst) -> str:
    """`who_goes_first(waiting, cached, page_size)`: the names in order, and the names of those that are held back."""
    for what, prompts, wanted, hint in ROUNDS:
        waiting = [(name, list(tokens)) for name, tokens in prompts.items()]
        got = who_goes_first(waiting, _cached_a, 4)
        if [(name, tokens) for name, tokens in prompts.items()] != waiting:
            raise Mismatch("who_goes_first() changes the list of those that wait.")
        if not (isinstance(got, tuple | list) and len(got) == 2 and all(isinstance(names, list) for names in got)):
            raise Mismatch(f"Two lists of names are wanted: those to run, those held back. You return {short(got)}.")
        order, held_back = map(list, got)
        if sorted(order + held_back) != sorted(prompts):
            raise Mismatch(
                f"{what}: each of {sorted(prompts)} must be named once; you name {short(order + held_back)}."
            )
        if (order, held_back) != wanted:
            raise Mismatch(
                f"{what}: {wanted[0]} run, {wanted[1] or 'none'} held back; you return {order} and "
                f"{held_back or 'none'}. {hint}"
            )
    tokens, computed = serve_two_kinds({"schedule_policy": policy_of(who_goes_first)})
    if tokens != _two_kinds_in_order():
        raise Mismatch("In the engine the tokens of a request have changed, or a request has not ended.")
    if computed > 2 * 104 + 10 * 8:
        raise Mismatch(f"In the engine {computed} tokens of prompts were computed; 288 are enough.")
    return f"{len(ROUNDS)} rounds by hand, and in the engine: {computed} tokens of prompts computed, and not 1,248."


def _cached_a(tokens: list[int]) -> int:
    """What a cache has in which `A` is all there is."""
    same = next((i for i, (one, other) in enumerate(zip(tokens, A, strict=False)) if one != other), len(A))
    return min(same, len(A), len(tokens) - 1) // 4 * 4


def serve_two_kinds(parts: Mapping[str, Any], policy: str = "fcfs") -> tuple[dict[str, tuple[int, ...]], int]:
    """Six requests of each kind by turns, one at a time, in a small memory: their tokens, and how much was computed."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLMEngine(
        cache_config=CacheConfig(page_size=8, max_total_tokens=SMALL, debug=True),
        scheduler_config=SchedulerConfig(max_num_seqs=1, schedule_policy=policy),  # type: ignore[arg-type]
        parts=dict(parts),
    ) as engine:
        for number in range(12):
            kind = "ab"[number % 2]
            engine.add_request(
                [*SHARED[kind], *(700 + 8 * number + i for i in range(8))], params, request_id=str(number)
            )
        finished = dict(run_steps(engine, limit=200))
        return finished, engine.stats().num_prompt_tokens


@functools.cache
def _two_kinds_in_order() -> dict[str, tuple[int, ...]]:
    return serve_two_kinds({})[0]


# --- exercises: a strategy --------------------------------------------------------------------------------------------

CAPACITIES = {
    16 * 1024: "Most of what is cached there was used once, and never again.",
    64 * 1024: "In this hour other tenants become busy: what was used often in the morning must be able to go.",
}


WATCHED = ("last_access_time", "creation_time", "hit_count", "priority", "id", "lock_ref")


@grader("m4.strategy")
def grade_strategy(strategy: EvictionStrategy) -> str:
    """`strategy(node)`: the rank of a leaf; the smallest goes first. Must find more than FIFO, with little and much."""
    hour = recorded_hour()
    watched = _watching(strategy)
    replay(hour[:150], 32 * 1024, watched, num_locked=3)
    found = []
    for size, hint in CAPACITIES.items():
        mine, first_out = replay(hour, size, strategy), _found_by("fifo", size)
        if mine <= first_out:
            raise Mismatch(
                f"With room for {size:,} tokens you find {mine:.1%} of the prompts' tokens, and FIFO {first_out:.1%}. "
                f"{hint}"
            )
        found.append(
            f"{mine:.1%} with room for {size:,} tokens (FIFO {first_out:.1%}, SLRU {_found_by('slru', size):.1%})"
        )
    return f"You find {' and '.join(found)}."


def _watching(strategy: EvictionStrategy) -> EvictionStrategy:
    """The same, unless it returns nothing or changes a node."""

    def rank_of(node: TreeNode) -> Any:
        before = [getattr(node, name) for name in WATCHED]
        rank = strategy(node)
        if rank is None:
            raise Mismatch("strategy() returns nothing: is a `return` missing?")
        if [getattr(node, name) for name in WATCHED] != before:
            raise Mismatch("strategy() changes the node. A strategy ranks nodes and changes nothing.")
        return rank

    return rank_of


@functools.cache
def _found_by(strategy: str, size: int) -> float:
    return replay(recorded_hour(), size, strategy)


# --- the labs ---------------------------------------------------------------------------------------------------------

HELPFUL = (
    "You are a helpful assistant. You answer questions about LLM inference in one short sentence, and you never invent "
    "anything."
)
ROOM, FCFS = 14 * 16, SchedulerConfig(schedule_policy="fcfs", schedule_conservativeness=0)
"""So little that a later request gets the freed pages; in order of arrival, no request is held back."""


@grader("m4.freed_while_mapped")
def grade_freed_while_mapped(cache_class: type[RadixCache]) -> str:
    """The lab's cache, repaired: requests read tokens that are in the tree there, and free their own slots."""
    wanted = _right_twins()
    for (step, right, _), (_, sizes, said) in zip(wanted, _twins(cache_class), strict=False):
        if sizes != right:
            raise Mismatch(f"After step {step} {_difference(sizes, right)}")
        last = said
    if last != wanted[-1][2]:
        raise Mismatch("The books are in order, but the answers of a request have changed.")
    return "Four requests, two and two with the same prompt: every page has one owner, and every answer is right."


@functools.cache
def _right_twins() -> list[tuple[int, tuple[int, int, int], dict[str, str]]]:
    return list(_twins(RadixCache))


def _twins(cache_class: type[RadixCache]) -> Iterator[tuple[int, tuple[int, int, int], dict[str, str]]]:
    """Two pairs of twins, the second of which finds a part of its prompt; after each step sizes and texts."""
    said: dict[str, str] = {}
    with LLMEngine(
        cache_config=CacheConfig(max_total_tokens=ROOM, debug=True),
        scheduler_config=FCFS,
        parts={"prefix_cache": cache_class},
    ) as engine:
        arrivals = {0: ("a", HELPFUL, "What is prefix caching?"), 3: ("b", HELPFUL, "What is eviction?")}
        for step in range(60):
            if step in arrivals:
                name, system, question = arrivals[step]
                prompt = engine.chat_prompt(
                    [{"role": "system", "content": system}, {"role": "user", "content": question}]
                )
                for number in (1, 2):
                    params = SamplingParams(max_tokens=20 if name == "a" else 8)
                    engine.add_request(prompt, params, request_id=f"{name}{number}")
            if not engine.has_unfinished_requests():
                break
            said |= _texts(engine, step + 1)
            _check_prefixes(engine)
            stats = engine.stats()
            yield step + 1, (stats.available_size, stats.evictable_size, stats.protected_size), dict(said)


AUDIT_HINTS = {
    "both free and mapped": "A row still names pages that were freed.",
    "are accounted for": "The rest is neither free nor in the tree nor in a row: duplicates that nobody has freed?",
    "are cached, but free": "Free the slots that the row named before it was written: now it names those of the tree.",
    "tokens are locked": "The lock of a request belongs where its cached tokens end.",
}
"""Words of the audit, and the mistake behind them in this lab."""


def _texts(engine: LLMEngine, step: int) -> dict[str, str]:
    """One step, audited."""
    try:
        outputs = engine.step()
    except AssertionError as error:
        what = str(error).splitlines()[0]
        why = next((f" {hint}" for words, hint in AUDIT_HINTS.items() if words in what), "")
        raise Mismatch(f"The audit fails after step {step}: {what}.{why}") from error
    for rid, output in outputs.items():
        if output.error is not None:
            raise Mismatch(f"The request {rid!r} failed: {output.error}")
    return {rid: output.text for rid, output in outputs.items()}


def _check_prefixes(engine: LLMEngine) -> None:
    """A request's `prefix_indices` are slots in its row, at least as far as the cache owns them."""
    for req in engine.engine_core.scheduler.running:
        assert req.req_pool_idx is not None and req.req_to_token_pool is not None
        row = req.req_to_token_pool.read(req.req_pool_idx, 0, len(req.prefix_indices))
        if len(row) < req.cache_protected_len or row.tolist() != req.prefix_indices.tolist():
            raise Mismatch(f"The prefix_indices of {req.rid!r} are not the slots in its row.")


def _difference(sizes: tuple[int, int, int], right: tuple[int, int, int]) -> str:
    names = ("free", "evictable", "protected")
    told = ", ".join(f"{size} {name} (should be {want})" for size, name, want in zip(sizes, names, right, strict=True))
    hint = (
        " What is cached and read by a running request must be locked: the lock moves to the end of what is cached."
        if sizes[2] < right[2]
        else " Its duplicates hold what the tree holds, and are not free."
        if sizes[0] < right[0]
        else " A lock was never taken back: `_move_lock` takes the new one and gives back the old one."
        if sizes[2] > right[2]
        else ""
    )
    return f"there are {told}.{hint}"


@grader("m4.whole_hit")
def grade_whole_hit(request_class: type[Req]) -> str:
    """The lab's request, repaired: of a prompt that is cached whole it computes what it must, and no more."""
    answers = tokens_alone(set(REPEATED), num=4)
    for page_size in (1, 4):
        memory = CacheConfig(page_size=page_size, max_total_tokens=512, debug=True)
        with LLMEngine(cache_config=memory, parts={"request": request_class}) as engine:
            for length in REPEATED:
                engine.flush_cache()
                _grade_repeated(engine, page_size, length, answers[length])
            _grade_rated(engine)
    return "Prompts that are cached whole, in pages of 1 and of 4: the right tokens, and one page computed at most."


REPEATED = (12, 13)
"""Tokens of the prompts: a whole number of pages, and one more."""


def _grade_repeated(engine: LLMEngine, page_size: int, length: int, answer: tuple[int, ...]) -> None:
    """The same prompt again, in one step with a prompt that no request has computed."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    outputs: dict[str, Any] = {"first": engine.generate(ids_of(length), params)}
    engine.add_request(ids_of(length), params, request_id="the second one")
    engine.add_request([700 + i for i in range(9)], params, request_id="other")
    while engine.has_unfinished_requests():
        outputs |= engine.step()
    what = f"A prompt of {length} tokens for the second time, pages of {page_size}"
    for output in outputs.values():
        if output.error is not None:
            ask = " How many tokens does it find, and how many has it?" * ("nothing is left" in str(output.error))
            raise Mismatch(f"{what}: {output.error}.{ask}")
    if outputs["first"].token_ids != answer or outputs["the second one"].token_ids != answer:
        raise Mismatch(f"{what}: its answer has changed.")
    wanted, got = (length - 1) // page_size * page_size, outputs["the second one"].metrics.cached_tokens
    if got != wanted:
        raise Mismatch(
            f"{what}: {wanted} may come from the cache, with you {got} do. Only the last token must be computed, and "
            f"the page that it lies in."
        )


def _grade_rated(engine: LLMEngine) -> None:
    """A prompt whose tokens are to be rated, not in the cache and in it."""
    params, prompt = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0), ids_of(24)
    rated = [engine.generate(prompt, params) for _ in range(2)]
    cold, hot = ([_values(each) for each in (output.prompt_logprobs or ()) if each is not None] for output in rated)
    if len(cold) != len(prompt) - 1 or cold != hot:
        raise Mismatch(
            "A request with prompt_logprobs needs the logits of every token of its prompt, so it may take nothing from "
            "the cache (`wants_prompt_logprobs`)."
        )


def _values(logprobs: Any) -> list[tuple[int, float]]:
    """Of one token: ids and rounded logprobs."""
    return [(token_id, round(float(value.logprob), 3)) for token_id, value in dict(logprobs).items()]
