"""Wrong answers to the exercises of m2, each with the words that its refusal must hold, and a right variant.

Most are the solution with a piece of its text changed.
"""

from m2_continuous_batching.events import Batch
from m2_continuous_batching.request_queue import FCFSRequestQueue
from m2_continuous_batching.scheduler import Scheduler
from m2_continuous_batching.step_plan import StepPlan
from tests.notebooks.exercises import M2
from tests.notebooks.lessons import RightAnswers, WrongAnswers

LESSON = M2.lesson
WRONG: WrongAnswers = {}

changed = LESSON.solution("admit")
WRONG["m2.admit"] = [
    (lambda prompt_lens, *_: len(prompt_lens), "Only max_num_seqs may run"),
    (changed("num_running + joined", "joined"), "Who runs already has a place, too"),
    (changed("length > budget_left", "length >= budget_left"), "exactly the budget, and that is allowed"),
    (changed("budget_left -= length", "pass"), "share one budget"),
    (changed("break", "continue"), "Nobody overtakes"),
    (changed("0, max_num_batched_tokens", "0, max_num_batched_tokens - num_running"), "The prompts go first"),
    (lambda *_: None, "3 of them join, you say None. Return a whole number"),
]

PADDING = "prefill + rows - len(decode_slots)"
changed = LESSON.solution("padding")
WRONG["m2.padding"] = [
    (changed(PADDING, "rows - len(decode_slots)"), "every row is as wide as the longest prompt"),
    (changed(PADDING, "prefill"), "slot 1 goes along idle"),
    (changed("=-1) + 1", "=-1) + 1 - min(decode_slots, default=0)"), "The rows begin with slot 0"),
    (changed("if 2 * len(decode_slots) < rows", "if False"), "then only those two run"),
    (changed(PADDING, "max(prefill, rows - len(decode_slots))"), "Both forwards"),
    (changed(" - sum(prompt_lens)", ""), "every row is as wide"),
    (lambda prompt_lens, _: 10.0 if len(prompt_lens) == 3 else 0, "you say 10.0"),
]

LOWEST = "min(set(range(self.num_slots)) - set(self.slots.values()))"
FREED = "self.slots.pop(request_id, None)"
changed = LESSON.solution("Slots")
WRONG["m2.slot_manager"] = [
    (changed("has_place and num_tokens <= self.slot_len", "has_place"), "No slot is as long as that"),
    (changed("= request_id in self.slots or", "="), "Who has a slot may go on in it"),
    (changed("return has", "return request_id in self.slots or has"), "It would write past its end"),
    (changed("return has_place and", "return"), "No slot is free"),
    (changed(LOWEST, LOWEST.replace("min", "max")), "the lowest free slot is wanted"),
    (changed(LOWEST, "len(self.slots)"), "The lowest free slot is 1"),
    (changed("return []", "return [self.slots[request_id]]"), "Nothing is new to it"),
    (changed(FREED, "pass"), "Its slot is free again"),
    (changed(FREED, "del self.slots[request_id]"), "Your code raised KeyError: 'b'"),
    (changed(FREED, f'request_id == "req-5" or {FREED}'), "check_invariants() fails after step"),
]


class TakesTheShortest(FCFSRequestQueue):
    """Keeps the order of arrival, and forgets that the scheduler looks before it takes."""

    def shortest(self):
        return min(self, key=lambda request: request.sequence.get_prompt_len())

    def pop_request(self):
        request = self.shortest()
        self.remove(request)
        return request


class LooksForTheShortest(TakesTheShortest):
    def peek_request(self):
        return self.shortest()


changed = LESSON.solution("ShortestPromptFirst")
WRONG["m2.shortest_first"] = [
    (FCFSRequestQueue, "That is the order of arrival"),
    (changed("() > length", "() < length"), "That is the longest first"),
    (changed("() > length", "() >= length"), "the earlier goes first"),
    (changed("self.insert(next(longer, len(self)), request)", "pass"), "does add_request() put the request in?"),
    (TakesTheShortest, "peek_request() returns 'nine', and pop_request() then 'three'"),
]

WAS_LEFT_OUT = "if request.request_id in self.left_out:"
ADMITTED = "self._admit(plan)"
changed = LESSON.solution("PromptsFirst")
WRONG["m2.starved_decode"] = [
    (
        LESSON.defined("PromptsFirst", {"Batch": Batch, "Scheduler": Scheduler, "StepPlan": StepPlan}),
        "'second' got a token in step 1, and the next one in step 25. It starves.",
    ),
    (changed(WAS_LEFT_OUT, "if True:"), "Now the prompts wait until others have ended"),
    (
        changed(WAS_LEFT_OUT, f"if not plan.num_scheduled_tokens and {WAS_LEFT_OUT[3:]}"),
        "The running request 'third' got a token in step 1",
    ),
    (changed("if request.request_id not in plan.num_scheduled_tokens:", "if True:"), "and this one has two"),
    (
        changed(ADMITTED, f"{ADMITTED}; plan.budget_left += len(running)"),
        "A step has 18 tokens; max_num_batched_tokens is 16",
    ),
]
TAKES_TURNS = f"self.turn = not getattr(self, 'turn', False)\n        if self.turn:\n            {ADMITTED}"
RIGHT: RightAnswers = [
    ("m2.starved_decode", changed(WAS_LEFT_OUT, "if False:", ADMITTED, TAKES_TURNS)),
    ("m2.shortest_first", LooksForTheShortest),
]
