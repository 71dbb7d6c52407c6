"""The graders of m2: typical wrong answers fail with a hint that names the mistake. Right ones: `test_lessons.py`."""

import pytest

from benchmarks.m2.trace import REQUESTS
from m2_continuous_batching.events import Batch
from m2_continuous_batching.request_queue import FCFSRequestQueue
from m2_continuous_batching.scheduler import Scheduler
from m2_continuous_batching.step_plan import StepPlan
from notebooks.checks_m2 import check
from tests.notebooks.exercises import M2, assert_refused

LESSON = M2.lesson


# --- wrong answers ----------------------------------------------------------------------------------------------------


def admission(*, overtakes=False, may_fill=True, counts_running=True, decodes_first=False, shares_budget=True):
    """`admit` with a mistake in it."""

    def admit(prompt_lens, num_running, max_num_seqs, max_num_batched_tokens):
        joined, budget_left = 0, max_num_batched_tokens - (num_running if decodes_first else 0)
        for length in prompt_lens:
            if (num_running if counts_running else 0) + joined >= max_num_seqs:
                break
            if length > budget_left or (length == budget_left and not may_fill):
                if overtakes:
                    continue
                break
            joined += 1
            budget_left -= length if shares_budget else 0
        return joined

    return admit


WRONG_ADMISSIONS = [
    (lambda prompt_lens, *_: len(prompt_lens), "Only max_num_seqs may run"),
    (admission(counts_running=False), "Who runs already has a place, too"),
    (admission(may_fill=False), "exactly the budget, and that is allowed"),
    (admission(shares_budget=False), "share one budget"),
    (admission(overtakes=True), "Nobody overtakes"),
    (admission(decodes_first=True), "The prompts go first"),
    (lambda *_: None, "3 of them join, you say None"),
]


def test_the_admission_that_the_wrong_ones_vary_is_right():
    assert check("m2.admit", admission())


@pytest.mark.parametrize(("answer", "hint"), WRONG_ADMISSIONS)
def test_a_wrong_admission_is_met_with_what_it_overlooks(answer, hint):
    assert_refused("m2.admit", answer, hint)


def padded(*, prefill=True, decode=True, first=0, copies_when_few=True):
    """`padding` with a mistake in it."""

    def padding(prompt_lens, decode_slots):
        places = len(prompt_lens) * max(prompt_lens, default=0) - sum(prompt_lens) if prefill else 0
        if not decode or not decode_slots:
            return places
        rows = max(decode_slots) + 1 - (min(decode_slots) if first is None else first)
        if copies_when_few and 2 * len(decode_slots) < rows:
            return places
        return places + rows - len(decode_slots)

    return padding


WRONG_PADDING = [
    (padded(prefill=False), "every row is as wide as the longest prompt"),
    (padded(decode=False), "slot 1 goes along idle"),
    (padded(first=None), "The rows begin with slot 0"),
    (padded(copies_when_few=False), "then only those two run"),
    (lambda prompt_lens, decode_slots: max(padded()(prompt_lens, []), padded()([], decode_slots)), "Both forwards"),
    (lambda prompt_lens, _: len(prompt_lens) * max(prompt_lens, default=0), "every row is as wide"),
    (lambda prompt_lens, _: 10.0 if len(prompt_lens) == 3 else 0, "you say 10.0"),
]


@pytest.mark.exhaustive
def test_the_padding_that_the_wrong_ones_vary_is_right():
    assert check("m2.padding", padded())


@pytest.mark.parametrize(("answer", "hint"), WRONG_PADDING)
def test_a_wrong_count_of_padding_is_met_with_what_it_overlooks(answer, hint):
    assert_refused("m2.padding", answer, hint)


def slots(**methods):
    """The folded slot manager with some methods replaced."""
    return type("Variant", (LESSON.folded_solutions()["Slots"],), methods)


def reserve_the_highest(self, request_id, num_tokens):
    if request_id in self.slots:
        return []
    self.slots[request_id] = max(set(range(self.num_slots)) - set(self.slots.values()))
    return [self.slots[request_id]]


def reserve_by_count(self, request_id, num_tokens):
    """The next slot is the number of those in use: two owners, as soon as one has left."""
    if request_id in self.slots:
        return []
    self.slots[request_id] = len(self.slots)
    return [self.slots[request_id]]


def reserve_again(self, request_id, num_tokens):
    slot = self.slots.get(request_id, min(set(range(self.num_slots)) - set(self.slots.values()), default=None))
    self.slots[request_id] = slot
    return [slot]


def hold_only_if_one_is_free(self, request_id, num_tokens):
    return len(self.slots) < self.num_slots and num_tokens <= self.slot_len


def hold_any_length(self, request_id, num_tokens):
    return request_id in self.slots or len(self.slots) < self.num_slots


def hold_whoever_has_a_slot(self, request_id, num_tokens):
    return request_id in self.slots or (len(self.slots) < self.num_slots and num_tokens <= self.slot_len)


WRONG_SLOTS = [
    ({"can_hold": hold_any_length}, "No slot is as long as that"),
    ({"can_hold": hold_only_if_one_is_free}, "Who has a slot may go on in it"),
    ({"can_hold": hold_whoever_has_a_slot}, "It would write past its end"),
    ({"can_hold": lambda self, request_id, num_tokens: num_tokens <= self.slot_len}, "No slot is free"),
    ({"reserve": reserve_the_highest}, "the lowest free slot is wanted"),
    ({"reserve": reserve_by_count}, "The lowest free slot is 1"),
    ({"reserve": reserve_again}, "Nothing is new to it"),
    ({"release": lambda self, request_id: None}, "Its slot is free again"),
    ({"release": lambda self, request_id: self.slots.__delitem__(request_id)}, "Your code raised KeyError"),
]


@pytest.mark.parametrize(("methods", "hint"), WRONG_SLOTS)
def test_a_wrong_slot_manager_is_met_with_a_hint(methods, hint):
    assert_refused("m2.slot_manager", slots(**methods), hint)


def test_a_slot_manager_that_is_right_alone_is_also_tried_in_an_engine():
    def forget_the_sixth(self, request_id):
        if request_id != "req-5":
            self.slots.pop(request_id, None)

    assert_refused("m2.slot_manager", slots(release=forget_the_sixth), "check_invariants() fails after step")


def queue_with(add_request):
    return type("Queue", (FCFSRequestQueue,), {"add_request": add_request})


def length(request):
    return request.sequence.get_prompt_len()


def sort_by(key):
    def add_request(self, request):
        waiting = sorted([*self, request], key=key)
        self.clear()
        self.extend(waiting)

    return add_request


def before_its_equals(self, request):
    self.insert(next((i for i, other in enumerate(self) if length(other) >= length(request)), len(self)), request)


def never_add(self, request):
    pass


WRONG_QUEUES = [
    (FCFSRequestQueue, "That is the order of arrival"),
    (queue_with(sort_by(lambda request: -length(request))), "That is the longest first"),
    (queue_with(before_its_equals), "the earlier goes first"),
    (queue_with(never_add), "does add_request() put the request in?"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("answer", "hint"), WRONG_QUEUES)
def test_a_wrong_order_of_the_queue_is_met_with_what_it_does(answer, hint):
    assert_refused("m2.shortest_first", answer, hint)


# --- the lab ----------------------------------------------------------------------------------------------------------


def scheduling(decide):
    """A scheduler whose `schedule` is `decide(self, plan, running)`."""

    class Decides(Scheduler):
        def schedule(self):
            plan = StepPlan(budget=self.max_num_batched_tokens)
            decide(self, plan, [request for request in self.running if request.to_finish is None])
            announced, self.finished_req_ids = frozenset(self.finished_req_ids), set()
            output = plan.output(finished_req_ids=announced)
            if plan.num_scheduled_tokens:
                self.tracer.emit(Batch.of, output, output.scheduled_new_reqs, self.max_num_batched_tokens)
            return output

    return Decides


def decodes_first(self, plan, running):
    for request in running:
        self._continue(request, plan)
    self._admit(plan)


def nobody_joins_while_anybody_runs(self, plan, running):
    if not running:
        self._admit(plan)
    for request in running:
        self._continue(request, plan)


def only_one_is_saved(self, plan, running):
    """Of those who were left out, the first goes first: the last of three may never be the first."""
    saved = [request for request in running if request.request_id in getattr(self, "left_out", [])][:1]
    for request in saved:
        self._continue(request, plan)
    self._admit(plan)
    for request in running:
        if request not in saved:
            self._continue(request, plan)
    self.left_out = [r.request_id for r in running if r.request_id not in plan.num_scheduled_tokens]


def over_the_budget(self, plan, running):
    self._admit(plan)
    plan.budget_left += len(running)
    for request in running:
        self._continue(request, plan)


WRONG_SCHEDULERS = [
    (decodes_first, "Now the prompts wait until others have ended"),
    (nobody_joins_while_anybody_runs, "Now the prompts wait until others have ended"),
    (only_one_is_saved, "The running request 'third' got a token in step 1"),
    (over_the_budget, "A step has 18 tokens; max_num_batched_tokens is 16"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("decide", "hint"), WRONG_SCHEDULERS)
def test_a_half_repaired_scheduler_is_met_with_whom_it_starves(decide, hint):
    assert_refused("m2.starved_decode", scheduling(decide), hint)


def test_the_planted_scheduler_is_caught_when_it_starves_a_writer():
    planted = LESSON.defined("PromptsFirst", {"Batch": Batch, "Scheduler": Scheduler, "StepPlan": StepPlan})
    assert_refused(
        "m2.starved_decode", planted, "'second' got a token in step 1, and the next one in step 25. It starves."
    )


def test_another_rule_that_starves_nobody_passes():
    def taking_turns(self, plan, running):
        self.turn = not getattr(self, "turn", False)
        if self.turn:
            self._admit(plan)
        for request in running:
            if request.request_id not in plan.num_scheduled_tokens:
                self._continue(request, plan)

    assert check("m2.starved_decode", scheduling(taking_turns))


# --- the notebook and the page ----------------------------------------------------------------------------------------


def test_the_notebook_traces_the_requests_of_the_page():
    code = LESSON.code()
    assert all(f'"{rid}": "{prompt}"' in code for rid, (prompt, _) in REQUESTS.items())
