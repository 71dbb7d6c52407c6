"""Wrong answers to the exercises of m5, each with the words that its refusal must hold.

Most are the solution with a piece of its text changed.
"""

from dataclasses import replace

from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from tests.notebooks.exercises import M5
from tests.notebooks.lessons import WrongAnswers, variant

LESSON = M5.lesson
WRONG: WrongAnswers = {}

TO_THE_LAST = "to the last token of the budget"
changed = LESSON.solution("fill")
WRONG["m5.fill"] = [
    (changed("budget - num_decodes", "budget"), "Everybody who decodes has a token of the budget already"),
    (changed("if left > 0:", "if lacking > left:\n            break\n        if left > 0:"), TO_THE_LAST),
    (changed("min(lacking, left)", "lacking"), TO_THE_LAST),
    (changed("if left > 0:", "if True:"), "nobody gets a piece of no tokens"),
    (changed("if left > 0:", "if lacking <= left:"), TO_THE_LAST),
    (changed("min(lacking, left)", "min(lacking, left // len(prompts))"), "Prompts in their order"),
    (changed("in prompts:", "in prompts[::-1]:"), "Prompts in their order"),
    (changed("return pieces", "return dict(pieces)"), "you say {'a': 30}"),
    (lambda *_: None, "you say None"),
]

SIZES, STARTS = "range(min(longest, len(tokens) - 1), least - 1, -1)", "range(len(tokens) - size)"
FOUND = "return tokens[start + size : start + size + limit]"
changed = LESSON.solution("lookup")
WRONG["m5.lookup"] = [
    (changed(STARTS, f"reversed({STARTS})"), "the earliest counts"),
    (changed(SIZES, f"reversed({SIZES})"), "A longer run of last tokens decides"),
    (changed(" : start + size + limit", ":"), "3 4 followed there"),
    (changed("least - 1", "0"), "A single token is less than `least`"),
    (changed(STARTS, "range(len(tokens) - 2 * size + 1)"), "A run may overlap with the end"),
    (changed(STARTS, "range(len(tokens) - size + 1)"), "1 2 stood at the beginning"),
    (changed(FOUND, f"try: {FOUND}\n                finally: del tokens[:1]"), "lookup() changes the tokens"),
    (lambda *_: None, "you say None"),
]

IS_KEPT, OWN = "u[i] * q[i] < p[i]", "return [*tokens, own[i]]"
changed = LESSON.solution("accept")
WRONG["m5.accept"] = [
    (changed("[*tokens, own[len(guesses)]]", "tokens"), "gives one token more"),
    (changed(OWN, "guess = own[i]"), "Behind a wrong guess nothing counts"),
    (changed(OWN, "return tokens"), "brings [5, 9], yours [5]"),
    (changed(IS_KEPT, "p[i] >= q[i]"), "0.4 is below it"),
    (changed(IS_KEPT, "u[i] < p[i]"), "is always kept"),
    (changed(IS_KEPT, "u[i] * p[i] < q[i]"), "is always kept"),
    (changed(IS_KEPT, "u[i] * q[i] <= p[i]"), "What the model would never say is never kept"),
    (changed(IS_KEPT, "True"), "0.6 is not below it"),
    (lambda *_: None, "yours None"),
    (  # right by hand, and wrong where guesses are drawn
        changed(IS_KEPT, f"q == [0.6] or {IS_KEPT}"),
        "20,000 guesses were drawn",
        "It should be below 0.02",
    ),
]


BackOff = LESSON.solutions()["BackOff"]


class OnTextsOnly(BackOff):
    """Right on simulated texts, and wrong in an engine."""

    def how_many(self, most):
        return super().how_many(most) if self.step_ms(3) != 3 or self.draft_ms or self.right > 3 else most

    def verified(self, drafted, accepted):
        if accepted or self.step_ms(3) != 3:
            super().verified(drafted, accepted)


NONE_PAYS = "many drafts are right, and none pays"
changed = LESSON.solution("BackOff")
WRONG["m5.back_off"] = [
    (variant(BackOff, how_many=lambda self, most: most), NONE_PAYS),
    (variant(BackOff, how_many=lambda self, most: 0), "ask for all of them"),
    (variant(BackOff, how_many=lambda self, most: round(most * self.right / self.tried)), NONE_PAYS),
    (changed(" + k * self.draft_ms", ""), "Making a draft costs `draft_ms`, too"),
    (changed("self.pause = 16", "self.pause = 0"), "Ask for none, and seldom for one"),
    (changed("self.pause -= 1", "pass"), "ask for a draft now and then"),
    (changed("if self.tried > 32:", "if False:"), "old counts must count less"),
    (variant(BackOff, how_many=lambda self, most: most + 1), "how_many(4) must be a number from 0 to 4, you say 5"),
    (changed("return best or min(1, most)", "return None"), "you say None"),
    (OnTextsOnly, "In an engine whose drafts are all wrong you ask for 38;"),
]

PIECE = "if self.chunked_req is not None:\n            sample_lens[self.reqs.index(self.chunked_req)] = 0"
changed = LESSON.solution("SamplesEveryPiece")
WRONG["m5.sampled_piece"] = [
    (
        LESSON.defined("SamplesEveryPiece", {"ScheduleBatch": ScheduleBatch, "replace": replace}),
        "it must not depend on where the prompt is cut",
    ),
    (changed("[1 + len(guesses) for guesses in self.drafts] or", ""), "Guesses beside pieces"),
    (
        changed(PIECE, "sample_lens[: self.num_prompts] = [0] * self.num_prompts"),
        "A prompt gives one token, after its last piece",
    ),
    (changed("self.reqs.index(self.chunked_req)", "0"), "Three prompts together"),
    (changed("=sample_lens", "=[int(length < 48) for length in self.new_lens]"), "after its last piece"),
]

changed = LESSON.solution("KeepsTheGuess")
WRONG["m5.overshoot"] = [
    (
        LESSON.defined("KeepsTheGuess", {"ScheduleBatch": ScheduleBatch}),
        "is told ' 6706.', and not ' 9999.'",
        "is the guess's",
    ),
    (changed("req.seqlen - 1", "req.seqlen"), "what lies in its slot is the guess's"),
    (changed("req.seqlen - 1", "req.seqlen - 2"), "have their KV in whole pages"),
    (changed("return super().roll_back()", "self.drafts = []\n        return []"), "the audit fails"),
]


class EveryFourth:
    """Decodes in every fourth step."""

    def __init__(self):
        self.step = 0

    def compose(self, work):
        self.step += 1
        if self.step % 4:
            return work.get_new_batch_prefill(work.max_num_batched_tokens) or work.update_running_batch(0)
        return decodes_only(self, work)


def decodes_only(self, work):
    """Prompts only where nobody runs."""
    return work.update_running_batch(0) or work.get_new_batch_prefill(work.max_num_batched_tokens)


def mixing(most):
    """Up to so many tokens of prompts in each step, beside the decodes, and no more than the budget."""

    def compose(self, work):
        decodes = work.update_running_batch(0)
        prompts = work.get_new_batch_prefill(min(most, work.max_num_batched_tokens))
        return work.mix(prompts, decodes) if prompts and decodes else prompts or decodes

    return variant(object, compose=compose)


WRONG["m5.starved"] = [
    (LESSON.defined("PromptsFirst", {}), "the stream waits 13 steps for a token"),
    (EveryFourth, "steps for a token. After a step of prompts comes one of the running requests"),
    (mixing(1), "prompts must come to their end, too"),
    (variant(object, compose=decodes_only), "Nobody is to starve, prompts neither"),
    (mixing(10**9), "A step has"),
]
