"""Who is let in beside a prompt in pieces, and that nobody is overtaken for ever.

Most of it is the adder's and the policy's; what is tested here is what `Admission` adds: the count of those who were
overtaken, failures that end nobody but those they are about, and when nobody is asked at all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from m1_single_request.errors import ConfigError, PartError
from m4_radix_cache.prefill_adder import AddReqResult
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_policy import Order
from m5_chunked_prefill_spec.batch_composer import MAX_PASSED_OVER
from m5_chunked_prefill_spec.prefill_adder import PrefillAdder
from m5_chunked_prefill_spec.schedule_policy import SchedulePolicy
from tests.m5_chunked_prefill_spec.engines import MakeEngine, Recorder, check_drained, greedy, ids, run, setting
from tests.testbed.pieces import PiecesBed, make_pieces_bed


class NewestFirst(SchedulePolicy):
    """The worst for whoever came early."""

    def calc_priority(self, waiting: Sequence[Req], prefilling: Sequence[Req]) -> Order:
        return Order(sorted(waiting, key=lambda req: -req.number), [])


def overtaken(bed: PiecesBed, rid: str, arrive: Any, *, most_steps: int = 400) -> int:
    """Let there be newcomers in every step until `rid` runs; in how many steps some of them went before it."""
    number, count = bed.reqs[rid].number, 0
    for _ in range(most_steps):
        while len(bed.waiting()) < 5:
            arrive()
        waited = rid in bed.waiting()
        before = {one for one, req in bed.reqs.items() if one in bed.waiting() and req.number > number}
        decision = bed.step().output
        if rid in decision.prompts:
            return count
        count += waited and bool(before & set(decision.prompts))
    raise AssertionError(f"{rid} still waits after {most_steps} steps")


@pytest.mark.parametrize("schedule", ["decode_first", "prefill_first"])
def test_nobody_is_overtaken_in_more_steps_than_that(schedule: Any) -> None:
    bed = make_pieces_bed(
        schedule=schedule, policy_class=NewestFirst, max_num_seqs=2, max_num_batched_tokens=16, num_tokens=64
    )
    bed.add(5, max_tokens=3), bed.add(5, max_tokens=3), bed.step()
    old = bed.add(20, max_tokens=2)
    assert overtaken(bed, old, lambda: bed.add(6, max_tokens=2)) == MAX_PASSED_OVER
    bed.drain()


def test_of_several_who_were_overtaken_too_often_the_oldest_comes_first() -> None:
    bed = make_pieces_bed(policy_class=NewestFirst, max_num_seqs=1, max_num_batched_tokens=16)
    bed.add(4, max_tokens=2), bed.step()
    first, second = bed.add(4, max_tokens=2), bed.add(4, max_tokens=2)
    overtaken(bed, first, lambda: bed.add(4, max_tokens=1))
    while not bed.pieces_of(second):
        bed.add(4, max_tokens=1)
        started = bed.step().output.prompts
        assert not started or list(started) == [second], "and right after it the second"
    bed.drain()


def test_whoever_came_earlier_overtakes_nobody() -> None:
    """However long somebody has waited for those who came before it, the policy goes on to decide."""
    bed = make_pieces_bed(schedule_policy="priority", max_num_seqs=1, max_num_batched_tokens=16)
    for _ in range(MAX_PASSED_OVER + 1):
        bed.add(4, max_tokens=1, priority=2)
    least, better = bed.add(4, max_tokens=1), bed.add(4, max_tokens=1, priority=1)
    bed.drain()
    assert [rid for decision in bed.decisions for rid in decision.prompts][-2:] == [better, least]


def test_whoever_lost_its_place_goes_before_those_who_were_overtaken() -> None:
    bed = make_pieces_bed(policy_class=NewestFirst, max_num_seqs=2, max_num_batched_tokens=16)
    bed.add(4, max_tokens=200), bed.add(4, max_tokens=2), bed.step()
    old = bed.add(4, max_tokens=2)
    while bed.scheduler.prompts.passed_over.get(old, 0) < MAX_PASSED_OVER:
        bed.add(4, max_tokens=2), bed.step(), bed.step()
    while len(bed.running()) < 2:
        bed.add(4, max_tokens=2), bed.step()
    bed.pools.due = 1
    bed.step(), bed.pools.release()
    (lost,) = bed.retracted()
    assert lost != old
    while lost not in (started := bed.step().output.prompts):
        assert not started
    bed.abort(*bed.requests)
    bed.drain()


def test_whoever_does_not_wait_any_more_is_not_counted_any_more() -> None:
    bed = make_pieces_bed(policy_class=NewestFirst, max_num_seqs=1)
    bed.add(4, max_tokens=2), bed.step()
    bed.add(4, max_tokens=2), bed.add(4, max_tokens=2), bed.add(4, max_tokens=2)
    while not bed.pieces_of("r3"):
        bed.step()
    assert bed.scheduler.prompts.passed_over == {"r1": 1, "r2": 1}
    bed.abort("r1"), bed.step()
    assert bed.scheduler.prompts.passed_over == {"r2": 1}
    bed.drain()
    assert bed.scheduler.prompts.passed_over == {}


# --- when nobody is asked ---------------------------------------------------------------------------------------------


def test_a_prompt_in_pieces_goes_on_though_nobody_else_is_let_in() -> None:
    """Behind its first piece there is no memory for r1, and it is not asked again while r0 is in pieces."""
    bed = make_pieces_bed(num_tokens=64, max_num_batched_tokens=12, trace=True)
    bed.add(40, max_tokens=5), bed.add(40, max_tokens=5)
    bed.step(), bed.step(), bed.step(), bed.step()
    assert bed.pieces_of("r0") == [12, 12, 12, 4] and bed.said("r0")
    bed.drain()


def test_nobody_is_let_in_beside_a_prompt_that_is_cut_again(make_engine: MakeEngine) -> None:
    """Prompts go first and are cut at a page: of a step of 10 tokens a piece of 8 leaves 2, and r1 has no more. But it
    would wait for r0's last piece to get its second token; until then its place and its memory are nobody's."""
    engine = make_engine(**setting(4, 10, page_size=4, schedule="prefill_first", policy="fcfs"))
    recorder = Recorder(engine.tracer)
    engine.add_request(ids(28), greedy(2), request_id="r0")
    engine.add_request([7, 8], greedy(2), request_id="r1")
    run(engine)
    steps = [dict(zip(batch.rids, batch.extend_lens, strict=True)) for batch in recorder.events("batch")]
    assert steps == [{"r0": 8}, {"r0": 8}, {"r0": 8}, {"r0": 4, "r1": 2}, {"r0": 1, "r1": 1}]


# --- parts that fail --------------------------------------------------------------------------------------------------


class Broken(PrefillAdder):
    """Raises in one of its verbs, for one request."""

    verb, rid = "", ""

    def _count(self, verb: str, req: Req) -> None:
        if (verb, req.rid) == (self.verb, self.rid):
            raise RuntimeError("lost count")

    def add_chunked_req(self, req: Req) -> AddReqResult:
        self._count("chunk", req)
        return super().add_chunked_req(req)

    def add_one_req(self, req: Req) -> AddReqResult:
        self._count("one", req)
        return super().add_one_req(req)


def broken(verb: str, rid: str) -> type[Broken]:
    return type("Broken", (Broken,), {"verb": verb, "rid": rid})


def third_fails() -> Callable[..., PrefillAdder]:
    """A function that builds adders, and fails in the third step: one prompt is in pieces, another one waits."""
    calls: list[int] = []

    def make(**settings: Any) -> PrefillAdder:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no adder")
        return PrefillAdder(**settings)

    return make


class FailsBesideAPiece(SchedulePolicy):
    def calc_priority(self, waiting: Sequence[Req], prefilling: Sequence[Req]) -> Order:
        if prefilling:
            raise RuntimeError("cannot decide")
        return super().calc_priority(waiting, prefilling)


FAILING: list[tuple[str, Any, str]] = [
    ("prefill_adder", broken("one", "r1"), "Broken"),
    ("prefill_adder", broken("chunk", "r1"), "Broken"),
    ("prefill_adder", broken("one", "r2"), "Broken"),
    ("prefill_adder", third_fails(), "make"),
    ("schedule_policy", FailsBesideAPiece, "FailsBesideAPiece"),
]


@pytest.mark.parametrize(("role", "part", "name"), FAILING)
def test_the_engine_survives_a_part_that_fails(make_engine: MakeEngine, role: str, part: Any, name: str) -> None:
    engine = make_engine({role: part}, **setting(4, 16))
    engine.add_request(ids(5), greedy(12), request_id="r0")
    engine.step()
    for rid, length in (("r1", 25), ("r2", 5)):
        engine.add_request(ids(length, 20), greedy(3), request_id=rid)
    outputs = run(engine)
    assert outputs.keys() == {"r0", "r1", "r2"}
    for output in outputs.values():
        assert isinstance(output.error, PartError) and f"the part '{role}' ({name})" in str(output.error)
    assert engine.generate(ids(5), greedy(12)).finish_reason == "length"
    check_drained(engine)


def test_a_policy_of_m4_is_refused_before_the_first_request(make_engine: MakeEngine) -> None:
    """In the first step that completes a prompt beside waiting requests it would fail all of them."""

    class OfM4(SchedulePolicy):
        def calc_priority(self, waiting: Sequence[Req]) -> Order:  # type: ignore[override]
            return Order(list(waiting), [])

    with pytest.raises(ConfigError, match=r"'schedule_policy': OfM4 has a method calc_priority\(\)"):
        make_engine({"schedule_policy": OfM4}, **setting(4, 16))
