"""Wrong answers to the exercises of m4, each with the words that its refusal must hold.

Most are the solution with a piece of its text changed.
"""

from itertools import count

import numpy as np

from m4_radix_cache.mem_cache.base_prefix_cache import BasePrefixCache
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.request import Req
from tests.notebooks.exercises import M4
from tests.notebooks.lessons import WrongAnswers

LESSON = M4.lesson
WRONG: WrongAnswers = {}

WHOLE_PAGES, HAS_MORE = "same -= same % page_size", 'if same < len(child["tokens"]):'
SAME_FIRST_TOKEN = 'next((one for page, one in node["children"].items() if page[:1] == rest[:1]), None)'
AT_LEAST_ONE = f"{WHOLE_PAGES}; same = max(same, page_size)"
changed = LESSON.solution("match")
WRONG["m4.match"] = [
    (changed(HAS_MORE, "if True:"), "go down as long as a child begins with the next whole page"),
    (changed(WHOLE_PAGES, 'same = len(child["tokens"])'), "A request may end within a node"),
    (changed(WHOLE_PAGES, "pass"), "Only whole pages count"),
    (
        changed("if ours != theirs:\n                break\n            same += 1", "same += ours == theirs"),
        "Behind the first token that differs nothing counts",
    ),
    (
        changed('node["children"].get(rest[:page_size])', SAME_FIRST_TOKEN, WHOLE_PAGES, AT_LEAST_ONE),
        "found by their whole first page",
    ),
    (changed("return slots", "return len(slots)"), "you say 8"),
    (changed("return slots", 'root["children"].clear()\n    return slots'), "match() has changed the tree"),
    (lambda *_: None, "you say None"),
]


def keep_the_head(node, num_tokens, page_size):
    tail = dict(node, tokens=node["tokens"][num_tokens:], slots=node["slots"][num_tokens:], parent=node)
    node["tokens"], node["slots"] = node["tokens"][:num_tokens], node["slots"][:num_tokens]
    node["children"] = {tail["tokens"][:page_size]: tail}
    return tail


NEW_PARENT = 'node["parent"] = upper'
REVERSED = 'if num_tokens < 4:\n        node["slots"].reverse()\n    return upper'
changed = LESSON.solution("split")
WRONG["m4.split"] = [
    (keep_the_head, "the old object keeps the tail"),
    (changed('"lock_ref": node["lock_ref"]', '"lock_ref": 0'), "Who reads the tail reads the head, too"),
    (changed(NEW_PARENT, f'{NEW_PARENT}; node["lock_ref"] = 0'), "Nobody has let go of it"),
    (changed('"children": {}', '"children": dict(node["children"])'), "is the new one's only child"),
    (changed('upper["children"][node["tokens"]', 'upper["children"][upper["tokens"]'), "found by its own first page"),
    (changed(NEW_PARENT, "pass"), "locks walk upwards"),
    (
        changed('["slots"][:num_tokens]', '["slots"][: num_tokens - 1]', '["slots"][num_', '["slots"][-1 + num_'),
        "Slots go with their tokens",
    ),
    (changed('parent["children"][upper["tokens"][:page_size]] = upper', ""), "takes the old one's place"),
    (changed("return upper", "return None"), "you return None"),
    (
        changed(
            'node["tokens"][:num_tokens],',
            'list(node["tokens"][:num_tokens]),',
            'upper["tokens"][',
            'tuple(upper["tokens"])[',
        ),
        "A tuple is wanted",
    ),
    (lambda node, num_tokens, page_size: node, "the old object keeps the tail"),
    (changed("return upper", REVERSED), "It must hold the same prefixes"),  # where it is tried at random
]

SORTED, RESULT = "ready.sort(key=lambda one: -one[2])", "return [name for name, _, _ in ready], held_back"
OVERLAPS = "any(in_common(tokens, others) > hit for _, others, _ in ready)"
changed = LESSON.solution("who_goes_first")
WRONG["m4.who_goes_first"] = [
    (changed(SORTED, "", OVERLAPS, "False"), "Whoever finds most of its prompt goes first"),
    (changed(SORTED, f"ready.reverse(); {SORTED}"), "Who finds equally much goes in order of arrival"),
    (changed(OVERLAPS, "False"), "'b1' computes what 'b2' would compute, too"),
    (changed("> hit for", "> 0 for"), "so neither waits"),
    (changed(" // page_size * page_size", ""), "less than a page"),
    (changed("len(tokens) - 1", "len(tokens)"), "The last token of a prompt is computed in any case"),
    (changed(RESULT, "return [name for name, _, _ in ready], []"), "must be named once"),
    (changed(RESULT, "return [name for name, _ in waiting]"), "Two lists of names are wanted"),
    (
        changed(RESULT, f"waiting.sort(key=lambda one: -cached(one[1]))\n    {RESULT}"),
        "changes the list of those that wait",
    ),
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


class KeepsItsOwn(RadixCache):
    """Shares nothing that a twin has already."""

    def cache_unfinished_req(self, req):
        found = self.match_prefix(req.key, req.kv_committed_len).device_indices
        if len(found) == req.cache_protected_len:
            BasePrefixCache.cache_unfinished_req(self, req)


FREED = "slots[own:existing]"
WRITTEN = "self.req_to_token_pool.write(req.req_pool_idx, own, match.device_indices[own:])"
OF_THE_ROW = "self.req_to_token_pool.read(req.req_pool_idx, own, existing)"
changed = LESSON.solution("FreesWhileMapped")
WRONG["m4.freed_while_mapped"] = [
    (
        LESSON.defined("FreesWhileMapped", {"RadixCache": RadixCache, "np": np}),
        "The audit fails after step 1: a page is both free and mapped",
    ),
    (changed(WRITTEN, ""), "a page is both free and mapped"),
    (changed(FREED, "slots[:0]"), "of 224 tokens are accounted for. The rest is neither free"),
    (changed(FREED, OF_THE_ROW), "now it names those of the tree"),
    (changed(FREED, "slots[:existing]"), "page 1 is not in use: it was freed already"),
    (
        changed("self._move_lock(req, match.last_device_node)", ""),
        "0 tokens are locked, and 64 are read. The lock of a request",
    ),
    (changed("req.cache_protected_len = whole", ""), "The audit fails after step 1"),
    (changed("req.prefix_indices =", "unused ="), "The prefix_indices of"),
    (KeepsItsOwn, "Its duplicates hold what the tree holds, and are not free"),
]


NOTHING_LEFT = "nothing is left to compute of the second one"
changed = LESSON.solution("TakesEverything")
WRONG["m4.whole_hit"] = [
    (LESSON.defined("TakesEverything", {"Req": Req}), f"{NOTHING_LEFT}: without a new token there are no logits"),
    (changed("self.seqlen - 1", "0"), "11 may come from the cache, with you 0 do"),
    (changed("self.seqlen - 1", "self.seqlen - 2"), "may come from the cache, with you 10 do"),
    (changed("self.seqlen - 1", "max(0, self.seqlen - 16)"), "Only the last token must be computed"),
    (changed("0 if self.wants_prompt_logprobs else ", ""), "needs the logits of every token of its"),
    (changed("self.seqlen - 1", "None"), NOTHING_LEFT),
]
