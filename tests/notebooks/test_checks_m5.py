"""The graders of m5: typical wrong answers fail with a hint that names the mistake. Right ones: `test_lessons.py`."""

import ast
from dataclasses import replace

import pytest

from benchmarks.m5 import trace as m5_trace
from m5_chunked_prefill_spec import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.batch_composer import PrefillFirst
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from notebooks.checks_m5 import check
from tests.notebooks.exercises import M5, assert_refused
from tests.notebooks.lessons import source

LESSON = M5.lesson
SOLUTIONS = LESSON.folded_solutions()


# --- fill -------------------------------------------------------------------------------------------------------------


def filling(*, decodes=True, cut=True, whole=False, empty=False, behind=False, fair=False, order=1):
    """`fill` with a mistake in it."""

    def fill(num_decodes, prompts, budget):
        left, pieces = budget - num_decodes * decodes, []
        for name, lacking in prompts[::order]:
            share = left // len(prompts) if fair else left
            if whole:
                given = lacking if left > 0 else 0
            elif cut:
                given = min(lacking, share)
            else:
                given = lacking if lacking <= left else 0
            if given > 0 or empty:
                pieces.append((name, given))
                left -= given
            if given < lacking and not (behind or empty):
                break
        return pieces

    return fill


WRONG_FILLS = [
    (filling(decodes=False), "Everybody who decodes has a token of the budget already"),
    (filling(cut=False), "to the last token of the budget"),
    (filling(whole=True), "to the last token of the budget"),
    (filling(empty=True), "nobody gets a piece of no tokens"),
    (filling(cut=False, behind=True), "to the last token of the budget"),
    (filling(fair=True), "Prompts in their order"),
    (filling(order=-1), "Prompts in their order"),
    (lambda num_decodes, prompts, budget: dict(filling()(num_decodes, prompts, budget)), "you say {'a': 30}"),
    (lambda *_: None, "you say None"),
]


def test_the_fill_that_the_wrong_ones_vary_is_right():
    assert check("m5.fill", filling())


@pytest.mark.parametrize(("answer", "hint"), WRONG_FILLS)
def test_a_wrong_fill_is_met_with_who_gets_what(answer, hint):
    assert_refused("m5.fill", answer, hint)


# --- lookup -----------------------------------------------------------------------------------------------------------


def looking(*, latest=False, shortest=False, itself=False, limited=True, least_counts=True, apart=False):
    """`lookup` with a mistake in it."""

    def lookup(tokens, limit, longest, least):
        sizes = range(min(longest, len(tokens) - (not itself)), (least if least_counts else 1) - 1, -1)
        for size in reversed(sizes) if shortest else sizes:
            end = len(tokens) - 2 * size + 1 if apart else len(tokens) - size + itself
            starts = range(max(end, 0))
            for start in reversed(starts) if latest else starts:
                if tokens[start : start + size] == tokens[-size:]:
                    found = tokens[start + size :]
                    return found[:limit] if limited else found
        return []

    return lookup


def lookup_that_eats(tokens, limit, longest, least):
    found = SOLUTIONS["lookup"](tokens, limit, longest, least)
    del tokens[:1]
    return found


WRONG_LOOKUPS = [
    (looking(latest=True), "the earliest counts"),
    (looking(shortest=True), "A longer run of last tokens decides"),
    (looking(limited=False), "3 4 followed there"),
    (looking(least_counts=False), "A single token is less than `least`"),
    (looking(apart=True), "A run may overlap with the end"),
    (looking(itself=True), "1 2 stood at the beginning"),
    (lookup_that_eats, "lookup() changes the tokens"),
    (lambda *_: None, "you say None"),
]


def test_the_lookup_that_the_wrong_ones_vary_is_right():
    assert check("m5.lookup", looking())


@pytest.mark.parametrize(("answer", "hint"), WRONG_LOOKUPS)
def test_a_wrong_lookup_is_met_with_what_it_overlooks(answer, hint):
    assert_refused("m5.lookup", answer, hint)


# --- accept -----------------------------------------------------------------------------------------------------------


def accepting(*, keep=lambda p, q, u: u * q < p, stop=True, own=True, bonus=True):
    """`accept` with a mistake in it. `keep(p, q, u)`: when a drawn guess stays."""

    def accept(guesses, said, p=None, q=None, u=None):
        tokens = []
        for i, guess in enumerate(guesses):
            kept = guess == said[i] if p is None else keep(p[i], q[i], u[i])
            if not kept:
                tokens += [said[i]] if own else []
                if stop:
                    return tokens
            else:
                tokens.append(guess)
        return [*tokens, said[-1]] if bonus else tokens

    return accept


def compares_what_was_drawn(guesses, own, p=None, q=None, u=None):
    return SOLUTIONS["accept"](guesses, own)


WRONG_ACCEPTS = [
    (accepting(bonus=False), "gives one token more"),
    (accepting(stop=False), "Behind a wrong guess nothing counts"),
    (accepting(own=False), "brings [5, 9], yours [5]"),
    (accepting(keep=lambda p, q, u: p >= q), "0.4 is below it"),
    (accepting(keep=lambda p, q, u: u < p), "is always kept"),
    (accepting(keep=lambda p, q, u: u * p < q), "is always kept"),
    (accepting(keep=lambda p, q, u: u * q <= p), "What the model would never say is never kept"),
    (accepting(keep=lambda p, q, u: True), "0.6 is not below it"),
    (compares_what_was_drawn, "is always kept"),
    (lambda *_: None, "yours None"),
]


def test_the_acceptance_that_the_wrong_ones_vary_is_right():
    assert check("m5.accept", accepting())


@pytest.mark.parametrize(("answer", "hint"), WRONG_ACCEPTS)
def test_a_wrong_acceptance_is_met_with_the_rule_that_it_breaks(answer, hint):
    assert_refused("m5.accept", answer, hint)


def test_an_acceptance_that_is_right_by_hand_is_also_tried_by_drawing():
    def keeps_what_the_draft_likes(guesses, own, p=None, q=None, u=None):
        if q == [0.6]:
            return [*guesses, own[-1]]
        return SOLUTIONS["accept"](guesses, own, p, q, u)

    assert_refused("m5.accept", keeps_what_the_draft_likes, "20,000 guesses were drawn", "It should be below 0.02")


# --- back-off ---------------------------------------------------------------------------------------------------------


BackOff = SOLUTIONS["BackOff"]


class NeverBacksOff(BackOff):
    def how_many(self, most):
        return most


class AlwaysBacksOff(BackOff):
    def how_many(self, most):
        return 0


class IgnoresCosts(BackOff):
    def how_many(self, most):
        return round(most * self.right / self.tried)


class IgnoresDraftCosts(BackOff):
    def __init__(self, step_ms, draft_ms):
        super().__init__(step_ms, 0.0)


class NeverPauses(BackOff):
    def how_many(self, most):
        self.pause = 0
        return super().how_many(most)


class GivesUp(BackOff):
    gave_up = False

    def how_many(self, most):
        wanted = super().how_many(most)
        self.gave_up = self.gave_up or self.pause > 0
        return 0 if self.gave_up else wanted


class NeverForgets(BackOff):
    def verified(self, drafted, accepted):
        self.tried += accepted + (accepted < drafted)
        self.right += accepted


class AsksForMore(BackOff):
    def how_many(self, most):
        return most + 1


class SaysNothing(BackOff):
    def how_many(self, most):
        super().how_many(most)


WRONG_BACK_OFFS = [
    (NeverBacksOff, "many drafts are right, and none pays"),
    (AlwaysBacksOff, "ask for all of them"),
    (IgnoresCosts, "many drafts are right, and none pays"),
    (IgnoresDraftCosts, "Making a draft costs `draft_ms`, too"),
    (NeverPauses, "Ask for none, and seldom for one"),
    (GivesUp, "ask for a draft now and then"),
    (NeverForgets, "old counts must count less"),
    (AsksForMore, "how_many(4) must be a number from 0 to 4, you say 5"),
    (SaysNothing, "you say None"),
]


def test_the_back_off_that_the_wrong_ones_vary_is_right():
    assert check("m5.back_off", BackOff)


@pytest.mark.parametrize(("answer", "hint"), WRONG_BACK_OFFS)
def test_a_wrong_back_off_is_met_with_the_text_on_which_it_loses(answer, hint):
    assert_refused("m5.back_off", answer, hint)


def test_a_back_off_that_is_right_on_simulated_texts_is_also_tried_in_an_engine():
    class OnTextsOnly(BackOff):
        def how_many(self, most):
            return super().how_many(most) if self.step_ms(3) != 3 or self.draft_ms or self.right > 3 else most

        def verified(self, drafted, accepted):
            if accepted or self.step_ms(3) != 3:
                super().verified(drafted, accepted)

    assert_refused("m5.back_off", OnTextsOnly, "In an engine whose drafts are all wrong you ask for 38;")


# --- the labs ---------------------------------------------------------------------------------------------------------


def test_the_planted_batch_that_samples_pieces_changes_the_answer():
    planted = LESSON.defined("SamplesEveryPiece", {"ScheduleBatch": ScheduleBatch, "replace": replace})
    assert_refused("m5.sampled_piece", planted, "it must not depend on where the prompt is cut")


def sampling(lens_of):
    """The lab's batch; `lens_of(batch)` says how many rows of whom are looked at."""

    class Batch(ScheduleBatch):
        def get_model_worker_batch(self):
            return replace(super().get_model_worker_batch(), sample_lens=lens_of(self))

    return Batch


def no_prompts(batch):
    return [0] * batch.num_prompts + [1] * (len(batch.reqs) - batch.num_prompts)


def the_first_prompt(batch):
    lens = [1] * len(batch.reqs)
    if batch.chunked_req is not None:
        lens[0] = 0
    return lens


WRONG_SAMPLINGS = [
    (sampling(lambda batch: [int(req is not batch.chunked_req) for req in batch.reqs]), "Guesses beside pieces"),
    (sampling(no_prompts), "A prompt gives one token, after its last piece"),
    (sampling(the_first_prompt), "Three prompts together"),
    (sampling(lambda batch: [int(length < 48) for length in batch.new_lens]), "after its last piece"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("answer", "hint"), WRONG_SAMPLINGS)
def test_a_half_repaired_sampling_is_met_with_whose_answer_changes(answer, hint):
    assert_refused("m5.sampled_piece", answer, hint)


def test_the_planted_batch_that_keeps_a_guess_gives_somebody_elses_code():
    planted = LESSON.defined("KeepsTheGuess", {"ScheduleBatch": ScheduleBatch})
    assert_refused("m5.overshoot", planted, "is told ' 6706.', and not ' 9999.'", "is the guess's")


def committing(less, *, back=True):
    """The lab's batch: how many tokens less than it has are committed at the end, and whether slots are given back."""

    class Batch(ScheduleBatch):
        def roll_back(self):
            for place, req in enumerate(self.reqs):
                if self.drafts and self.drafts[place] and req.to_finish is not None:
                    req.kv_committed_len = min(int(self.seq_lens[place]), req.seqlen - less)
            if back:
                return super().roll_back()
            self.drafts = []
            return []

    return Batch


WRONG_COMMITS = [
    (committing(0), "what lies in its slot is the guess's"),
    (committing(2), "have their KV in whole pages"),
    (committing(1, back=False), "the audit fails"),
]


@pytest.mark.parametrize(("answer", "hint"), WRONG_COMMITS)
def test_a_half_repaired_rollback_is_met_with_what_is_cached(answer, hint):
    assert_refused("m5.overshoot", answer, hint)


def test_the_planted_composer_starves_the_stream():
    assert_refused("m5.starved", LESSON.defined("PromptsFirst", {}), "the stream waits 13 steps for a token")


class DecodesOnly:
    """Prompts only where nobody runs."""

    def compose(self, work):
        return work.update_running_batch(0) or work.get_new_batch_prefill(work.max_num_batched_tokens)


class EveryFourth:
    """Decodes in every fourth step."""

    def __init__(self):
        self.step = 0

    def compose(self, work):
        self.step += 1
        if self.step % 4:
            return work.get_new_batch_prefill(work.max_num_batched_tokens) or work.update_running_batch(0)
        return work.update_running_batch(0) or work.get_new_batch_prefill(work.max_num_batched_tokens)


class Crumbs:
    """A token of a prompt in each step, beside the decodes."""

    def compose(self, work):
        decodes = work.update_running_batch(0)
        prompts = work.get_new_batch_prefill(1)
        return work.mix(prompts, decodes) if prompts and decodes else prompts or decodes


class TooFull:
    """Prompts have the whole budget, beside the decodes."""

    def compose(self, work):
        decodes = work.update_running_batch(0)
        prompts = work.get_new_batch_prefill(work.max_num_batched_tokens)
        return work.mix(prompts, decodes) if prompts and decodes else prompts or decodes


WRONG_COMPOSERS = [
    (PrefillFirst, "the stream waits 13 steps for a token"),
    (EveryFourth, "steps for a token. After a step of prompts comes one of the running requests"),
    (Crumbs, "prompts must come to their end, too"),
    (DecodesOnly, "Nobody is to starve, prompts neither"),
    (TooFull, "A step has"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("answer", "hint"), WRONG_COMPOSERS)
def test_a_composer_that_is_no_better_is_met_with_who_waits(answer, hint):
    assert_refused("m5.starved", answer, hint)


# --- the notebook and the page ----------------------------------------------------------------------------------------


def test_the_notebook_traces_the_requests_of_the_page():
    (cell,) = [source(cell) for cell in LESSON.cells("code") if "ARRIVALS = {" in source(cell)]
    assignments = [node for node in ast.parse(cell).body if isinstance(node, ast.Assign)][:4]
    names = {each.__name__: each for each in (ModelConfig, CacheConfig, SchedulerConfig, SpeculativeConfig)}
    exec(compile(ast.Module(assignments, type_ignores=[]), "cell", "exec"), names)
    for name in ("MODEL", "MEMORY", "LIMITS", "GUESSES", "ARRIVALS"):
        assert names[name] == getattr(m5_trace, name), name
    assert f"SamplingParams(max_tokens={m5_trace.PARAMS.max_tokens})" in cell
