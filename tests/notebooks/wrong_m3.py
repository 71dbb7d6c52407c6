"""Wrong answers to the exercises of m3, each with the words that its refusal must hold.

Most are the solution with a piece of its text changed.
"""

import torch

from m3_paged_attention.block_pool import BlockPool
from m3_paged_attention.models.qwen3_moe import SparseMLP
from m3_paged_attention.preemption import FewestOutputsFirst
from tests.notebooks.exercises import M3
from tests.notebooks.lessons import WrongAnswers

LESSON = M3.lesson
WRONG: WrongAnswers = {}

SLOT = "block_table[p // block_size] * block_size + p % block_size"
changed = LESSON.solution("slots")
WRONG["m3.slots"] = [
    (changed(SLOT, "p"), "as if the blocks lay in order"),
    (changed("range(start, start + num_tokens)", "range(num_tokens)"), "not at position 0"),
    (changed("p % block_size", "p"), "Inside the block only"),
    (changed("block_table[p // block_size]", "(block_table[p // block_size] - 1)"), "block 1 begins at slot"),
    (changed(SLOT, "block_table[0] * block_size + p"), "need not be neighbours"),
    (changed("range(start, start + num_tokens)", "range(start - 1, start + num_tokens - 1)"), "you say [144]"),
    (lambda *_: [], "you say []"),
]

RESULT = "return out, peak + total.log()"
changed = LESSON.solution("join")
WRONG["m3.join"] = [
    (changed(RESULT, "return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)"), "weight of all its"),
    (changed(RESULT, "return out_a + out_b, lse_a + lse_b"), "weight of all its positions"),
    (changed(".exp()", ""), "weight of all its positions"),
    (changed("torch.maximum(lse_a, lse_b)", "torch.zeros_like(lse_a)"), "take the larger lse away first"),
    (changed("[:, None] > 0,", "[:, None] > -1,"), "not even 0 times what is there may count"),
    (changed("torch.where(peak > -torch.inf, peak, 0.0)", "peak"), "-inf - -inf is NaN"),
    (changed(RESULT, "return out_a"), "Two tensors are wanted"),
    (changed(RESULT, "return out_a, lse_a[:, None]"), "is not that of the softmax of the whole"),
    (changed(RESULT, "return out_a[0], lse_a"), "should be [3, 4], yours is [4]"),
]

IS_SHARED = "elif self.holders[table[index]] > 1:"
RELEASED = "for block in self.tables.pop(request):\n            self.let_go(block)"
TAKEN = "self.holders[block] = 1"
changed = LESSON.solution("SharedBlocks")
WRONG["m3.shared_blocks"] = [
    (changed("-(-num_tokens // self.block_size)", "num_tokens // self.block_size + 1"), "should be free"),
    (changed("list(self.tables[parent])", "[self.take() for _ in self.tables[parent]]"), "A fork takes no block"),
    (changed("list(self.tables[parent])", "self.tables[parent]"), "Only the table of the writer changes"),
    (changed(IS_SHARED, "elif False:"), "'a' gets a block of its own"),
    (changed("self.let_go(old)", "self.free_blocks.append(old)"), "still belongs to the others"),
    (changed(IS_SHARED, "else:"), "it writes in place"),
    (changed("self.let_go(old)", "pass"), "it writes in place"),
    (changed(RELEASED, "self.free_blocks += self.tables.pop(request)"), "the other one is still held by 'b'"),
    (changed(RELEASED, "return"), "Its own block is free again"),
    (  # right by hand, and wrong where it is tried at random
        changed(TAKEN, f"{TAKEN}\n        self.free_blocks += [block] * (self.num_free == 2)"),
        "After ",
    ),
]

VICTIM = "max(running, key=lambda request: request.number)"
changed = LESSON.solution("NewestFirst")
WRONG["m3.newest_first"] = [
    (FewestOutputsFirst, "That one has the fewest outputs"),
    (changed(VICTIM, "running[-1]"), "The last of the list was admitted last"),
    (changed("max(", "min("), "you choose 'first'"),
    (changed(VICTIM, "running.pop()"), "changes the list of running requests"),
    (changed(VICTIM, "None"), "you choose None"),
]

ONE_HOLDER_LESS = "self._ref_counts[block_id] -= 1  # one holder less\n            if self._ref_counts[block_id] == 0:"
changed = LESSON.solution("FreesByToken")
WRONG["m3.freed_block"] = [
    (LESSON.defined("FreesByToken", {"BlockPool": BlockPool}), "check_invariants() fails after step 2: counted"),
    (changed(ONE_HOLDER_LESS, "if self._ref_counts[block_id] == 1:"), "check_invariants() fails after step 2"),
    (
        changed('raise ValueError(f"block {block_id} is not in use")', "continue"),
        "A block that nobody holds was freed once more",
    ),
    (changed("return freed", "return list(block_ids)"), "after one free() they are still in use"),
]

changed = LESSON.solution("HastyMLP")
DIVIDED = "weights / weights.sum(-1, keepdim=True)"
WRONG["m3.router"] = [
    (LESSON.defined("HastyMLP", {"SparseMLP": SparseMLP, "torch": torch}), "In which precision do you divide"),
    (changed(DIVIDED, "weights.to(logits.dtype) / weights.sum(-1, keepdim=True)"), "In which precision do you divide"),
    (changed("self.normalizes", "False"), "of the weights are others"),
    (changed("if self.normalizes", "if True"), "divided by their sum only if self.normalizes"),
    (changed("dtype=torch.float32", "dtype=logits.dtype"), "Are the probabilities float32"),
    (changed("return experts, weights.to(logits.dtype)", "return experts, weights"), "in the precision of the logits"),
    (changed(DIVIDED, f"({DIVIDED}).flip(-1)"), "of the weights are others"),
    (changed("torch.softmax(logits, -1, dtype=torch.float32)", "-logits.float()"), "other experts than the 2"),
    (changed("return experts, weights", "return weights, experts"), "other experts than the 2"),
]

changed = LESSON.solution("experts_of")
WRONG["m3.expert_layout"] = [
    (LESSON.defined("hasty_experts", {}), "Its own shape does not show it"),
    (
        changed("(list(gate_up.shape), list(down.shape)) == transposed", "list(gate_up.shape) == transposed[0]"),
        "show it",
    ),
    (
        changed("(list(gate_up.shape), list(down.shape)) == transposed", "list(down.shape) == transposed[1]"),
        "gate_up should be [6, 16, 8]",
    ),
    (changed("(list(gate_up.shape), list(down.shape)) == transposed", "False"), "gate_up should be [6, 10, 8]"),
    (changed("down.transpose(1, 2)", "down"), "down should be [6, 8, 5]"),
    (changed("down.transpose(1, 2)", "down.reshape(6, hidden_size, width)"), "reshape does not"),
    (lambda *_: None, "TypeError"),
]
