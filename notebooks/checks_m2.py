"""The graders of m2's notebook: `check` grades an exercise by its behaviour, as in `checks.py`.

The reference is always the package itself: the scheduler's own admissions, the runner's own count of padding, the
tokens that m1 gives to the same prompts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from m1_single_request.request import Request
from m1_single_request.tracer import TraceRecord
from m2_continuous_batching import LLMEngine, SamplingParams, SchedulerConfig
from m2_continuous_batching.events import Batch
from m2_continuous_batching.input_batch import InputBatch
from m2_continuous_batching.scheduler import Scheduler

try:  # in the checkout, for the tests
    from notebooks.checks import Mismatch, check, grader, ids_of, listing, run_steps, short, show_source, tokens_alone
except ModuleNotFoundError:  # beside the notebook
    from checks import (  # type: ignore[no-redef]
        Mismatch,
        check,
        grader,
        ids_of,
        listing,
        run_steps,
        short,
        show_source,
        tokens_alone,
    )

__all__ = ["Batches", "check", "ids_of", "listing", "show_source"]


class Batches:
    """A trace reader that keeps what ran, step by step."""

    def __init__(self) -> None:
        self.steps: list[Batch] = []

    def read(self, record: TraceRecord) -> None:
        """Keep a batch."""
        if isinstance(record.event, Batch):
            self.steps.append(record.event)

    def close(self) -> None:
        """Nothing to release."""

    def of(self, rid: str) -> list[int]:
        """The steps, counted from 1, in which a request got a token."""
        return [number for number, batch in enumerate(self.steps, start=1) if rid in batch.rids]

    def joined(self) -> list[str]:
        """All requests, in the order in which they joined."""
        return [rid for batch in self.steps for rid in batch.joined]


# --- exercises --------------------------------------------------------------------------------------------------------

ADMISSIONS = (
    ((9, 3, 5), 0, 16, 4096, "Both limits are far away: all of them join."),
    ((9, 3, 5), 0, 2, 4096, "Only max_num_seqs may run."),
    ((9, 3, 5), 2, 4, 4096, "Who runs already has a place, too."),
    ((9, 3, 5), 4, 4, 4096, "No place is free."),
    ((9, 3, 5), 0, 4, 11, "The prompts of one step share one budget."),
    ((9, 3, 5), 0, 4, 12, "9 + 3 is exactly the budget, and that is allowed."),
    ((9, 8, 3), 0, 4, 12, "Nobody overtakes: the first that does not fit ends the admission."),
    ((8, 4), 4, 6, 12, "The prompts go first: the running requests get what they leave of the budget."),
    ((), 2, 4, 12, "Nobody waits."),
)
"""Waiting prompts, running requests, the two limits; and what a wrong answer has overlooked."""


@grader("m2.admit")
def grade_admit(admit: Callable[[Sequence[int], int, int, int], int]) -> str:
    """`admit(prompt_lens, num_running, max_num_seqs, max_num_batched_tokens)`: how many of the queue join now."""
    for prompt_lens, num_running, max_num_seqs, budget, hint in ADMISSIONS:
        got = admit(list(prompt_lens), num_running, max_num_seqs, budget)
        wanted = _num_joining(prompt_lens, num_running, max_num_seqs, budget)
        if got != wanted or not isinstance(got, int):
            hint = hint if isinstance(got, int) else "Return a whole number."
            raise Mismatch(
                f"Prompts of {list(prompt_lens)} tokens wait, {num_running} requests run, max_num_seqs is "
                f"{max_num_seqs} and max_num_batched_tokens {budget:,}: {wanted} of them join, you say {short(got)}. "
                f"{hint}"
            )
    return f"{len(ADMISSIONS)} queues: as many join as in the engine's own scheduler."


@cache
def _num_joining(prompt_lens: Sequence[int], num_running: int, max_num_seqs: int, budget: int) -> int:
    """How many the engine's own scheduler lets join."""
    limits = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    params, watch = SamplingParams(max_tokens=9, ignore_eos=True), Batches()
    with LLMEngine(scheduler_config=limits) as engine:
        for length in [1] * num_running:
            engine.add_request(ids_of(length), params)
        engine.step()
        for length in prompt_lens:
            engine.add_request(ids_of(length), params)
        engine.tracer.attach(watch)
        engine.step()
    return len(watch.joined())


STEPS = (
    ((9, 3, 5), (), "A prefill forward has a row for each prompt, and every row is as wide as the longest prompt."),
    ((12,), (), "A prompt alone needs no padding."),
    ((), (0, 1, 2), "Decodes in slots 0, 1, 2 are rows 0, 1, 2: no row is idle."),
    ((), (0, 2), "A decode forward has the rows of the slots 0 to 2: slot 1 goes along idle."),
    ((), (1, 2, 3), "The rows begin with slot 0, used or not."),
    ((), (0, 3), "Half of the rows 0 to 3 are used: that is enough to run them in place, with two idle ones."),
    ((), (0, 5), "Fewer than half of the rows 0 to 5 are used: then only those two run, and nothing is idle."),
    ((7, 4), (0, 2), "Both forwards of the step count."),
    ((), (), "A step without requests pads nothing."),
)
"""Prompts that are prefilled, slots that decode; and what a wrong answer has overlooked."""


@grader("m2.padding")
def grade_padding(padding: Callable[[Sequence[int], Sequence[int]], int]) -> str:
    """`padding(prompt_lens, decode_slots)`: the places in a step's tensors that hold no token."""
    for prompt_lens, decode_slots, hint in STEPS:
        got, wanted = padding(list(prompt_lens), list(decode_slots)), _num_padded(prompt_lens, decode_slots)
        if got != wanted or not isinstance(got, int):
            hint = hint if isinstance(got, int) else "Return a whole number."
            raise Mismatch(
                f"A step with prompts of {list(prompt_lens)} tokens and decodes in the slots {list(decode_slots)} has "
                f"{wanted} places of padding, you say {short(got)}. {hint}"
            )
    return f"{len(STEPS)} steps: your count is the one that the runner reports."


@cache
def _num_padded(prompt_lens: Sequence[int], decode_slots: Sequence[int]) -> int:
    """What the engine's own runner counts for such a step."""
    free = (slot for slot in range(8) if slot not in decode_slots)
    decodes = {f"decode {slot}": slot for slot in decode_slots}
    with LLMEngine(scheduler_config=SchedulerConfig(max_num_seqs=8)) as engine:
        executor = engine.engine_core.executor
        executor.execute_model_batch(_rows([(rid, 4, slot) for rid, slot in decodes.items()], {}))
        prompts = [(f"prompt {number}", length, next(free)) for number, length in enumerate(prompt_lens)]
        executor.execute_model_batch(_rows(prompts, decodes))
        return executor.usage().padded_tokens


def _rows(prompts: Iterable[tuple[str, int, int]], decodes: Mapping[str, int]) -> InputBatch:
    """A step's rows: prompts as (request id, length, slot), and decodes of requests that have 4 tokens already."""
    new = list(prompts)
    return InputBatch(
        req_ids=[rid for rid, _, _ in new] + list(decodes),
        token_ids=[ids_of(length) for _, length, _ in new] + [[300]] * len(decodes),
        start_positions=[0] * len(new) + [4] * len(decodes),
        is_prefill=[True] * len(new) + [False] * len(decodes),
        prompt_lens=[length for _, length, _ in new] + [0] * len(decodes),
        block_ids=[[slot] for _, _, slot in new] + [[]] * len(decodes),
        num_logits=[1] * (len(new) + len(decodes)),
    )


@grader("m2.slot_manager")
def grade_slot_manager(manager_class: type) -> str:
    """A part that owns the slots: can hold, reserve, release."""
    _grade_slots_alone(manager_class(max_num_seqs=3, max_model_len=8))
    lengths = [9, 3, 5, 12, 1, 7, 3, 9, 5, 1, 12, 7]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with LLMEngine(scheduler_config=SchedulerConfig(max_num_seqs=3), parts={"kv_manager": manager_class}) as engine:
        rids = [engine.add_request(ids_of(length), params) for length in lengths]
        finished = dict(run_steps(engine, limit=2))
        engine.abort_request(rids[2])
        finished |= run_steps(engine, limit=60)
    wanted = tokens_alone(lengths, num=3)
    if missing := [rid for rid in rids if rid not in finished]:
        raise Mismatch(f"In an engine with 3 slots these of 12 requests never finished: {', '.join(missing)}.")
    aborted = finished.pop(rids[2])
    expected = {rid: wanted[length] for rid, length in zip(rids, lengths, strict=True)}
    if any(tokens != expected[rid] for rid, tokens in finished.items()) or aborted != expected[rids[2]][: len(aborted)]:
        raise Mismatch("In an engine with 3 slots the tokens of a request have changed.")
    return "Alone it keeps the books, and 12 requests go through 3 slots with the tokens that m1 gives them."


def _grade_slots_alone(manager: Any) -> None:
    def expect(what: str, got: object, wanted: object, why: str) -> None:
        if got != wanted:
            raise Mismatch(f"With 3 slots of 8 tokens, {what} is {wanted!r}, yours is {short(got)}. {why}")

    expect("can_hold('a', 8) of an empty manager", manager.can_hold("a", 8), True, "It fits exactly.")
    expect("can_hold('a', 9)", manager.can_hold("a", 9), False, "No slot is as long as that.")
    for slot, rid in enumerate("abc"):
        why = "A list with the lowest free slot is wanted: slots in use should lie together."
        expect(f"reserve({rid!r}, 4), the {('first', 'second', 'third')[slot]},", manager.reserve(rid, 4), [slot], why)
    expect("can_hold('d', 1), when a, b and c have all slots,", manager.can_hold("d", 1), False, "No slot is free.")
    expect("can_hold('b', 5), when b has a slot,", manager.can_hold("b", 5), True, "Who has a slot may go on in it.")
    expect("can_hold('b', 9), when b has a slot,", manager.can_hold("b", 9), False, "It would write past its end.")
    expect("reserve('b', 5), when b has a slot,", manager.reserve("b", 5), [], "Nothing is new to it.")
    manager.release("b")
    manager.release("b")
    manager.release("nobody")
    expect("can_hold('d', 1), after release('b'),", manager.can_hold("d", 1), True, "Its slot is free again.")
    expect("reserve('d', 1), after release('b'),", manager.reserve("d", 1), [1], "The lowest free slot is 1.")
    expect("owned()", dict(manager.owned()), {"a": [0], "c": [2], "d": [1]}, "")


@grader("m2.shortest_first")
def grade_shortest_first(queue_class: type) -> str:
    """A queue that puts the shortest waiting prompt first; whoever was put back stays before all others."""
    _grade_queue_alone(queue_class)

    class Policy(Scheduler):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.waiting = queue_class()

    lengths = {"nine": 9, "three": 3, "seven": 7, "three too": 3, "one, late": 1}
    params, watch = SamplingParams(max_tokens=2, ignore_eos=True), Batches()
    with LLMEngine(scheduler_config=SchedulerConfig(max_num_seqs=1), parts={"scheduler": Policy}) as engine:
        engine.tracer.attach(watch)
        for rid in ("nine", "three", "seven", "three too"):
            engine.add_request(ids_of(lengths[rid]), params, request_id=rid)
        finished = dict(run_steps(engine, limit=1))
        engine.add_request(ids_of(1), params, request_id="one, late")
        finished |= run_steps(engine, limit=40)
    wanted = ["three", "one, late", "three too", "seven", "nine"]
    if watch.joined() != wanted:
        raise Mismatch(f"In an engine that runs one at a time they should join as {wanted}; yours as {watch.joined()}.")
    alone = tokens_alone(lengths.values())
    if any(tokens != alone[lengths[rid]] for rid, tokens in finished.items()):
        raise Mismatch("The order is right, but the tokens of a request have changed.")
    return "The right order, also for those who come late or leave the queue; the same tokens."


def _grade_queue_alone(queue_class: type) -> None:
    with LLMEngine() as engine:
        processor = engine.engine_core.input_processor

    def request(rid: str, length: int) -> Request:
        return processor.process_request(rid, ids_of(length), SamplingParams(), number=0, arrival_time=0.0)

    def expect(wanted: list[str], hint: Mapping[tuple[str, ...], str], when: str) -> None:
        got = _emptied(queue)
        if got != wanted:
            why = hint.get(tuple(got), "")
            raise Mismatch(f"{when} the queue should be {wanted}, yours is {got}.{why and ' '}{why}")

    queue, made = queue_class(), {rid: request(rid, n) for rid, n in (("nine", 9), ("three", 3), ("seven", 7))}
    for one in made.values():
        queue.add_request(one)
    hints = {
        ("nine", "three", "seven"): "That is the order of arrival.",
        ("nine", "seven", "three"): "That is the longest first.",
        (): "Nobody is in it: does add_request() put the request in?",
    }
    expect(["three", "seven", "nine"], hints, "With prompts of 9, 3 and 7 tokens")
    queue.add_request(request("three too", 3))
    hints = {("three too", "three", "seven", "nine"): "Of two equal ones the earlier goes first."}
    expect(["three", "three too", "seven", "nine"], hints, "When another prompt of 3 tokens comes")
    first = queue.pop_request()
    queue.remove_requests([made["seven"]])
    expect(["three too", "nine"], {}, f"After pop_request(), which gave {first.request_id!r}, and an abort of 'seven'")


def _emptied(queue: Any) -> list[str]:
    """The ids of a queue in the order in which the scheduler would take them; afterwards they wait again."""
    taken = []
    for _ in range(len(queue)):
        first = queue.peek_request()
        taken.append(queue.pop_request())
        if taken[-1] is not first:
            raise Mismatch(
                f"peek_request() returns {first.request_id!r}, and pop_request() then {taken[-1].request_id!r}. It "
                "must be the same request: the scheduler looks whether the first one fits, and then takes it."
            )
    for request in taken:
        queue.add_request(request)
    return [request.request_id for request in taken]


# --- the lab ----------------------------------------------------------------------------------------------------------

BUDGET, PROMPT_LEN = 16, 15  # a prompt leaves room for one of three writers
LONGEST_WAIT = 3  # steps


@grader("m2.starved_decode")
def grade_starved_decode(scheduler_class: type) -> str:
    """The lab's scheduler, repaired: neither the decodes nor the prompts wait without end."""
    writers, watch = ("first", "second", "third"), Batches()
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=BUDGET)
    with LLMEngine(scheduler_config=limits, parts={"scheduler": scheduler_class}) as engine:
        engine.tracer.attach(watch)
        for rid in writers:
            engine.add_request(ids_of(4), SamplingParams(max_tokens=24, ignore_eos=True), request_id=rid)
        finished = dict(run_steps(engine, limit=1))
        for number in range(40):
            engine.add_request(ids_of(PROMPT_LEN), SamplingParams(max_tokens=1), request_id=f"prompt {number}")
            finished |= run_steps(engine, limit=1)
        finished |= run_steps(engine, limit=200)
    for number, batch in enumerate(watch.steps, start=1):
        if len(set(batch.rids)) < len(batch.rids):
            raise Mismatch(
                f"Step {number} runs {', '.join(batch.rids)}: a request gets one token in a step, and this one has two."
            )
    if (most := max(sum(batch.extend_lens) for batch in watch.steps)) > BUDGET:
        raise Mismatch(f"A step has {most} tokens; max_num_batched_tokens is {BUDGET}.")
    for rid in writers:
        _expect_no_gap(f"The running request {rid!r} got a token", watch.of(rid), "It starves.")
    joined = [number for number, batch in enumerate(watch.steps, start=1) if batch.joined]
    why = (
        f"Each prompt takes {PROMPT_LEN} of the budget of {BUDGET}, so it can never join in a step in which all three "
        "writers get a token. Now the prompts wait until others have ended. Let only those go first who were left out "
        "in the step before."
    )
    _expect_no_gap("Prompts waited at every step. One joined", joined, why)
    if missing := [rid for rid in (*writers, *(f"prompt {n}" for n in range(40))) if rid not in finished]:
        raise Mismatch(f"These requests never finished: {short(missing)}.")
    alone = tokens_alone([4], num=24) | tokens_alone([PROMPT_LEN], num=1)
    if any(tokens != alone[4 if rid in writers else PROMPT_LEN] for rid, tokens in finished.items()):
        raise Mismatch("Nobody starves, but the tokens of a request have changed.")
    return f"Three writers and forty prompts: nobody waits longer than {LONGEST_WAIT} steps, and the budget is kept."


def _expect_no_gap(what: str, steps: Sequence[int], why: str) -> None:
    for before, after in pairwise(steps):
        if after - before > LONGEST_WAIT:
            raise Mismatch(f"{what} in step {before}, and the next one in step {after}. {why}")
