"""Contract of the composer of m5: which tokens of which requests make a step."""

from random import Random
from typing import Any, NamedTuple

import numpy as np

from m5_chunked_prefill_spec.cost_table import CostTable
from tests.contracts.part import Broken, Part, same
from tests.testbed.pieces import make_pieces_bed

PART = Part(
    name="composer",
    target="m5_chunked_prefill_spec.batch_composer:DecodeFirst",
    lesson="docs/m5_chunked_prefill_spec.md#the-composer-the-order-in-which-a-step-is-filled",
    starter="MyDecodeFirst",
    variant="m5_chunked_prefill_spec-retracted",
)

BUDGET = "max_num_batched_tokens"
TABLE = CostTable((1, 101), (1.0, 101.0), context_ms=10.0, decode_context_ms=20.0)
"""A millisecond for each token, and some for the tokens before it: 0.01 of a prompt's, 0.02 of a decode's."""


class Batch(NamedTuple):
    """A batch, and what is in it: running requests, their drafts, and tokens of prompts."""

    decodes: int
    drafts: int
    prompt: int
    new_lens: np.ndarray
    seq_lens: np.ndarray


class Step:
    """The work of a step. It gives each batch once, and writes down the limits of prompts.

    `lens`: tokens of each running request. `drafts`: so many are proposed. `prompt`: tokens of prompts that wait.
    `room`: whether memory has room for them. `stuck`: no running request has room for its next token. `victims`: so
    many running requests have to make place for the prompt, which may preempt them. `start`: tokens that the prompt in
    pieces has behind it.
    """

    def __init__(
        self,
        budget: int,
        lens: list[int],
        *,
        drafts: int = 0,
        prompt: int = 0,
        room: bool = True,
        stuck: bool = False,
        victims: int = 0,
        start: int = 0,
    ) -> None:
        self.max_num_batched_tokens, self.lens, self.prefill_start = budget, list(lens), start
        self.drafts, self.prompt, self.room, self.stuck, self.victims = drafts, prompt, room, stuck, victims
        self.wants_prefill, self.may_preempt = prompt > 0, victims > 0
        self.asked: dict[str, Batch | None] = {}
        self.bounds = list[str]()
        self.on = f"a budget of {budget}; {len(lens)} requests run" + f", of {lens} tokens" * any(lens)
        parts = {
            f"{drafts} drafts are proposed": drafts,
            f"{prompt} tokens of prompts wait": prompt,
            f"{start} tokens of the prompt have KV": start,
            "no running request can go on": stuck,
            "the memory has no room for a prompt": not room,
            f"the prompt may preempt, and has a place only if {victims} running requests go": victims,
        }
        self.on = "; ".join([self.on, *(text for text, is_so in parts.items() if is_so)])

    @property
    def num_running(self) -> int:
        return len(self.lens)

    @property
    def running_lens(self) -> np.ndarray:
        return np.array(self.lens, dtype=np.int64) + 1

    def update_running_batch(self, max_draft_tokens: int) -> Batch | None:
        self._once("update_running_batch")
        if not self.lens or self.stuck:
            return None
        new_lens = np.ones(len(self.lens), dtype=np.int64)
        for number in range(min(self.drafts, max_draft_tokens)):
            new_lens[number % len(new_lens)] += 1
        num_drafts = int(new_lens.sum()) - len(new_lens)
        batch = Batch(len(self.lens), num_drafts, 0, new_lens, np.array(self.lens, dtype=np.int64) + new_lens)
        self.asked["update_running_batch"] = batch
        return batch

    def get_new_batch_prefill(self, num_tokens: int, bound_by: str = BUDGET) -> Batch | None:
        self._once("get_new_batch_prefill")
        self.bounds.append(bound_by)
        is_late = self.victims and "update_running_batch" in self.asked
        given = min(self.prompt, num_tokens)
        if given < 1 or not self.room or is_late:
            return None
        del self.lens[len(self.lens) - self.victims :]
        new_lens = np.array([given], dtype=np.int64)
        batch = Batch(0, 0, given, new_lens, new_lens + self.prefill_start)
        self.asked["get_new_batch_prefill"] = batch
        return batch

    def mix(self, prompts: Batch, decodes: Batch) -> Batch:
        if prompts is None or decodes is None:
            hint = "mix() needs two batches: return the one that there is."
            raise Broken(f"{self.on}; mix()", "two batches", [contents(prompts), contents(decodes)], hint)
        if [prompts.decodes, decodes.prompt] != [0, 0]:
            raise Broken(f"{self.on}; mix()", "first the prompts, then the decodes", "another order")
        lens = [np.concatenate(pair) for pair in ((prompts[3], decodes[3]), (prompts[4], decodes[4]))]
        return Batch(decodes.decodes, decodes.drafts, prompts.prompt, *lens)

    def _once(self, name: str) -> None:
        if name in self.asked:
            hint = "To ask for a batch gives its requests their slots: the second time they get others."
            raise Broken(self.on, f"{name}() once at most", "twice", hint)
        self.asked[name] = None


def contents(batch: Batch | None) -> dict[str, int] | None:
    """What is in a batch."""
    if batch is None:
        return None
    return {"decodes": batch.decodes, "drafts": batch.drafts, "prompt tokens": batch.prompt}


def composed(part: Any, step: Step, target: float | None = None) -> dict[str, int] | None:
    """What is in the step. Raises `Broken` if a batch is lost."""
    composer = part(target_gap_ms=target, cost_table=None if target is None else TABLE)
    found = contents(composer.compose(step))
    asked = [contents(batch) for batch in step.asked.values() if batch is not None]
    in_all = {name: sum(each[name] for each in asked if each) for name in asked[0] or {}} if asked else None
    if found != in_all:
        hint = "What was asked for has its slots, so it has to run: return both batches, mixed."
        raise Broken(step.on, f"all that was asked for: {in_all}", found, hint)
    return found


def same_step(
    part: Any,
    step: Step,
    *,
    decodes: int = 0,
    drafts: int = 0,
    prompt: int = 0,
    hint: str = "",
    target: float | None = None,
) -> None:
    """Compare what is in a step."""
    expected = {"decodes": decodes, "drafts": drafts, "prompt tokens": prompt}
    on = step.on if target is None else f"{step.on}; target_gap_ms={target:g}"
    same(composed(part, step, target), expected, on=on, hint=hint)


def test_running_requests_get_a_token(part: Any) -> None:
    """Without prompts every running request gets a token."""
    same_step(part, Step(32, [0] * 5), decodes=5)


def test_prompts_get_a_step_of_their_own(part: Any) -> None:
    """Without running requests prompts get the whole budget."""
    same_step(part, Step(32, [], prompt=100), prompt=32, hint="Nothing of the budget is kept for drafts of nobody.")
    same_step(part, Step(32, [], prompt=20), prompt=20)


def test_without_requests_there_is_no_batch(part: Any) -> None:
    """If no request can run, the step is None."""
    step = Step(32, [])
    same(composed(part, step), None, on=step.on)
    step = Step(32, [], prompt=10, room=False)
    same(composed(part, step), None, on=step.on)


def test_prompts_get_the_rest(part: Any) -> None:
    """Every running request gets a token, and prompts get the rest of the budget, to the last token."""
    hint = "5 of 32 tokens are taken, so 27 are left for prompts; then mix() makes one batch of both."
    same_step(part, Step(32, [0] * 5, prompt=100), decodes=5, prompt=27, hint=hint)
    same_step(part, Step(32, [0] * 5, prompt=8), decodes=5, prompt=8, hint=hint)


def test_a_full_step_has_no_prompt(part: Any) -> None:
    """Running requests that fill the budget leave prompts nothing: no stream waits for a prompt."""
    same_step(part, Step(5, [0] * 5, prompt=100), decodes=5, hint="Decodes come before prompts.")
    same_step(part, Step(6, [0] * 5, prompt=100), decodes=5, prompt=1)


def test_drafts_may_take_the_rest(part: Any) -> None:
    """Without prompts drafts may take all that is left of the budget."""
    same_step(part, Step(32, [0] * 5, drafts=99), decodes=5, drafts=27, hint="32 less a token for each of 5 requests.")
    same_step(part, Step(32, [0] * 5, drafts=6), decodes=5, drafts=6)


def test_drafts_leave_half_to_prompts(part: Any) -> None:
    """While a prompt waits, drafts take at most half of the rest, and prompts what drafts really leave."""
    hint = "Half of 27, rounded down, is for drafts. Prompts get the budget less all new_lens of the decodes."
    for drafts, taken in ((99, 13), (13, 13), (6, 6), (0, 0)):
        step = Step(32, [0] * 5, drafts=drafts, prompt=100)
        same_step(part, step, decodes=5, drafts=taken, prompt=27 - taken, hint=hint)
    same_step(part, Step(32, [0] * 5, drafts=99, prompt=4), decodes=5, drafts=13, prompt=4, hint=hint)


def test_one_batch_is_enough(part: Any) -> None:
    """If a prompt has no room the decodes run alone; if no request can decode, prompts get the whole budget."""
    same_step(part, Step(32, [0] * 5, prompt=100, room=False), decodes=5, hint="Return the batch that there is.")
    hint = "update_running_batch() may return None although requests run; their tokens are free for prompts then."
    same_step(part, Step(32, [0] * 5, prompt=100, stuck=True), prompt=32, hint=hint)


def test_a_step_stays_within_the_target(part: Any) -> None:
    """Beside decodes a prompt has no more tokens than the target allows; the drafts of the step count."""
    hint = "Use `_limit` with the budget that is left, and the new_lens and seq_lens of the decodes."
    same_step(part, Step(200, [0], prompt=300), decodes=1, prompt=38, target=39.5, hint=hint)
    same_step(part, Step(200, [0] * 10, prompt=300), decodes=10, prompt=29, target=39.5, hint=hint)
    same_step(part, Step(200, [0] * 10, drafts=5, prompt=300), decodes=10, drafts=5, prompt=24, target=39.5, hint=hint)
    step = Step(200, [200, 300], prompt=300, start=100)
    most = max(n for n in range(198) if 2 + n + 0.02 * (201 + 301) + 0.01 * n * 100 <= 60)
    same_step(part, step, decodes=2, prompt=most, target=60.0, hint=hint)
    same(step.bounds, ["target_gap_ms"], on=f"{step.on}; bound_by", hint="`_limit` returns the name as well.")
    step = Step(20, [0], prompt=300)
    same_step(part, step, decodes=1, prompt=19, target=60.0, hint=hint)
    same(step.bounds, [BUDGET], on=f"{step.on}; bound_by", hint="`_limit` returns the name as well.")


def test_the_target_is_for_streams(part: Any) -> None:
    """A step without decodes is not cut by the target: no stream waits for it."""
    same_step(part, Step(200, [], prompt=300), prompt=200, target=20.0, hint="The whole budget, without `_limit`.")
    same_step(part, Step(200, [0] * 3, prompt=300, stuck=True), prompt=200, target=20.0, hint="No request decodes.")


def test_a_prompt_that_may_preempt_goes_first(part: Any) -> None:
    """A prompt that may preempt is asked for first; the requests that still run then get their tokens and drafts."""
    hint = "With their next slots running requests cannot be preempted: ask for the prompts before the decodes."
    same_step(part, Step(32, [0] * 5, prompt=20, victims=2), decodes=3, prompt=20, hint=hint)
    hint = "A token for each of the 5 running requests is kept, so prompts get 27; the preempted ones need none."
    same_step(part, Step(32, [0] * 5, prompt=99, victims=2), decodes=3, prompt=27, hint=hint)
    hint = "Drafts may take the budget less the tokens of the prompts, less a token for each that still runs."
    same_step(part, Step(32, [0] * 5, prompt=20, victims=2, drafts=99), decodes=3, drafts=9, prompt=20, hint=hint)
    same_step(part, Step(32, [0] * 5, prompt=20, victims=5, drafts=99), prompt=20, hint="Perhaps none runs any more.")
    step = Step(32, [0] * 5, prompt=20, victims=2, drafts=99, room=False)
    same_step(part, step, decodes=5, drafts=27, hint="No prompt has room: the decodes run alone.")
    step = Step(200, [200, 300], prompt=300, victims=1)
    most = max(n for n in range(198) if 2 + n + 0.02 * (201 + 301) <= 60)
    hint = "The target counts one new token for each running request, and running_lens in all."
    same_step(part, step, decodes=1, prompt=most, target=60.0, hint=hint)
    step = Step(32, [0] * 5, victims=2, drafts=99)
    same_step(part, step, decodes=5, drafts=27, hint="Without a prompt it is a step of decodes.")


def test_no_stream_waits_for_a_long_prompt(part: Any) -> None:
    """In a real scheduler streams get a token in every step, while a prompt of 100 tokens runs in pieces."""
    bed = make_pieces_bed(max_num_batched_tokens=32, page_size=4)
    bed.add(5, max_tokens=12), bed.add(5, max_tokens=12), bed.step()
    bed.add(100, max_tokens=3)
    on = "two streams, and a prompt of 100 tokens that arrives later; a budget of 32"
    steps = [bed.step().output for _ in range(4)]
    hint = "Each step has a token for both streams, and what they leave is for the prompt."
    streams = [sorted(step.decodes) for step in steps]
    same(streams, [["r0", "r1"]] * 4, on=f"{on}: the streams in each of 4 steps", hint=hint)
    pieces = [step.prompts for step in steps]
    same(pieces, [{"r2": 30}] * 3 + [{"r2": 10}], on=f"{on}: prompt tokens in each step", hint=hint)
    bed.drain()


def test_an_urgent_prompt_starts_at_once(part: Any) -> None:
    """In a real scheduler a prompt of high priority starts in a full engine, and one running request waits for it."""
    bed = make_pieces_bed(
        max_num_seqs=3, max_num_batched_tokens=32, schedule_policy="priority", priority_preemption=True
    )
    for priority in (0, 5, 0):
        bed.add(6, 9, priority=priority), bed.step()
    bed.add(6, 4, priority=20)
    step = bed.step().output
    on = "three of three requests run, with priorities 0, 5, 0; one of priority 20 arrives: the next step"
    got = (step.prompts, sorted(step.decodes), bed.waiting())
    hint = "The newest of the lowest priority makes place for it, the others decode in the same step."
    same(got, ({"r3": 6}, ["r0", "r1"], ["r2"]), on=f"{on}; prompts, decodes, and who waits", hint=hint)
    bed.drain()


def test_it_is_right_for_many_steps(part: Any) -> None:
    """For any requests, drafts, prompts and limits the step is the one that these rules give."""
    rng = Random(1)
    for _ in range(300):
        lens = [rng.choice([0, 100, 400]) for _ in range(rng.randint(0, 8))]
        budget, drafts, prompt = rng.randint(max(len(lens), 1), 60), rng.choice([0, 5, 99]), rng.choice([0, 7, 200])
        target = rng.choice([None, None, 30.0])
        settings: dict[str, Any] = {"drafts": drafts, "prompt": prompt, "room": rng.random() < 0.8}
        settings |= {"stuck": rng.random() < 0.1, "victims": rng.choice([0, 0, 1, 2]) if len(lens) > 1 else 0}
        step, expected = Step(budget, lens, **settings), by_hand(Step(budget, lens, **settings), target)
        on = f"{step.on}; target_gap_ms={target}"
        same(composed(part, step, target), expected, on=on, hint=advice(step, target, expected))


def advice(step: Step, target: float | None, expected: dict[str, int] | None) -> str:
    """Which of the rules decides."""
    within = ", within the target" if target is not None else ""
    if expected is None:
        return "There is nothing to run, so there is no batch: None."
    if step.may_preempt and step.wants_prefill:
        return f"The prompt may preempt: first the prompts{within}, then the decodes of those that still run."
    if not expected["decodes"]:
        return "No request decodes, so the prompts get the whole budget, whatever the target is."
    if step.wants_prefill:
        return f"First the decodes, with drafts in at most half of the rest; then the prompts{within}."
    return "No prompt waits: the drafts may take all that the decodes leave."


def by_hand(step: Step, target: float | None) -> dict[str, int] | None:
    """What is in a step by the rules, token by token."""
    num_running, budget = step.num_running, step.max_num_batched_tokens
    prompt, drafts = step.prompt if step.room else 0, step.drafts

    def pieces(most: int, num_new: int, context: int) -> int:
        """Tokens of prompts beside decodes."""
        given = 0
        while given < min(most, prompt):
            if target is not None and given >= 16 and TABLE.step(num_new + given + 1, 0, context) > target:
                break
            given += 1
        return given

    if step.may_preempt and step.wants_prefill:
        given = pieces(budget - num_running, num_running, sum(step.running_lens.tolist()))
        still = 0 if step.stuck else num_running - step.victims * (given > 0)
        drafts = min(drafts, budget - given - still) if still else 0
        return result(still, drafts, given)
    still = 0 if step.stuck else num_running
    if not still:
        return result(0, 0, min(budget, prompt))
    rest = budget - num_running
    drafts = min(drafts, rest // 2 if step.wants_prefill else rest)
    new_lens = [1 + drafts // still + (number < drafts % still) for number in range(still)]
    context = sum(new * (length + new) for new, length in zip(new_lens, step.lens, strict=True))
    return result(still, drafts, pieces(rest - drafts, still + drafts, context) if step.wants_prefill else 0)


def result(decodes: int, drafts: int, prompt: int) -> dict[str, int] | None:
    """The contents of a step; None without any."""
    return {"decodes": decodes, "drafts": drafts, "prompt tokens": prompt} if decodes or prompt else None
