"""The graders of m3: typical wrong answers fail with a hint that names the mistake. Right ones: `test_lessons.py`."""

import pytest
import torch

from benchmarks.m3.trace import REQUESTS
from m3_paged_attention.block_pool import BlockPool
from m3_paged_attention.preemption import FewestOutputsFirst
from notebooks.checks_m3 import check
from tests.notebooks.exercises import M3, assert_refused

LESSON = M3.lesson


# --- wrong answers ----------------------------------------------------------------------------------------------------


def slots_by(place, first=None):
    """`slots` with a mistake in it: where a position is said to lie, and where the new tokens begin."""

    def slots(block_table, block_size, start, num_tokens):
        begin = start if first is None else first
        return [place(block_table, block_size, position) for position in range(begin, begin + num_tokens)]

    return slots


WRONG_SLOTS = [
    (slots_by(lambda table, size, position: position), "as if the blocks lay in order"),
    (slots_by(lambda table, size, p: table[p // size] * size + p % size, first=0), "not at position 0"),
    (slots_by(lambda table, size, position: table[position // size] * size + position), "Inside the block only"),
    (slots_by(lambda table, size, p: (table[p // size] - 1) * size + p % size), "block 1 begins at slot block_size"),
    (slots_by(lambda table, size, position: table[0] * size + position), "need not be neighbours"),
    (slots_by(lambda table, size, p: table[(p - 1) // size] * size + (p - 1) % size), "you say [144]"),
    (lambda *_: [], "you say []"),
]


@pytest.mark.parametrize(("answer", "hint"), WRONG_SLOTS)
def test_a_wrong_place_of_a_token_is_met_with_what_it_overlooks(answer, hint):
    assert_refused("m3.slots", answer, hint)


def joined_with(*, weigh=torch.exp, safe=True, masked=True, guarded=True):
    """`join` with a mistake in it."""

    def join(out_a, lse_a, out_b, lse_b):
        peak = torch.maximum(lse_a, lse_b) if safe else torch.zeros_like(lse_a)
        if guarded:
            peak = torch.where(peak > -torch.inf, peak, 0.0)
        weights = [weigh(lse - peak) for lse in (lse_a, lse_b)]
        parts = [weight[:, None] * out for weight, out in zip(weights, (out_a, out_b), strict=True)]
        if masked:
            parts = [part.where(w[:, None] > 0, 0.0) for part, w in zip(parts, weights, strict=True)]
        total = sum(weights)
        return sum(parts) / torch.where(total > 0, total, 1.0)[:, None], peak + total.log()

    return join


WRONG_JOINS = [
    (lambda out_a, lse_a, out_b, lse_b: ((out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)), "weight of all its"),
    (lambda out_a, lse_a, out_b, lse_b: (out_a + out_b, lse_a + lse_b), "weight of all its positions"),
    (joined_with(weigh=lambda lse: lse), "weight of all its positions"),
    (joined_with(safe=False), "take the larger lse away first"),
    (joined_with(masked=False), "not even 0 times what is there may count"),
    (joined_with(guarded=False), "-inf - -inf is NaN"),
    (lambda out_a, lse_a, out_b, lse_b: out_a, "Two tensors are wanted"),
    (lambda out_a, lse_a, out_b, lse_b: (out_a, lse_a[:, None]), "the output is not that of the softmax of the whole"),
    (lambda out_a, lse_a, out_b, lse_b: (out_a[0], lse_a), "should be [3, 4], yours is [4]"),
]


def test_the_join_that_the_wrong_ones_vary_is_right():
    assert check("m3.join", joined_with())


@pytest.mark.parametrize(("answer", "hint"), WRONG_JOINS)
def test_a_wrong_join_is_met_with_what_goes_wrong(answer, hint):
    assert_refused("m3.join", answer, hint)


def blocks(**methods):
    """The folded block manager with some methods replaced."""
    return type("Variant", (LESSON.folded_solutions()["SharedBlocks"],), methods)


def start_one_block_more(self, request, num_tokens):
    self.tables[request] = [self.take() for _ in range(num_tokens // self.block_size + 1)]
    self.lengths[request] = num_tokens


def fork_a_copy(self, parent, child):
    self.tables[child] = [self.take() for _ in self.tables[parent]]
    self.lengths[child] = self.lengths[parent]


def fork_the_same_list(self, parent, child):
    self.tables[child] = self.tables[parent]
    self.lengths[child] = self.lengths[parent]
    for block in self.tables[child]:
        self.holders[block] += 1


def append_without_a_copy(self, request):
    table, index = self.tables[request], self.lengths[request] // self.block_size
    self.lengths[request] += 1
    if index == len(table):
        table.append(self.take())


def append_that_copies(frees=False, always=False, forgets=False):
    """`append` that frees the old block outright, copies for the last holder too, or never lets go of the old one."""

    def append(self, request):
        table, index = self.tables[request], self.lengths[request] // self.block_size
        self.lengths[request] += 1
        if index == len(table):
            table.append(self.take())
        elif self.holders[table[index]] > 1 or always:
            old, table[index] = table[index], self.take()
            if frees:
                self.free_blocks.append(old)
            elif not forgets:
                self.let_go(old)
            return old, table[index]
        return None

    return append


def release_for_all(self, request):
    self.free_blocks += self.tables.pop(request)
    del self.lengths[request]


WRONG_BLOCKS = [
    ({"start": start_one_block_more}, "should be free"),
    ({"fork": fork_a_copy}, "A fork takes no block"),
    ({"fork": fork_the_same_list}, "Only the table of the writer changes"),
    ({"append": append_without_a_copy}, "'a' gets a block of its own"),
    ({"append": append_that_copies(frees=True)}, "still belongs to the others"),
    ({"append": append_that_copies(always=True)}, "it writes in place"),
    ({"append": append_that_copies(forgets=True)}, "it writes in place"),
    ({"release": release_for_all}, "the other one is still held by 'b'"),
    ({"release": lambda self, request: None}, "Its own block is free again"),
]


@pytest.mark.parametrize(("methods", "hint"), WRONG_BLOCKS)
def test_a_wrong_block_manager_is_met_with_a_hint(methods, hint):
    assert_refused("m3.shared_blocks", blocks(**methods), hint)


def test_a_block_manager_that_is_right_by_hand_is_also_tried_at_random():
    def take_the_oldest_twice(self):
        block = self.free_blocks.pop()
        self.holders[block] = 1
        if self.num_free == 2:
            self.free_blocks.append(block)
        return block

    verdict = check("m3.shared_blocks", blocks(take=take_the_oldest_twice))
    assert not verdict
    assert verdict.message.startswith("After ")


def victim(choose):
    return type("Policy", (FewestOutputsFirst,), {"choose_victim": lambda self, running: choose(running)})


WRONG_POLICIES = [
    (FewestOutputsFirst, "That one has the fewest outputs"),
    (victim(lambda running: running[-1]), "The last of the list was admitted last"),
    (victim(lambda running: min(running, key=lambda request: request.number)), "you choose 'first'"),
    (victim(lambda running: running.pop()), "changes the list of running requests"),
    (victim(lambda running: None), "you choose None"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("answer", "hint"), WRONG_POLICIES)
def test_a_wrong_victim_is_met_with_whom_it_takes(answer, hint):
    assert_refused("m3.newest_first", answer, hint)


# --- the lab ----------------------------------------------------------------------------------------------------------


def test_the_planted_pool_is_caught_by_the_books_when_a_shared_block_is_freed():
    assert_refused(
        "m3.freed_block",
        LESSON.defined("FreesByToken", {"BlockPool": BlockPool}),
        "check_invariants() fails after step 2: counted",
    )


def pool(free):
    return type("Pool", (BlockPool,), {"free": free})


def keep_what_was_shared(self, block_ids):
    """Never frees a block that more than one has held."""
    freed = [block_id for block_id in block_ids if self._ref_counts[block_id] == 1]
    for block_id in freed:
        del self._ref_counts[block_id]
        self._free.append(block_id)
    return freed


def count_and_never_free(self, block_ids):
    for block_id in block_ids:
        self._ref_counts[block_id] -= 1
    return []


def free_in_silence(self, block_ids):
    return BlockPool.free(self, [block_id for block_id in block_ids if self.ref_count(block_id)])


def tell_all(self, block_ids):
    BlockPool.free(self, block_ids)
    return list(block_ids)


WRONG_POOLS = [
    (keep_what_was_shared, "check_invariants() fails after step 2"),
    (count_and_never_free, "check_invariants() fails after step"),
    (free_in_silence, "A block that nobody holds was freed once more"),
    (tell_all, "after one free() they are still in use"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("free", "hint"), WRONG_POOLS)
def test_a_half_repaired_pool_is_met_with_what_it_does(free, hint):
    assert_refused("m3.freed_block", pool(free), hint)


# --- the notebook and the page ----------------------------------------------------------------------------------------


def test_the_notebook_traces_the_requests_of_the_page():
    code = LESSON.code()
    assert all(prompt in code for prompt, _ in REQUESTS.values())
