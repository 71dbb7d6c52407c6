"""The two schedules, told apart by what they ask for, in which order, and with which numbers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from m5_chunked_prefill_spec.batch_composer import LEAST_CHUNK, DecodeFirst, PrefillFirst
from m5_chunked_prefill_spec.cost_table import CostTable

LINEAR = CostTable((1, 101), (1.0, 101.0), context_ms=0.0)
"""A millisecond for each token."""
LONG = CostTable((1, 101), (1.0, 101.0), context_ms=10.0, decode_context_ms=20.0)
"""And 0.01 ms for each token before it."""


class FakeWork:
    """Decodes of so many requests with so many guesses, and a prompt; writes down what it is asked."""

    def __init__(
        self,
        *,
        budget: int = 32,
        running: int = 0,
        drafts: int = 0,
        prompt: int = 0,
        start: int = 0,
        context: int = 0,
        may_preempt: bool = False,
    ) -> None:
        self.max_num_batched_tokens, self.num_running, self.prefill_start = budget, running, start
        self.wants_prefill = prompt > 0
        self.may_preempt, self.running_lens = may_preempt, np.full(running, context)
        self.drafts, self.prompt, self.context = drafts, prompt, context
        self.asked: list[tuple[Any, ...]] = []

    def update_running_batch(self, max_draft_tokens: int) -> Any:
        self.asked.append(("decodes", max_draft_tokens))
        if not self.num_running:
            return None
        new_lens = np.ones(self.num_running, dtype=np.int64)
        new_lens[0] += min(self.drafts, max_draft_tokens)
        return SimpleNamespace(name="decodes", new_lens=new_lens, seq_lens=np.full(self.num_running, self.context))

    def get_new_batch_prefill(self, num_tokens: int, bound_by: str = "max_num_batched_tokens") -> Any:
        self.asked.append(("prompts", num_tokens, bound_by))
        return (
            SimpleNamespace(name="prompts", new_lens=np.array([min(self.prompt, num_tokens)]))
            if self.prompt and num_tokens > 0
            else None
        )

    def mix(self, prompts: Any, decodes: Any) -> Any:
        self.asked.append(("mix",))
        assert (prompts.name, decodes.name) == ("prompts", "decodes")
        return SimpleNamespace(name="mixed")


def composed(composer: Any, work: FakeWork) -> str | None:
    batch = composer.compose(work)
    return None if batch is None else batch.name


BUDGET = "max_num_batched_tokens"


# --- decodes first ----------------------------------------------------------------------------------------------------


def test_prompts_come_first_where_they_may_preempt_and_leave_decodes_their_tokens() -> None:
    work = FakeWork(budget=32, running=5, prompt=20, drafts=9, may_preempt=True)
    assert composed(DecodeFirst(), work) == "mixed"
    assert work.asked == [("prompts", 27, BUDGET), ("decodes", 7), ("mix",)]
    work = FakeWork(budget=32, running=5, may_preempt=True)
    assert composed(DecodeFirst(), work) == "decodes"


def test_the_target_limits_prompts_that_may_preempt_as_others() -> None:
    for context in (0, 300):
        asked = []
        for may_preempt in (False, True):
            work = FakeWork(budget=64, running=4, prompt=100, context=context, may_preempt=may_preempt)
            composed(DecodeFirst(target_gap_ms=30, cost_table=LONG), work)
            asked += [each for each in work.asked if each[0] == "prompts"]
        assert asked[0] == asked[1]


def test_decodes_come_first_and_prompts_get_what_they_leave_to_the_last_token() -> None:
    work = FakeWork(budget=32, running=5, prompt=100)
    assert composed(DecodeFirst(), work) == "mixed"
    assert work.asked == [("decodes", 13), ("prompts", 27, BUDGET), ("mix",)]


@pytest.mark.parametrize(("drafts", "rest"), [(0, 27), (6, 21), (13, 14), (99, 14)])
def test_guesses_may_take_half_of_what_decodes_leave_if_a_prompt_waits(drafts: int, rest: int) -> None:
    work = FakeWork(budget=32, running=5, drafts=drafts, prompt=100)
    composed(DecodeFirst(), work)
    assert work.asked == [("decodes", 13), ("prompts", rest, BUDGET), ("mix",)]


def test_without_prompts_guesses_may_take_all_that_is_left() -> None:
    work = FakeWork(budget=32, running=5, drafts=99)
    assert composed(DecodeFirst(), work) == "decodes"
    assert work.asked[0] == ("decodes", 27)


def test_without_decodes_prompts_get_the_whole_budget() -> None:
    work = FakeWork(budget=32, prompt=100)
    assert composed(DecodeFirst(), work) == "prompts"
    assert work.asked == [("decodes", 16), ("prompts", 32, BUDGET)]
    assert composed(DecodeFirst(), FakeWork()) is None


def test_decodes_that_fill_the_budget_leave_prompts_nothing() -> None:
    work = FakeWork(budget=5, running=5, prompt=100)
    assert composed(DecodeFirst(), work) == "decodes"
    assert work.asked == [("decodes", 0), ("prompts", 0, BUDGET)]


# --- a target for the gap ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("running", "drafts", "size"), [(1, 0, 39), (10, 0, 30), (10, 5, 25)])
def test_a_piece_is_as_large_as_the_target_allows(running: int, drafts: int, size: int) -> None:
    work = FakeWork(budget=200, running=running, drafts=drafts, prompt=300)
    composed(DecodeFirst(target_gap_ms=40.0, cost_table=LINEAR), work)
    assert work.asked[1] == ("prompts", size, "target_gap_ms")


def test_pieces_shrink_with_the_tokens_that_the_prompt_has_behind_it_and_with_those_of_the_decodes() -> None:
    def size(**settings: int) -> int:
        work = FakeWork(budget=200, running=2, prompt=300, **settings)
        composed(DecodeFirst(target_gap_ms=60.0, cost_table=LONG), work)
        return int(work.asked[1][1])

    sizes = [size(start=start) for start in (0, 50, 100, 200)]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    assert size(start=100, context=500) < size(start=100)
    by_hand = max(n for n in range(200) if 2 + n + 0.01 * n * 100 <= 60)
    assert size(start=100) == by_hand


def test_a_target_that_cannot_be_met_takes_the_least_piece_all_the_same() -> None:
    for budget, size in ((200, LEAST_CHUNK), (12, 10)):
        work = FakeWork(budget=budget, running=2, prompt=300)
        composed(DecodeFirst(target_gap_ms=1.0, cost_table=LINEAR), work)
        assert work.asked[1] == ("prompts", size, "target_gap_ms" if budget == 200 else BUDGET), "never over the budget"


def test_a_step_without_decodes_is_not_cut_by_the_target() -> None:
    """Nobody waits for it."""
    work = FakeWork(budget=200, prompt=300)
    composed(DecodeFirst(target_gap_ms=20.0, cost_table=LINEAR), work)
    assert work.asked[1] == ("prompts", 200, BUDGET)


# --- prompts first ----------------------------------------------------------------------------------------------------


def test_prompts_come_alone_and_first_with_the_whole_budget() -> None:
    work = FakeWork(budget=32, running=5, prompt=100)
    assert composed(PrefillFirst(), work) == "prompts"
    assert work.asked == [("prompts", 32, BUDGET)], "decodes are not even asked for"


def test_decodes_come_if_no_prompt_does_with_guesses_for_the_rest_of_the_budget() -> None:
    work = FakeWork(budget=32, running=5, drafts=99)
    assert composed(PrefillFirst(), work) == "decodes"
    assert work.asked == [("prompts", 32, BUDGET), ("decodes", 27)]
    assert composed(PrefillFirst(), FakeWork()) is None
