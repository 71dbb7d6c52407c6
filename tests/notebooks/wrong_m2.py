"""Wrong answers to the exercises of m2, each with the words that its refusal must hold, and right variants."""

from m2_continuous_batching.events import Batch
from m2_continuous_batching.request_queue import FCFSRequestQueue
from m2_continuous_batching.scheduler import Scheduler
from m2_continuous_batching.step_plan import StepPlan
from tests.notebooks.exercises import M2
from tests.notebooks.lessons import RightAnswers, WrongAnswers, variant

LESSON = M2.lesson
WRONG: WrongAnswers = {}
RIGHT: RightAnswers = []


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


RIGHT += [("m2.admit", admission())]
WRONG["m2.admit"] = [
    (lambda prompt_lens, *_: len(prompt_lens), "Only max_num_seqs may run"),
    (admission(counts_running=False), "Who runs already has a place, too"),
    (admission(may_fill=False), "exactly the budget, and that is allowed"),
    (admission(shares_budget=False), "share one budget"),
    (admission(overtakes=True), "Nobody overtakes"),
    (admission(decodes_first=True), "The prompts go first"),
    (lambda *_: None, "3 of them join, you say None"),
]


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


RIGHT += [("m2.padding", padded())]
WRONG["m2.padding"] = [
    (padded(prefill=False), "every row is as wide as the longest prompt"),
    (padded(decode=False), "slot 1 goes along idle"),
    (padded(first=None), "The rows begin with slot 0"),
    (padded(copies_when_few=False), "then only those two run"),
    (lambda prompt_lens, decode_slots: max(padded()(prompt_lens, []), padded()([], decode_slots)), "Both forwards"),
    (lambda prompt_lens, _: len(prompt_lens) * max(prompt_lens, default=0), "every row is as wide"),
    (lambda prompt_lens, _: 10.0 if len(prompt_lens) == 3 else 0, "you say 10.0"),
]


SLOTS = LESSON.folded_solutions()["Slots"]


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


def forget_the_sixth(self, request_id):
    """Right alone, and wrong in an engine."""
    if request_id != "req-5":
        self.slots.pop(request_id, None)


WRONG["m2.slot_manager"] = [
    (variant(SLOTS, can_hold=hold_any_length), "No slot is as long as that"),
    (variant(SLOTS, can_hold=hold_only_if_one_is_free), "Who has a slot may go on in it"),
    (variant(SLOTS, can_hold=hold_whoever_has_a_slot), "It would write past its end"),
    (variant(SLOTS, can_hold=lambda self, request_id, num_tokens: num_tokens <= self.slot_len), "No slot is free"),
    (variant(SLOTS, reserve=reserve_the_highest), "the lowest free slot is wanted"),
    (variant(SLOTS, reserve=reserve_by_count), "The lowest free slot is 1"),
    (variant(SLOTS, reserve=reserve_again), "Nothing is new to it"),
    (variant(SLOTS, release=lambda self, request_id: None), "Its slot is free again"),
    (variant(SLOTS, release=lambda self, request_id: self.slots.__delitem__(request_id)), "Your code raised KeyError"),
    (variant(SLOTS, release=forget_the_sixth), "check_invariants() fails after step"),
]


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


WRONG["m2.shortest_first"] = [
    (FCFSRequestQueue, "That is the order of arrival"),
    (variant(FCFSRequestQueue, add_request=sort_by(lambda request: -length(request))), "That is the longest first"),
    (variant(FCFSRequestQueue, add_request=before_its_equals), "the earlier goes first"),
    (variant(FCFSRequestQueue, add_request=never_add), "does add_request() put the request in?"),
]


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


WRONG["m2.starved_decode"] = [
    (
        LESSON.defined("PromptsFirst", {"Batch": Batch, "Scheduler": Scheduler, "StepPlan": StepPlan}),
        "'second' got a token in step 1, and the next one in step 25. It starves.",
    ),
    (scheduling(decodes_first), "Now the prompts wait until others have ended"),
    (scheduling(only_one_is_saved), "The running request 'third' got a token in step 1"),
    (scheduling(over_the_budget), "A step has 18 tokens; max_num_batched_tokens is 16"),
]


def taking_turns(self, plan, running):
    self.turn = not getattr(self, "turn", False)
    if self.turn:
        self._admit(plan)
    for request in running:
        if request.request_id not in plan.num_scheduled_tokens:
            self._continue(request, plan)


RIGHT += [("m2.starved_decode", scheduling(taking_turns))]
