"""The graders of m4: typical wrong answers fail with a hint that names the mistake. Right ones: `test_lessons.py`."""

import ast
from itertools import count

import numpy as np
import pytest

from benchmarks.m4 import trace as m4_trace
from benchmarks.m4.caches import Server
from benchmarks.m4.eviction import prepared, replay as careful_replay
from benchmarks.m4.traffic import FILE, as_csv, generate, recorded
from m4_radix_cache import CacheConfig, ModelConfig, SchedulerConfig
from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.block_hash_cache import BlockHashCache
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.request import Req
from notebooks.checks_m4 import HOUR, check, recorded_hour, replay
from tests.notebooks.exercises import M4, assert_refused
from tests.notebooks.lessons import source

LESSON = M4.lesson
SOLUTIONS = LESSON.folded_solutions()


# --- match ------------------------------------------------------------------------------------------------------------


def matching(*, in_pages=True, by_page=True, levels=99, whole_node=False, beyond=False, as_slots=True):
    """`match` with a mistake in it."""

    def match(root, tokens, page_size):
        slots, node, rest = [], root, tuple(tokens)
        for _ in range(levels):
            children = node["children"]
            child = children.get(rest[:page_size])
            if not by_page and rest:
                child = next((child for page, child in children.items() if page[0] == rest[0]), None)
            if child is None:
                break
            equal = [one == other for one, other in zip(child["tokens"], rest, strict=False)]
            same = equal.index(False) if False in equal else len(equal)
            same = sum(equal) if beyond else same
            same -= same % page_size if in_pages else 0
            same = len(child["tokens"]) if whole_node else same if by_page else max(same, page_size)
            slots += child["slots"][:same]
            if same < len(child["tokens"]):
                break
            node, rest = child, rest[same:]
        return slots if as_slots else len(slots)

    return match


def whole_nodes_only(root, tokens, page_size):
    child = root["children"].get(tuple(tokens[:page_size]))
    if child is None or child["tokens"] != tuple(tokens[: len(child["tokens"])]):
        return []
    rest = tokens[len(child["tokens"]) :]
    return child["slots"] + whole_nodes_only(child, rest, page_size)


def match_that_splits(root, tokens, page_size):
    found = SOLUTIONS["match"](root, tokens, page_size)
    child = root["children"].get(tuple(tokens[:page_size]))
    if child is not None:
        del child["slots"][len(found) :]
        child["tokens"] = child["tokens"][: len(child["slots"])]
    return found


WRONG_MATCHES = [
    (matching(levels=1), "go down as long as something is found"),
    (whole_nodes_only, "A request may end within a node"),
    (matching(whole_node=True), "A request may end within a node"),
    (matching(in_pages=False), "Only whole pages count"),
    (matching(beyond=True), "Behind the first token that differs nothing counts"),
    (matching(by_page=False), "found by their whole first page"),
    (matching(as_slots=False), "you say 8"),
    (match_that_splits, "match() has changed the tree"),
    (lambda *_: None, "you say None"),
]


def test_the_match_that_the_wrong_ones_vary_is_right():
    assert check("m4.match", matching())


@pytest.mark.parametrize(("answer", "hint"), WRONG_MATCHES)
def test_a_wrong_match_is_met_with_what_it_overlooks(answer, hint):
    assert_refused("m4.match", answer, hint)


# --- split ------------------------------------------------------------------------------------------------------------


def splitting(mistake):
    """`split` with something done to the two nodes afterwards."""

    def split(node, num_tokens, page_size):
        parent, below = node["parent"], dict(node["children"])
        upper = SOLUTIONS["split"](node, num_tokens, page_size)
        mistake(node, upper, parent, below)
        return upper

    return split


def keep_the_head(node, num_tokens, page_size):
    tail = dict(node, tokens=node["tokens"][num_tokens:], slots=node["slots"][num_tokens:], parent=node)
    node["tokens"], node["slots"] = node["tokens"][:num_tokens], node["slots"][:num_tokens]
    node["children"] = {tail["tokens"][:page_size]: tail}
    return tail


def take_the_children_along(node, upper, parent, below):
    upper["children"] |= below
    node["children"] = {}


def keep_the_old_edge(node, upper, parent, below):
    upper["children"] = {upper["tokens"][: len(next(iter(upper["children"])))]: node}


def forget(name):
    def mistake(node, upper, parent, below):
        node[name] = parent

    return mistake


def set_locks(upper_locks, node_locks):
    def mistake(node, upper, parent, below):
        upper["lock_ref"], node["lock_ref"] = upper_locks, node_locks

    return mistake


def cut_slots_elsewhere(node, upper, parent, below):
    upper["slots"], node["slots"] = upper["slots"][:-1], [upper["slots"][-1], *node["slots"]]


def stay_in_place(node, upper, parent, below):
    parent["children"] = {page: node if child is upper else child for page, child in parent["children"].items()}


WRONG_SPLITS = [
    (keep_the_head, "the old object keeps the tail"),
    (splitting(set_locks(0, 2)), "Who reads the tail reads the head, too"),
    (splitting(set_locks(2, 0)), "Nobody has let go of it"),
    (splitting(set_locks(1, 1)), "Who reads the tail reads the head, too"),
    (splitting(take_the_children_along), "is the new one's only child"),
    (splitting(keep_the_old_edge), "found by its own first page"),
    (splitting(forget("parent")), "locks walk upwards"),
    (splitting(cut_slots_elsewhere), "Slots go with their tokens"),
    (splitting(stay_in_place), "takes the old one's place"),
    (lambda node, num_tokens, page_size: SOLUTIONS["split"](node, num_tokens, page_size) and None, "you return None"),
    (lambda node, num_tokens, page_size: node, "the old object keeps the tail"),
]


@pytest.mark.parametrize(("answer", "hint"), WRONG_SPLITS)
def test_a_wrong_split_is_met_with_whom_it_hurts(answer, hint):
    assert_refused("m4.split", answer, hint)


def test_a_split_that_is_right_by_hand_is_also_tried_at_random():
    def only_for_that_node(node, num_tokens, page_size):
        upper = SOLUTIONS["split"](node, num_tokens, page_size)
        if num_tokens < 4:
            node["slots"].reverse()
        return upper

    assert_refused("m4.split", only_for_that_node, "It must hold the same prefixes")


# --- who goes first ---------------------------------------------------------------------------------------------------


def going(*, sort=True, hold=True, in_pages=True, last=1, over_hit=True, newest_first=False, most_last=False):
    """`who_goes_first` with a mistake in it."""

    def who_goes_first(waiting, cached, page_size):
        def in_common(tokens, others):
            equal = [one == other for one, other in zip(tokens, others, strict=False)]
            same = equal.index(False) if False in equal else len(equal)
            return min(same, len(tokens) - last) // (page_size if in_pages else 1) * (page_size if in_pages else 1)

        ready, held_back = [], []
        for name, tokens in waiting:
            hit = cached(tokens)
            if hold and any(in_common(tokens, others) > (hit if over_hit else 0) for _, others, _ in ready):
                held_back.append(name)
            else:
                ready.append((name, tokens, hit))
        if newest_first:
            ready.reverse()
        if sort:
            ready.sort(key=lambda one: one[2] if most_last else -one[2])
        return [name for name, _, _ in ready], held_back

    return who_goes_first


def going_without(waiting, cached, page_size):
    return SOLUTIONS["who_goes_first"](waiting, cached, page_size)[0], []


def going_through_the_list(waiting, cached, page_size):
    order, held_back = SOLUTIONS["who_goes_first"](list(waiting), cached, page_size)
    waiting.sort(key=lambda one: -cached(one[1]))
    return order, held_back


WRONG_ORDERS = [
    (going(sort=False, hold=False), "Whoever finds most of its prompt goes first"),
    (going(most_last=True), "Whoever finds most of its prompt goes first"),
    (going(newest_first=True), "Who finds equally much goes in order of arrival"),
    (going(hold=False), "'b1' computes what 'b2' would compute, too"),
    (going(over_hit=False), "so neither waits"),
    (going(in_pages=False), "less than a page"),
    (going(last=0), "The last token of a prompt is computed in any case"),
    (going_without, "must be named once"),
    (lambda waiting, cached, page_size: [name for name, _ in waiting], "Two lists of names are wanted"),
    (going_through_the_list, "changes the list of those that wait"),
]


def test_the_order_that_the_wrong_ones_vary_is_right():
    assert check("m4.who_goes_first", going())


@pytest.mark.parametrize(("answer", "hint"), WRONG_ORDERS)
def test_a_wrong_order_is_met_with_who_loses_by_it(answer, hint):
    assert_refused("m4.who_goes_first", answer, hint)


# --- a strategy -------------------------------------------------------------------------------------------------------

TICKS = count()
WRONG_STRATEGIES = [
    (STRATEGIES["lru"], "Most of what is cached there was used once"),
    (STRATEGIES["lfu"], "what was used often in the morning must be able to go"),
    (STRATEGIES["fifo"], "26.8% of the prompts' tokens, and FIFO 26.8%"),
    (STRATEGIES["priority"], "With room for 16,384 tokens you find 18.9%"),
    (lambda node: -node.last_access_time, "With room for 16,384 tokens"),
    (lambda node: next(TICKS), "A rank has changed while its node stood in the heap"),
    (lambda node: node.hits, "AttributeError"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("answer", "hint"), WRONG_STRATEGIES)
def test_a_strategy_that_is_no_better_is_met_with_what_it_keeps(answer, hint):
    assert_refused("m4.strategy", answer, hint)


def test_the_recorded_day_is_the_one_that_the_generator_draws():
    assert FILE.read_text(encoding="utf-8") == as_csv(generate())


@pytest.mark.parametrize(("policy", "capacity"), [("slru", 16 * 1024), ("lru", 64 * 1024)])
def test_the_hour_of_the_notebook_is_an_hour_of_the_recorded_day(policy, capacity):
    hour = prepared(recorded()[HOUR])
    wanted = careful_replay(Server(RadixCache, num_tokens=capacity, page_size=16, policy=policy), hour).all
    assert replay(recorded_hour(), capacity, policy) == wanted


def test_both_designs_replay_the_same_hour():
    hour = recorded_hour()[:100]
    room = sum(len(key) for key, _, _ in hour)
    assert replay(hour, room // 16 * 16) == replay(hour, room // 16 * 16, cache_class=BlockHashCache)


# --- the labs ---------------------------------------------------------------------------------------------------------


def test_the_planted_cache_is_caught_by_the_audit_when_a_mapped_page_is_freed():
    planted = LESSON.defined("FreesWhileMapped", {"RadixCache": RadixCache, "np": np})
    assert_refused("m4.freed_while_mapped", planted, "The audit fails after step 1: a page is both free and mapped")


def caching(*, write=True, free="own", lock=True, prefix=True, protect=True):
    """The lab's cache, repaired in part: which slots are freed, and what else is done."""

    class Cache(RadixCache):
        def cache_unfinished_req(self, req):
            row, own = req.req_pool_idx, req.cache_protected_len
            slots = self.req_to_token_pool.read(row, 0, req.kv_committed_len)
            whole = len(slots) // self.page_size * self.page_size
            existing = self.insert(req.key, slots[:whole], req.priority)
            match = self.match_prefix(req.key, whole)
            if write:
                self.req_to_token_pool.write(row, own, match.device_indices[own:])
            freed = {
                "own": slots[own:existing],
                "all": slots[:existing],
                "the row's": self.req_to_token_pool.read(row, own, existing),
                "nothing": slots[:0],
            }
            self.token_to_kv_pool_allocator.free(freed[free])
            if lock:
                self._move_lock(req, match.last_device_node)
            if prefix:
                req.prefix_indices = np.concatenate((match.device_indices, slots[whole:]))
            if protect:
                req.cache_protected_len = whole

    return Cache


class KeepsItsOwn(RadixCache):
    """Shares nothing that a twin has already."""

    def cache_unfinished_req(self, req):
        found = self.match_prefix(req.key, req.kv_committed_len).device_indices
        if len(found) == req.cache_protected_len:
            BasePrefixCache.cache_unfinished_req(self, req)


WRONG_CACHES = [
    (caching(write=False), "a page is both free and mapped"),
    (caching(free="nothing"), "of 224 tokens are accounted for"),
    (caching(free="the row's"), "The audit fails after step 1"),
    (caching(free="all"), "page 1 is not in use: it was freed already"),
    (caching(lock=False), "0 tokens are locked, and 64 are read"),
    (caching(protect=False), "The audit fails after step 1"),
    (caching(prefix=False), "The prefix_indices of"),
    (KeepsItsOwn, "Its duplicates hold what the tree holds, and are not free"),
]


def test_the_cache_that_the_wrong_ones_vary_is_right():
    assert check("m4.freed_while_mapped", caching())


@pytest.mark.sample(2)
@pytest.mark.parametrize(("answer", "hint"), WRONG_CACHES)
def test_a_half_repaired_cache_is_met_with_what_it_does(answer, hint):
    assert_refused("m4.freed_while_mapped", answer, hint)


def test_the_planted_request_is_refused_by_the_engine_in_words():
    planted = LESSON.defined("TakesEverything", {"Req": Req})
    assert_refused(
        "m4.whole_hit", planted, "nothing is left to compute of again: without a new token there are no logits"
    )


def limited(limit):
    return type("Limited", (Req,), {"match_limit": property(limit)})


WRONG_LIMITS = [
    (limited(lambda self: 0), "11 may come from the cache, with you 0 do"),
    (limited(lambda self: self.seqlen - 2), "11 may come from the cache, with you 10 do"),
    (limited(lambda self: max(0, self.seqlen - 16)), "Only the last token must be computed"),
    (limited(lambda self: self.seqlen - 1), "needs the logits of every token of its prompt"),
    (limited(lambda self: None), "nothing is left to compute of again"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("answer", "hint"), WRONG_LIMITS)
def test_a_wrong_limit_is_met_with_what_may_be_found(answer, hint):
    assert_refused("m4.whole_hit", answer, hint)


# --- the notebook and the page ----------------------------------------------------------------------------------------


def test_the_notebook_traces_the_requests_of_the_page():
    (cell,) = [source(cell) for cell in LESSON.cells("code") if "TURNS = (" in source(cell)]
    assignments = [node for node in ast.parse(cell).body if isinstance(node, ast.Assign)][:4]
    names = {each.__name__: each for each in (ModelConfig, CacheConfig, SchedulerConfig)}
    exec(compile(ast.Module(assignments, type_ignores=[]), "cell", "exec"), names)
    for name in ("SYSTEM", "TURNS", "MODEL", "MEMORY", "LIMITS"):
        assert names[name] == getattr(m4_trace, name), name
    assert "SamplingParams(max_tokens=3, ignore_eos=True)" in cell
    assert (m4_trace.PARAMS.max_tokens, m4_trace.PARAMS.ignore_eos) == (3, True)
