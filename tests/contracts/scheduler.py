"""Contract of the scheduler of m2: who runs in the next step, and what becomes of it.

It runs on the test-bed, with a model that is a rule (`tests/testbed`).
"""

import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from m2_continuous_batching.kv_manager import SlotManager
from tests.contracts.part import Broken, Part, same
from tests.testbed.bed import Step, make_bed
from tests.testbed.fakes import answer

PART = Part(
    name="scheduler",
    target="m2_continuous_batching.scheduler:Scheduler",
    lesson="docs/m2_continuous_batching.md#scheduler-two-phases-two-limits-one-rule",
    starter="MyScheduler",
    role="scheduler",
    variant="m2_continuous_batching-padded",
)


class Run:
    """A scheduler on the test-bed. It writes down what happens, for the learner."""

    def __init__(self, part: Any, *, max_num_seqs: int = 4, budget: int = 32, **settings: Any) -> None:
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
        self.bed = make_bed(scheduler_class=part, **limits, **{"checked": False} | settings)
        self.done = [f"max_num_seqs={max_num_seqs}, max_num_batched_tokens={budget}"]
        self.told = ""

    def add(self, *prompt_lens: int, max_tokens: int = 9) -> None:
        """Let requests with prompts of these lengths arrive: r0, r1, and so on."""
        for length in prompt_lens:
            rid = self.bed.add(length, max_tokens)
            self.done.append(f"{rid} arrives: prompt {length}, max_tokens {max_tokens}")

    def abort(self, rid: str) -> None:
        self.bed.abort(rid)
        self.done.append(f"{rid} is aborted")

    def schedule(self) -> Any:
        """The decision alone; None if there is none."""
        self.done.append("schedule()")
        with self.judged():
            return self.bed.schedule()

    def step(self, *, abort: str = "", failing: Collection[str] = (), crash: bool = False) -> Step:
        """A whole step; `abort`: a request that is aborted while the model runs."""
        between = (lambda _: self.bed.abort(abort)) if abort else None
        accidents = f" (meanwhile {abort} is aborted)" * bool(abort) + " (the model raises)" * crash
        accidents += f" ({', '.join(failing)}: no token)" * bool(failing)
        self.done.append(f"a step{accidents}")
        with self.judged():
            step = self.bed.step(between=between, failing=failing, crash=crash)
        self.done[-1] += f": {step.counts}"
        return step

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Report what the test-bed asserts as a learner reads it."""
        try:
            yield
        except Broken:
            raise
        except AssertionError as error:
            hint = f"The test-bed reads every decision, the queues and the memory, and this does not fit. {self.told}"
            broken = str(error) or traceback.extract_tb(error.__traceback__)[-1].line or ""
            raise Broken(
                self.on, Said("decisions, queues and memory that agree"), Said(broken), hint.strip()
            ) from error

    @property
    def on(self) -> str:
        return "; ".join(self.done[:1] + ["..."] * (len(self.done) > 13) + self.done[1:][-12:])

    def same(self, got: Any, expected: Any, what: str = "", hint: str = "") -> None:
        same(got, expected, on=f"{self.on}; {what}" if what else self.on, hint=hint)


def tokens(output: Any) -> dict[str, int]:
    """The tokens of each request in a decision."""
    return {} if output is None else dict(output.num_scheduled_tokens)


def announced(step: Step) -> Any:
    """The requests whose end a step announces; None without a decision."""
    return None if step.output is None else sorted(step.output.finished_req_ids)


class Said(str):
    """A sentence, which is shown without quotation marks."""

    def __repr__(self) -> str:
        return str(self)


def test_an_idle_scheduler_schedules_nothing(part: Any) -> None:
    """Without requests there is nothing to compute: `schedule` returns None."""
    run = Run(part)
    run.same(run.schedule(), None, hint="A decision without a token is None.")


def test_requests_join_with_their_whole_prompts(part: Any) -> None:
    """Waiting requests join in the order of arrival, each with its whole prompt and with memory for it."""
    run = Run(part)
    run.add(9, 3, 5)
    output = run.schedule()
    run.same(tokens(output), {"r0": 9, "r1": 3, "r2": 5}, "the tokens of each request")
    blocks = {new.req_id: new.block_ids for new in output.scheduled_new_reqs}
    run.same(blocks, {"r0": [0], "r1": [1], "r2": [2]}, "their block ids", "`reserve` returns them.")
    queues = (run.bed.waiting(), run.bed.running())
    run.same(queues, ([], ["r0", "r1", "r2"]), "waiting, running", "A request that joins moves to `running`.")


def test_at_most_max_num_seqs_run(part: Any) -> None:
    """At most `max_num_seqs` requests run at a time."""
    run = Run(part, max_num_seqs=2)
    run.add(4, 4, 4)
    run.same(tokens(run.schedule()), {"r0": 4, "r1": 4}, "the tokens of each request")
    run.same(run.bed.waiting(), ["r2"], "waiting")


def test_no_request_overtakes_another(part: Any) -> None:
    """The first prompt that does not fit into the budget ends the admission."""
    run = Run(part, budget=10)
    run.add(6, 8, 3)
    hint = "r2 would fit, but r1 came first. If shorter prompts could overtake it, r1 might wait for ever."
    run.same(tokens(run.schedule()), {"r0": 6}, "the tokens of each request", hint)


def test_a_step_commits_its_tokens(part: Any) -> None:
    """After its prompt a request runs one token a step, the newest, at the position that equals its tokens with KV."""
    run = Run(part)
    run.add(9, 3)
    step = run.step()
    run.same(sorted(step.changed), ["r0", "r1"], "the requests that the update returns")
    first = {rid: answer(run.bed.requests[rid].prompt_token_ids, 1) for rid in ("r0", "r1")}
    run.same({rid: run.bed.said(rid) for rid in first}, first, "the output of each", "commit() appends the tokens.")
    output = run.schedule()
    run.same(tokens(output), {"r0": 1, "r1": 1}, "the tokens of each request")
    cached = output.scheduled_cached_reqs
    hint = "num_new_kv is the number of tokens that the step has run: after a prefill the whole prompt."
    run.same(cached.num_computed_tokens, [9, 3], "the positions of the new tokens", hint)


def test_a_request_that_has_ended_leaves_at_once(part: Any) -> None:
    """A request ends in the step that gives its last token, and its place and memory are free for the next one."""
    run = Run(part, max_num_seqs=2)
    run.add(4, max_tokens=1)
    run.add(4, 4, 4)
    step = run.step()
    run.same(step.ended, {"r0": "length"}, "the requests that ended", "commit() has marked it: it ends in this update.")
    run.same(list(run.bed.scheduler.requests), ["r1", "r2", "r3"], "the unfinished requests")
    owned = dict(run.bed.scheduler.kv_manager.owned())
    hint = "Memory is released in the update: after the last request no decision follows that could do it."
    run.same(owned, {"r1": [1]}, "the owners of memory", hint)
    step = run.step()
    run.same(step.joined, ["r2"], "the requests that join", "One place is free.")
    run.same(step.output.scheduled_new_reqs[0].block_ids, [0], "the block ids of r2", "Slot 0 is free again.")


def test_each_end_is_announced_once(part: Any) -> None:
    """The next decision announces each request that has ended, once; a step without a decision announces nothing."""
    run = Run(part)
    run.add(4, max_tokens=1)
    run.add(4, max_tokens=2)
    run.same(announced(run.step()), [], "finished_req_ids")
    run.same(announced(run.step()), ["r0"], "finished_req_ids", "r0 ended in the step before.")
    run.same(run.step().output, None, "the decision", "Both have ended: there is no token.")
    run.add(4)
    hint = "Empty the set only if a decision is returned, and then do so: r0 was announced before."
    run.same(announced(run.step()), ["r1"], "finished_req_ids", hint)
    run.same(announced(run.step()), [], "finished_req_ids", hint)


def test_prompts_go_before_decodes(part: Any) -> None:
    """Waiting prompts come first; the running requests share what they leave of the budget."""
    run = Run(part, budget=4)
    run.add(2, 2)
    run.step()
    run.add(3)
    hint = "A running request takes a token of the budget, too: none is left for r1."
    run.same(run.step().counts, {"r2": 3, "r0": 1}, "the tokens of each request", hint)


def test_a_request_that_was_left_out_goes_first(part: Any) -> None:
    """A running request without a token in one step is scheduled first in the next, before anyone joins."""
    run = Run(part, budget=4)
    run.add(2, 2)
    run.step()
    run.add(3, 4, max_tokens=4)
    run.step()
    hint = "r1 got nothing in the last step. It comes before the prompt of r3, which does not fit then."
    run.same(run.step().counts, {"r1": 1, "r0": 1, "r2": 1}, "the tokens of each request", hint)
    hint = "No request was left out in the last step, so the prompt may join."
    run.same(run.step().counts, {"r3": 4}, "the tokens of each request", hint)
    hint = "All three that ran were left out, and r3 has joined."
    run.same(run.step().counts, {"r0": 1, "r1": 1, "r2": 1, "r3": 1}, "the tokens of each request", hint)


class Refusing(SlotManager):
    """Slots that some requests cannot have. It notes what it is asked for."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int) -> None:
        super().__init__(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self.refused: tuple[str, ...] = ()
        self.reserved: list[tuple[str, int]] = []

    def can_hold(self, request_id: str, num_tokens: int) -> bool:
        return request_id not in self.refused and super().can_hold(request_id, num_tokens)

    def reserve(self, request_id: str, num_tokens: int) -> list[int]:
        self.reserved.append((request_id, num_tokens))
        return super().reserve(request_id, num_tokens)


def refuse(run: Run, *request_ids: str) -> list[tuple[str, int]]:
    """Let the KV manager refuse these requests, and no others. Returns what was reserved since the last time."""
    manager = run.bed.scheduler.kv_manager
    manager.refused = request_ids
    run.done.append(f"can_hold() is False for {', '.join(request_ids) or 'none'}")
    reserved, manager.reserved = manager.reserved, []
    return reserved


def test_nothing_runs_without_memory(part: Any) -> None:
    """A request joins, and a running one gets its token, only if the KV manager can hold it."""
    run = Run(part, kv_manager_class=Refusing)
    run.add(4, 3, 2)
    refuse(run, "r1")
    hint = "r1 does not fit, so it ends the admission: r2 does not overtake it."
    run.same(run.step().counts, {"r0": 4}, "the tokens of each request", hint)
    refuse(run, "r0")
    hint = "Ask `can_hold` for a running request, too: it may need more memory for its new token."
    run.same(run.step().counts, {"r1": 3, "r2": 2}, "the tokens of each request", hint)
    reserved = refuse(run)
    hint = "`reserve` only what `can_hold` has allowed."
    run.same(reserved, [("r1", 3), ("r2", 2)], "the calls of reserve() in the last step", hint)
    run.same(run.step().counts, {"r0": 1, "r1": 1, "r2": 1}, "the tokens of each request")
    reserved = refuse(run)
    hint = "The total of a running request is its tokens with KV, and one for the new token."
    run.same(sorted(reserved), [("r0", 5), ("r1", 4), ("r2", 3)], "the calls of reserve() in the last step", hint)


def test_a_left_out_request_without_memory_keeps_others_out(part: Any) -> None:
    """If a request that was left out cannot get its token even now, no request joins."""
    run = Run(part, kv_manager_class=Refusing)
    run.add(4, 3)
    run.step()
    refuse(run, "r1")
    run.same(run.step().counts, {"r0": 1}, "the tokens of each request")
    run.add(2)
    hint = "What r2 would take is what r1 waits for. The other running requests go on."
    run.same(run.step().counts, {"r0": 1}, "the tokens of each request", hint)
    refuse(run)
    run.same(run.step().counts, {"r1": 1, "r2": 2, "r0": 1}, "the tokens of each request", "Now r1 gets its token.")


def test_an_aborted_request_ends_at_the_update(part: Any) -> None:
    """A request that is marked to end gets no token, keeps its place and memory, and ends at the next update."""
    run = Run(part, max_num_seqs=2)
    run.add(4, 4, 4, 4)
    run.step()
    run.abort("r2")
    step = run.step()
    hint = "It waits, so it is in no decision. The update ends it all the same."
    run.same((step.ended, run.bed.waiting()), ({"r2": "abort"}, ["r3"]), "the ends, and who waits", hint)
    run.abort("r0")
    owned = dict(run.bed.scheduler.kv_manager.owned())
    run.same(owned, {"r0": [0], "r1": [1]}, "the owners of memory", "A forward may still write to it.")
    step = run.step()
    hint = "r0 gets no token, but its place is taken until the update: r3 does not join yet."
    run.same((step.counts, step.ended), ({"r1": 1}, {"r0": "abort"}), "tokens and ends", hint)
    said = run.bed.said("r1")
    step = run.step(abort="r1")
    run.same((step.counts, step.ended), ({"r3": 4, "r1": 1}, {"r1": "abort"}), "tokens and ends")
    run.same(run.bed.said("r1"), said, "the output of r1", "A marked request ends without its tokens of this step.")
    run.abort("r3")
    run.same(run.step().ended, {"r3": "abort"}, "the ends", "There is no decision, and still an update.")
    run = Run(part, budget=8)
    run.add(8, 4)
    run.abort("r0")
    step = run.step()
    hint = "r0 takes neither a place nor budget, and does not end the admission."
    run.same((step.counts, step.ended), ({"r1": 4}, {"r0": "abort"}), "tokens and ends", hint)


def test_a_failed_request_ends_alone(part: Any) -> None:
    """A request without a token after the step fails alone; if the model raises, all of the step fail."""
    run = Run(part)
    run.add(4, 4)
    run.step()
    step = run.step(failing=["r0"])
    hint = "r0 is scheduled but not in `sampled`: look there for the tokens of the others."
    run.same((step.ended, sorted(step.changed)), ({"r0": "error"}, ["r0", "r1"]), "the ends, who changed", hint)
    run.add(4)
    step = run.step(crash=True)
    hint = "`sampled` is empty, and both are marked."
    run.same(step.ended, {"r1": "error", "r2": "error"}, "the ends", hint)


def decision(before: dict[str, Any], lens: dict[str, int], max_num_seqs: int, budget: int) -> dict[str, int]:
    """The tokens of a step: who was left out, then whole prompts, then all others."""
    counts = dict.fromkeys((rid for rid in before["running"] if rid in before["left_out"]), 1)
    places, room = max_num_seqs - before["num_running"], budget - len(counts)
    for rid in before["waiting"]:
        if not places or lens[rid] > room:
            break
        counts[rid] = lens[rid]
        places, room = places - 1, room - lens[rid]
    others = [rid for rid in before["running"] if rid not in counts]
    return counts | dict.fromkeys(others[:room], 1)


def told(before: dict[str, Any], lens: dict[str, int]) -> str:
    """What a learner may know before a step."""
    waiting = ", ".join(f"{rid} ({lens[rid]} tokens)" for rid in before["waiting"]) or "nobody"
    running, left_out = (", ".join(before[name]) or "nobody" for name in ("running", "left_out"))
    marked = before["num_running"] - len(before["running"])
    more = f", and {marked} that will end" if marked else ""
    return f"Before this step: running {running}{more}; left out of the last step {left_out}; waiting {waiting}."


def test_any_traffic_is_served_by_the_rules(part: Any) -> None:
    """Whatever arrives, ends, fails and is aborted: every decision is that of the rules, and nothing is left."""
    rng = Random(1)
    for _ in range(30):
        max_num_seqs = rng.choice((1, 2, 3, 6))
        budget = max_num_seqs + rng.choice((0, 1, 3, 9))
        run = Run(part, max_num_seqs=max_num_seqs, budget=budget, max_model_len=24, checked=True)
        scheduler, lens, left_out = run.bed.scheduler, dict[str, int](), list[str]()
        for number in range(24):
            if rng.random() < 0.6 and number < 16:
                length = rng.randrange(1, budget + 1)
                run.add(length, max_tokens=rng.randrange(1, 6))
                lens[list(run.bed.requests)[-1]] = length
            if scheduler.requests and rng.random() < 0.1:
                run.abort(rng.choice(list(scheduler.requests)))
            before = {
                "running": [r.request_id for r in scheduler.running if not r.to_finish],
                "waiting": [r.request_id for r in scheduler.waiting if not r.to_finish],
                "num_running": len(scheduler.running),
                "left_out": left_out,
            }
            expected = decision(before, lens, max_num_seqs, budget)
            late = rng.choice([*scheduler.requests]) if scheduler.requests and rng.random() < 0.1 else ""
            failing = [rid for rid in expected if rng.random() < 0.03]
            run.told = f"{told(before, lens)} By the rules the tokens are {expected}."
            step = run.step(abort=late, failing=failing, crash=rng.random() < 0.03)
            run.same(step.counts, expected, "the tokens of the last step", told(before, lens))
            left_out = [rid for rid in before["running"] if rid not in expected]
        run.told = ""
        run.done.append("steps until all have ended")
        with run.judged():
            run.bed.drain(limit=200)
