"""Wrong answers to the exercises of m4, each with the words that its refusal must hold, and right variants."""

from itertools import count

import numpy as np

from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.request import Req
from tests.notebooks.exercises import M4
from tests.notebooks.lessons import RightAnswers, WrongAnswers, variant

LESSON = M4.lesson
SOLUTIONS = LESSON.folded_solutions()
WRONG: WrongAnswers = {}
RIGHT: RightAnswers = []


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


def match_that_splits(root, tokens, page_size):
    found = SOLUTIONS["match"](root, tokens, page_size)
    child = root["children"].get(tuple(tokens[:page_size]))
    if child is not None:
        del child["slots"][len(found) :]
        child["tokens"] = child["tokens"][: len(child["slots"])]
    return found


RIGHT += [("m4.match", matching())]
WRONG["m4.match"] = [
    (matching(levels=1), "go down as long as something is found"),
    (matching(whole_node=True), "A request may end within a node"),
    (matching(in_pages=False), "Only whole pages count"),
    (matching(beyond=True), "Behind the first token that differs nothing counts"),
    (matching(by_page=False), "found by their whole first page"),
    (matching(as_slots=False), "you say 8"),
    (match_that_splits, "match() has changed the tree"),
    (lambda *_: None, "you say None"),
]


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


def only_for_that_node(node, num_tokens, page_size):
    """Right by hand, and wrong where it is tried at random."""
    upper = SOLUTIONS["split"](node, num_tokens, page_size)
    if num_tokens < 4:
        node["slots"].reverse()
    return upper


WRONG["m4.split"] = [
    (keep_the_head, "the old object keeps the tail"),
    (splitting(set_locks(0, 2)), "Who reads the tail reads the head, too"),
    (splitting(set_locks(2, 0)), "Nobody has let go of it"),
    (splitting(take_the_children_along), "is the new one's only child"),
    (splitting(keep_the_old_edge), "found by its own first page"),
    (splitting(forget("parent")), "locks walk upwards"),
    (splitting(cut_slots_elsewhere), "Slots go with their tokens"),
    (splitting(stay_in_place), "takes the old one's place"),
    (lambda node, num_tokens, page_size: SOLUTIONS["split"](node, num_tokens, page_size) and None, "you return None"),
    (lambda node, num_tokens, page_size: node, "the old object keeps the tail"),
    (only_for_that_node, "It must hold the same prefixes"),
]


def going(*, sort=True, hold=True, in_pages=True, last=1, over_hit=True, newest_first=False):
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
            ready.sort(key=lambda one: -one[2])
        return [name for name, _, _ in ready], held_back

    return who_goes_first


def going_without(waiting, cached, page_size):
    return SOLUTIONS["who_goes_first"](waiting, cached, page_size)[0], []


def going_through_the_list(waiting, cached, page_size):
    order, held_back = SOLUTIONS["who_goes_first"](list(waiting), cached, page_size)
    waiting.sort(key=lambda one: -cached(one[1]))
    return order, held_back


RIGHT += [("m4.who_goes_first", going())]
WRONG["m4.who_goes_first"] = [
    (going(sort=False, hold=False), "Whoever finds most of its prompt goes first"),
    (going(newest_first=True), "Who finds equally much goes in order of arrival"),
    (going(hold=False), "'b1' computes what 'b2' would compute, too"),
    (going(over_hit=False), "so neither waits"),
    (going(in_pages=False), "less than a page"),
    (going(last=0), "The last token of a prompt is computed in any case"),
    (going_without, "must be named once"),
    (lambda waiting, cached, page_size: [name for name, _ in waiting], "Two lists of names are wanted"),
    (going_through_the_list, "changes the list of those that wait"),
]


TICKS = count()
WRONG["m4.strategy"] = [
    (STRATEGIES["lru"], "Most of what is cached there was used once"),
    (STRATEGIES["lfu"], "what was used often in the morning must be able to go"),
    (STRATEGIES["fifo"], "26.8% of the prompts' tokens, and FIFO 26.8%"),
    (STRATEGIES["priority"], "With room for 16,384 tokens you find 18.9%"),
    (lambda node: -node.last_access_time, "With room for 16,384 tokens"),
    (lambda node: next(TICKS), "A rank has changed while its node stood in the heap"),
    (lambda node: node.hits, "AttributeError"),
]


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


RIGHT += [("m4.freed_while_mapped", caching())]
WRONG["m4.freed_while_mapped"] = [
    (
        LESSON.defined("FreesWhileMapped", {"RadixCache": RadixCache, "np": np}),
        "The audit fails after step 1: a page is both free and mapped",
    ),
    (caching(write=False), "a page is both free and mapped"),
    (caching(free="nothing"), "of 224 tokens are accounted for"),
    (caching(free="the row's"), "The audit fails after step 1"),
    (caching(free="all"), "page 1 is not in use: it was freed already"),
    (caching(lock=False), "0 tokens are locked, and 64 are read"),
    (caching(protect=False), "The audit fails after step 1"),
    (caching(prefix=False), "The prefix_indices of"),
    (KeepsItsOwn, "Its duplicates hold what the tree holds, and are not free"),
]


WRONG["m4.whole_hit"] = [
    (
        LESSON.defined("TakesEverything", {"Req": Req}),
        "nothing is left to compute of again: without a new token there are no logits",
    ),
    (variant(Req, match_limit=property(lambda self: 0)), "11 may come from the cache, with you 0 do"),
    (variant(Req, match_limit=property(lambda self: self.seqlen - 2)), "11 may come from the cache, with you 10 do"),
    (variant(Req, match_limit=property(lambda self: max(0, self.seqlen - 16))), "Only the last token must be computed"),
    (variant(Req, match_limit=property(lambda self: self.seqlen - 1)), "needs the logits of every token of its prompt"),
    (variant(Req, match_limit=property(lambda self: None)), "nothing is left to compute of again"),
]
