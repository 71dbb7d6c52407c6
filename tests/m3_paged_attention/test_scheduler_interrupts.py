"""Steps whose result never comes: no wrong token, nothing held, no loop.

First by example: a decision is thrown away, before the model ran it or after, while blocks are on their way. Then by
brute force: Ctrl-C before every line of a step in which everything happens at once.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from m1_single_request import request as m1_request, request_updater
from m3_paged_attention import (
    admission,
    block_pool,
    input_batch,
    kv_cache_manager,
    parallel_sampling,
    preemption,
    recovery,
    request as request_module,
    request_queue,
    scheduler as scheduler_module,
    step_plan,
)
from tests.testbed import paged_runner
from tests.testbed.fakes import answer
from tests.testbed.interrupts import Interrupt, interrupted
from tests.testbed.paged import PagedBed, Squeezed, make_paged_bed

SCHEDULER: list[ModuleType] = [
    scheduler_module,
    admission,
    preemption,
    recovery,
    step_plan,
    kv_cache_manager,
    block_pool,
    request_queue,
    parallel_sampling,
    request_module,
    request_updater,
    m1_request,
]
RUNNER: list[ModuleType] = [input_batch, paged_runner]
MANY_STEPS = 200
EITHER_WAY = pytest.mark.parametrize("executed", [False, True], ids=["before the model ran", "after"])

# --- decisions that are thrown away -----------------------------------------------------------------------------------


@EITHER_WAY
def test_a_prompt_is_sent_as_new_again(executed: bool) -> None:
    bed = make_paged_bed(max_num_seqs=2, trace=True)
    bed.add(3), bed.add(5)
    lost = bed.interrupt(executed=executed)
    step = bed.step()
    assert step.joined == ["r0", "r1"] == [data.req_id for data in lost.scheduled_new_reqs]
    assert [event.reset for event in bed.events("step_lost")] == [("r0", "r1")]
    assert set(bed.drain().values()) == {"length"}


@EITHER_WAY
def test_whoever_decodes_goes_on_where_it_is_and_is_sent_in_full(executed: bool) -> None:
    bed = make_paged_bed(max_num_seqs=2, block_size=4, trace=True)
    bed.add(4, max_tokens=6), bed.add(5, max_tokens=6)
    bed.step()
    lost = bed.interrupt(executed=executed)
    step = bed.step()
    assert lost.num_scheduled_tokens == step.counts == {"r0": 1, "r1": 1}
    resumed = {data.req_id: (data.num_computed_tokens, data.block_ids) for data in step.output.scheduled_resumed_reqs}
    assert resumed == {"r0": (4, [1, 4]), "r1": (5, [2, 3])}, "r0 has its new block already"
    assert [event.reset for event in bed.events("step_lost")] == [()]
    assert bed.steps[-1].output.scheduled_cached_reqs.req_ids == []
    assert bed.step().output.scheduled_cached_reqs.req_ids == ["r0", "r1"]
    bed.drain()


def test_a_block_that_a_lost_step_brought_is_no_leak_if_the_budget_leaves_its_owner_out() -> None:
    bed = make_paged_bed(max_num_seqs=2, max_num_batched_tokens=4, block_size=4)
    bed.add(4, max_tokens=6)
    bed.step()
    bed.interrupt()
    bed.add(4)
    assert bed.step().counts == {"r1": 4}
    bed.drain()


@EITHER_WAY
@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
def test_a_preemption_in_a_step_that_was_lost(executed: bool, swap: bool) -> None:
    bed = make_paged_bed(num_blocks=5, block_size=4, swap=swap)
    bed.add(4, max_tokens=8), bed.add(4, max_tokens=8)
    for _ in range(5):
        bed.step()
    lost = bed.interrupt(executed=executed)
    assert bed.preempted() == ["r1"] and len(lost.blocks_to_swap_out) == (2 if swap else 0)
    bed.step()
    assert not bed.scheduler.kv_manager.swapped(), "nobody knows what the host holds"
    assert set(bed.drain().values()) == {"length"}


@EITHER_WAY
def test_a_swap_in_in_a_step_that_was_lost(executed: bool) -> None:
    bed = swapping_bed(checked=True)
    lost = bed.interrupt(executed=executed)
    assert lost.blocks_to_swap_in and lost.blocks_to_copy
    step = bed.step()
    assert step.output.blocks_to_swap_in == [], "it is computed again"
    bed.drain()


def test_a_request_that_stays_on_the_host_survives_a_lost_step() -> None:
    bed = make_paged_bed(num_blocks=5, block_size=4, swap=True)
    bed.add(4, max_tokens=8), bed.add(4, max_tokens=8)
    while not bed.preempted():
        bed.step()
    bed.interrupt()
    bed.step()
    assert list(bed.scheduler.kv_manager.swapped()) == ["r1"]
    bed.drain()
    assert bed.runner.num_written == 2 * 11


@EITHER_WAY
def test_a_family_that_starts_in_a_step_that_was_lost(executed: bool) -> None:
    bed = make_paged_bed(block_size=4)
    bed.add(6, max_tokens=4, n=3)
    bed.interrupt(executed=executed)
    assert bed.step().counts == {"r0/0": 6} and bed.running() == ["r0/0", "r0/1", "r0/2"]
    bed.interrupt(executed=executed)  # the copies of this one are lost: whose they were starts over
    bed.step()
    bed.drain()


def test_a_step_that_is_thrown_away_again_and_again_loses_nobody() -> None:
    bed = make_paged_bed(num_blocks=6, block_size=2, max_num_seqs=3, max_num_batched_tokens=6, swap=True)
    bed.add(2, max_tokens=3)
    for number in range(12):
        bed.add(1 + number % 6, max_tokens=1 + number % 3, n=1 + number % 2)
        bed.interrupt(executed=bool(number % 2))
        bed.interrupt()
        bed.step()
    assert set(bed.drain().values()) == {"length"}


@EITHER_WAY
def test_an_abort_after_a_lost_step(executed: bool) -> None:
    bed = swapping_bed(checked=True)
    bed.interrupt(executed=executed)
    bed.abort("family/1", "family/2", "waits")
    step = bed.step()
    assert {rid for rid, reason in step.ended.items() if reason == "abort"} == {"family/1", "family/2", "waits"}
    bed.drain()


# --- steps that fail --------------------------------------------------------------------------------------------------


def test_a_step_that_failed_with_blocks_on_their_way() -> None:
    """Nobody knows whether they were moved. Who was in the step fails; who was swapped out in it starts over."""
    bed = make_paged_bed(num_blocks=5, block_size=4, swap=True)
    bed.add(4, max_tokens=8), bed.add(4, max_tokens=8)
    for _ in range(5):
        bed.step()
    step = bed.step(crash=True)
    assert step.output.blocks_to_swap_out and step.ended == {"r0": "error"}
    assert not bed.scheduler.kv_manager.swapped() and bed.preempted() == ["r1"]
    step = bed.step()
    assert step.output.scheduled_resumed_reqs[0].num_computed_tokens == 0
    assert bed.drain() == {"r0": "error", "r1": "length"}


def test_a_failed_step_with_a_swap_in_and_forks() -> None:
    bed = swapping_bed(checked=True)
    step = bed.step(crash=True)
    assert set(step.ended.values()) == {"error"} and step.ended.keys() == step.counts.keys()
    bed.drain()


# --- Ctrl-C before every line -----------------------------------------------------------------------------------------


def swapping_bed(*, checked: bool = False) -> PagedBed:
    """A bed before a step in which everything but a preemption happens.

    family/0 decodes, `ends` decodes for the last time; family/1 comes back from host memory, family/2 starts on the
    blocks of a sibling and copies one, the twins join, one of them on the other's prompt; `waits` waits.
    """
    bed = make_paged_bed(block_size=4, max_num_seqs=6, swap=True, checked=checked, kv_manager_class=Squeezed)
    for number in range(3):
        bed.add(2, max_tokens=3, request_id=f"first-{number}")
    bed.add(2, max_tokens=4, request_id="ends")
    bed.add(6, max_tokens=9, n=3, request_id="family")
    bed.step()
    bed.step()
    bed.add(5, max_tokens=3, n=2, request_id="twins"), bed.add(3, max_tokens=2, request_id="waits")
    bed.scheduler.kv_manager.due = 1  # type: ignore[attr-defined]
    bed.step()
    assert bed.preempted() == ["family/1"] and bed.running() == ["ends", "family/0"]
    return bed


def preempting_bed() -> PagedBed:
    """A bed before a step with preemptions: r0 decodes, r1 ends, r2 is aborted; three siblings compete for blocks."""
    bed = make_paged_bed(num_blocks=14, block_size=2, max_num_seqs=6, swap=True, num_host_blocks=4, checked=False)
    bed.add(3, max_tokens=8), bed.add(2, max_tokens=4), bed.add(2, max_tokens=8)
    bed.add(3, max_tokens=7, n=3)
    for _ in range(3):
        bed.step()
    bed.add(4, max_tokens=3)
    bed.abort("r2")
    return bed


def recomputing_bed() -> PagedBed:
    bed = preempting_bed()
    bed.scheduler.swaps = False
    return bed


def giving_up_bed() -> PagedBed:
    """A bed before a step in which the only one that runs has outgrown the pool."""
    bed = make_paged_bed(num_blocks=2, block_size=2, checked=False)
    bed.add(2, max_tokens=8), bed.add(3, max_tokens=1)
    for _ in range(3):
        bed.step()
    return bed


BEDS: list[Callable[[], PagedBed]] = [swapping_bed, preempting_bed, recomputing_bed, giving_up_bed]
EVERY_BED = pytest.mark.parametrize("make", BEDS, ids=lambda make: make.__name__)


def before_every_line(
    modules: list[ModuleType], make: Callable[[], PagedBed], act: Callable[[PagedBed], Any]
) -> Iterator[tuple[PagedBed, dict[str, str], Interrupt]]:
    """Yields the bed, who was to end in it and why, and the interrupt, for each line of `modules` that `act` runs.

    Of a line that runs often, the first and the last time.
    """
    bed = make()
    with interrupted(0, modules) as whole:
        act(bed)
    assert whole.lines, "no line was seen"
    counts, times = Counter(whole.lines), Counter[str]()
    for number, line in enumerate(whole.lines, start=1):
        times[line] += 1
        if 1 < times[line] < counts[line]:
            continue
        bed = make()
        marked = {rid: request.to_finish.reason for rid, request in bed.requests.items() if request.to_finish}
        with interrupted(number, modules) as interrupt:
            act(bed)
        assert interrupt.where == line
        yield bed, marked, interrupt


def check_the_rest(bed: PagedBed, marked: dict[str, str]) -> None:
    """Drain a bed: everybody ends with the right tokens, nothing is left, and who comes later is served as ever."""
    kv_manager = bed.scheduler.kv_manager
    bed.step()  # the invariants hold again after one whole step
    bed.drain(limit=MANY_STEPS)
    for rid, request in bed.requests.items():
        params, prompt = request.sampling_params, request.prompt_token_ids
        fits = len(prompt) + params.max_tokens - 1 <= kv_manager.num_blocks * kv_manager.block_size
        expected = marked.get(rid, "length" if fits else "error")
        assert request.finish_reason is not None and request.finish_reason.reason == expected, rid
        whole = answer(prompt, params.max_tokens, seed=request.seed)
        assert bed.said(rid) == whole[: len(bed.said(rid))], rid
        assert expected != "length" or bed.said(rid) == whole, rid
    assert bed.runner.is_empty() and kv_manager.num_free == kv_manager.num_blocks
    later = bed.add(2, max_tokens=2, request_id="later")
    assert bed.drain()[later] == "length"


def check_each(modules: list[ModuleType], make: Callable[[], PagedBed], act: Callable[[PagedBed], Any]) -> None:
    """Interrupt `act` everywhere, then look at what comes of it."""
    for bed, marked, interrupt in before_every_line(modules, make, act):
        try:
            check_the_rest(bed, marked)
        except Exception as error:
            raise AssertionError(f"after an interrupt before {interrupt.where}: {error!r}") from error


@pytest.mark.sample(1)
@EVERY_BED
def test_schedule_can_be_interrupted_anywhere(make: Callable[[], PagedBed]) -> None:
    check_each(SCHEDULER, make, lambda bed: bed.scheduler.schedule())


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", BEDS[:2], ids=lambda make: make.__name__)
def test_a_step_can_be_interrupted_anywhere_in_the_runner(make: Callable[[], PagedBed]) -> None:
    check_each(RUNNER, make, lambda bed: bed.step())


@pytest.mark.sample(1)
@EVERY_BED
@pytest.mark.parametrize("failed", [False, True], ids=["of a result", "of a failure"])
def test_update_can_be_interrupted_anywhere(make: Callable[[], PagedBed], failed: bool) -> None:
    def executed_bed() -> PagedBed:
        bed: Any = make()
        output = bed.scheduler.schedule()
        if failed:
            bed.fail(output.num_scheduled_tokens, RuntimeError("the model crashed"))
        bed.decision = output, bed.result_of(None if failed or output.is_empty else bed.execute(output))
        return bed

    check_each(SCHEDULER, executed_bed, lambda bed: bed.scheduler.update_from_output(*bed.decision))  # type: ignore[attr-defined]


@pytest.mark.exhaustive
def test_the_step_after_an_interrupt_can_be_interrupted_anywhere() -> None:
    def interrupted_bed() -> PagedBed:
        bed = swapping_bed()
        bed.interrupt(executed=True)
        return bed

    check_each([scheduler_module, kv_cache_manager], interrupted_bed, lambda bed: bed.scheduler.schedule())


def test_an_abort_can_be_interrupted_anywhere_and_made_again() -> None:
    victims = ("twins", "family/0", "waits")
    whom = dict.fromkeys(["twins/0", "twins/1", "family/0", "waits"], "abort")
    for bed, _, interrupt in before_every_line(SCHEDULER, swapping_bed, lambda bed: bed.abort(*victims)):
        bed.abort(*victims)
        try:
            check_the_rest(bed, whom)
        except Exception as error:
            raise AssertionError(f"after an interrupt before {interrupt.where}: {error!r}") from error


@pytest.mark.sample(1)
@pytest.mark.parametrize("n", [1, 3])
def test_an_arrival_can_be_interrupted_anywhere_and_given_up(n: int) -> None:
    """The face gives up whatever it could not hand over, and may use the id again."""
    for bed, _, interrupt in before_every_line(SCHEDULER, swapping_bed, lambda bed: bed.add(2, n=n, request_id="late")):
        bed.abort("late")
        came = [rid for rid in ("late", "late/0", "late/1", "late/2") if rid in bed.scheduler.requests]
        bed.requests = {rid: one for rid, one in bed.requests.items() if "late" not in rid or rid in came}
        try:
            check_the_rest(bed, dict.fromkeys(came, "abort"))
            bed.add(2, n=n, request_id="late")
            bed.drain()
            assert bed.reported_ends.count("late") == (2 if came else 1)
        except Exception as error:
            raise AssertionError(f"after an interrupt before {interrupt.where}: {error!r}") from error
