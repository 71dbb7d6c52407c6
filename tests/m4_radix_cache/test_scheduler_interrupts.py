"""Steps whose result never comes: no wrong token, nothing held, no loop.

First by example: a decision is thrown away, before the model ran it or after; the cache survives that. Then by brute
force: Ctrl-C before every line of steps in which everything happens at once; the books cannot be trusted then, so the
cache is flushed and everybody starts over.
"""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from m1_single_request import request as m1_request, request_updater
from m3_paged_attention import parallel_sampling, preemption
from m4_radix_cache import (
    model_worker_batch,
    new_token_ratio,
    prefill_adder,
    recovery,
    request as request_module,
    retraction,
    sampling_batch_info,
    schedule_batch,
    schedule_policy,
    scheduler as scheduler_module,
    scheduler_base,
)
from m4_radix_cache.mem_cache import (
    allocator,
    base_prefix_cache,
    block_hash_cache,
    eviction,
    radix_cache,
    radix_key,
    req_to_token_pool,
)
from tests.testbed.interrupts import Interrupt, interrupted
from tests.testbed.radix import CACHES, RadixBed, make_radix_bed
from tests.testbed.radix_runner import answer_of

SCHEDULER: list[ModuleType] = [
    scheduler_module,
    scheduler_base,
    schedule_batch,
    retraction,
    recovery,
    request_module,
    parallel_sampling,
    request_updater,
    m1_request,
]
REST: list[ModuleType] = [
    allocator,
    base_prefix_cache,
    block_hash_cache,
    eviction,
    model_worker_batch,
    new_token_ratio,
    preemption,
    prefill_adder,
    radix_cache,
    radix_key,
    req_to_token_pool,
    sampling_batch_info,
    schedule_policy,
]
MANY_STEPS = 200
EITHER_WAY = pytest.mark.parametrize("executed", [False, True], ids=["before the model ran", "after"])
EVERY_CACHE = pytest.mark.parametrize("prefix_cache", CACHES)

# --- decisions that are thrown away -----------------------------------------------------------------------------------


@EITHER_WAY
@EVERY_CACHE
def test_prompts_of_a_lost_step_run_again(executed: bool, prefix_cache: str) -> None:
    bed = make_radix_bed(max_num_seqs=2, trace=True, prefix_cache=prefix_cache)
    bed.add(3), bed.add(5)
    lost = bed.interrupt(executed=executed)
    step = bed.step()
    assert step.counts == lost.num_scheduled_tokens == {"r0": 3, "r1": 5}
    assert [event.reset for event in bed.events("step_lost")] == [("r0", "r1")]
    assert set(bed.drain().values()) == {"length"}


@EITHER_WAY
@EVERY_CACHE
def test_whoever_decoded_in_a_lost_step_comes_back_to_what_the_cache_has_of_it(
    executed: bool, prefix_cache: str
) -> None:
    bed = make_radix_bed(max_num_seqs=2, page_size=2, prefix_cache=prefix_cache)
    bed.add(4, max_tokens=6), bed.add(5, max_tokens=6)
    bed.step(), bed.step()
    assert bed.interrupt(executed=executed).num_scheduled_tokens == {"r0": 1, "r1": 1}
    step = bed.step()
    hits = {"r0": 0, "r1": 0} if prefix_cache == "chunk" else {"r0": 4, "r1": 4}
    assert step.output.mode == "extend" and step.output.hits == hits
    bed.drain()


@EITHER_WAY
def test_what_was_cached_before_a_lost_step_is_still_there_and_what_it_computed_is_not(executed: bool) -> None:
    bed = make_radix_bed()
    bed.add(9), bed.drain()
    bed.add(14, same_as="r0")
    lost = bed.interrupt(executed=executed)
    assert lost.hits == {"r1": 9}
    assert bed.step().output.hits == {"r1": 9}
    bed.drain()


@EITHER_WAY
def test_those_who_wait_while_a_prompt_is_lost_go_on_where_they_are(executed: bool) -> None:
    bed = make_radix_bed(trace=True)
    bed.add(4, max_tokens=6), bed.step(), bed.step()
    bed.add(5)
    bed.interrupt(executed=executed)
    assert bed.running() == ["r0", "r1"]
    assert bed.step().counts == {"r1": 5} and bed.step().counts == {"r0": 1, "r1": 1}
    assert [event.reset for event in bed.events("step_lost")] == [("r1",)]
    assert bed.reqs["r0"].num_retractions == 0
    bed.drain()


@EITHER_WAY
def test_a_lost_step_that_filled_the_memory_does_not_leave_it_full(executed: bool) -> None:
    """The last attempt to let somebody in failed, and then whoever had come in was sent back."""
    bed = make_radix_bed(num_tokens=8, max_num_seqs=3)
    bed.add(3), bed.add(3)
    assert bed.interrupt(executed=executed).rids == ("r0",)
    assert bed.drain(limit=MANY_STEPS) == {"r0": "length", "r1": "length"}


@EITHER_WAY
@EVERY_CACHE
def test_a_retraction_in_a_step_that_was_lost(executed: bool, prefix_cache: str) -> None:
    bed = make_radix_bed(prefix_cache=prefix_cache)
    bed.add(4, max_tokens=8), bed.add(4, max_tokens=8), bed.add(4, max_tokens=8)
    bed.step(), bed.step()
    bed.pools.due = 1
    assert bed.interrupt(executed=executed).rids == ("r0", "r1")
    assert bed.retracted() == ["r2"]
    bed.pools.release()
    assert bed.step().output.rids == ("r0", "r1", "r2"), "the oldest first"
    bed.drain()


@EITHER_WAY
def test_an_abort_after_a_lost_step(executed: bool) -> None:
    bed = make_radix_bed(max_num_seqs=2)
    for _ in range(4):
        bed.add(4, max_tokens=8)
    bed.step(), bed.step()
    bed.interrupt(executed=executed)
    bed.abort("r1", "r3")
    assert bed.step().ended == {"r1": "abort", "r3": "abort"}
    assert bed.drain()["r0"] == "length"


@EITHER_WAY
def test_an_abort_before_a_step_that_is_lost(executed: bool) -> None:
    """It runs no more, and is not in the batch that is sent back."""
    bed = make_radix_bed(max_num_seqs=2)
    for _ in range(3):
        bed.add(4, max_tokens=8)
    bed.step(), bed.step()
    bed.abort("r1")
    assert bed.interrupt(executed=executed).rids == ("r0",)
    assert bed.step().ended == {"r1": "abort"}
    bed.drain()


def test_a_step_that_is_thrown_away_again_and_again_loses_nobody() -> None:
    bed = make_radix_bed(num_tokens=24, page_size=2, max_num_seqs=3, max_num_batched_tokens=8, conservativeness=0)
    bed.add(2, max_tokens=3)
    for number in range(12):
        bed.add(1 + number % 6, max_tokens=1 + number % 3, n=1 + number % 2, same_as="r0")
        bed.interrupt(executed=bool(number % 2))
        bed.interrupt()
        bed.step()
    assert set(bed.drain().values()) == {"length"}


# --- Ctrl-C before every line -----------------------------------------------------------------------------------------


def extending_bed(prefix_cache: str = "radix") -> RadixBed:
    """A bed before a step that lets several in.

    `first` and r1 decode; r1 was aborted. r2 and r3 hit what a request before them left, the family and r4 share a
    prompt that nobody has computed, `once` ends with its first token, and for all that something must be evicted.
    """
    bed = make_radix_bed(
        num_tokens=40,
        page_size=2,
        max_num_seqs=6,
        prefix_cache=prefix_cache,
        conservativeness=0,
        max_num_batched_tokens=64,
        checked=False,
    )
    bed.add(9, max_tokens=3, request_id="before"), bed.add(9, max_tokens=2), bed.drain()
    bed.add(3, max_tokens=4, request_id="first", repetition_penalty=1.2), bed.add(3, max_tokens=9, request_id="gone")
    bed.step()
    bed.add(8, max_tokens=2, same_as="before"), bed.add(5, max_tokens=3, same_as="before", frequency_penalty=0.3)
    bed.add(5, max_tokens=1, request_id="once"), bed.add(4, max_tokens=2, n=2, request_id="family")
    bed.abort("gone")
    return bed


def decoding_bed(prefix_cache: str = "radix") -> RadixBed:
    """A bed before a step of decodes: one must go, one ends, one was aborted, one waits."""
    bed = make_radix_bed(
        num_tokens=28, page_size=2, max_num_seqs=5, prefix_cache=prefix_cache, conservativeness=0, checked=False
    )
    bed.add(9, max_tokens=2, request_id="before"), bed.drain()
    bed.add(3, max_tokens=7, request_id="stays", repetition_penalty=1.2), bed.step()
    bed.add(4, max_tokens=3, request_id="ends"), bed.step()
    bed.add(2, max_tokens=7, request_id="gone"), bed.step()
    bed.add(4, max_tokens=6, request_id="victim", same_as="before"), bed.step()
    bed.step()
    bed.add(17, max_tokens=2, request_id="waits")
    bed.abort("gone")
    bed.pools.due = 1
    return bed


def outgrown_bed(prefix_cache: str = "radix") -> RadixBed:
    """A bed before a step in which the only one that runs has outgrown the pool."""
    bed = make_radix_bed(num_tokens=4, page_size=2, prefix_cache=prefix_cache, checked=False)
    bed.add(2, max_tokens=8), bed.add(1, max_tokens=1)
    for _ in range(3):
        bed.step()
    return bed


def hash_bed() -> RadixBed:
    return extending_bed("hash")


BEDS: list[Callable[[], RadixBed]] = [extending_bed, decoding_bed, outgrown_bed]
EVERY_BED = pytest.mark.parametrize("make", BEDS, ids=lambda make: make.__name__)


def before_every_line(
    modules: list[ModuleType],
    make: Callable[[], RadixBed],
    act: Callable[[RadixBed], Any],
    *,
    one_of: int = 1,
    first: int = 0,
) -> Iterator[tuple[RadixBed, dict[str, str], Interrupt]]:
    """Yields the bed, who was to end in it and why, and the interrupt, for each line of `modules` that `act` runs.

    A line that runs often is interrupted once, another time for each line. `one_of`: only every
    so many-th line, from the `first` one on.
    """
    bed = make()
    with interrupted(0, modules) as whole:
        act(bed)
    assert whole.lines, "no line was seen"
    places: dict[str, list[int]] = {}
    for number, line in enumerate(whole.lines, start=1):
        places.setdefault(line, []).append(number)
    for place, (line, numbers) in enumerate(places.items()):
        if place % one_of != first % one_of:
            continue
        bed = make()
        marked = {rid: request.to_finish.reason for rid, request in bed.requests.items() if request.to_finish}
        with interrupted(numbers[place % len(numbers)], modules) as interrupt:
            act(bed)
        assert interrupt.where == line
        yield bed, marked, interrupt


def check_the_rest(bed: RadixBed, marked: dict[str, str]) -> None:
    """Drain a bed: everybody ends with the right tokens, nothing is left, and who comes later is served as ever."""
    bed.pools.release()
    bed.step()  # the invariants hold again after one whole step
    bed.drain(limit=MANY_STEPS)
    size = bed.pools.token_to_kv_pool_allocator.size
    for rid, req in bed.reqs.items():
        params = req.sampling_params
        fits = len(req.origin_input_ids) + params.max_tokens - 1 <= size
        expected = marked.get(rid, "length" if fits else "error")
        assert req.finish_reason is not None and req.finish_reason.reason == expected, (rid, req.finish_reason)
        whole = answer_of(req, params.max_tokens)
        assert bed.said(rid) == whole[: len(bed.said(rid))], rid
        assert expected != "length" or bed.said(rid) == whole, rid
    assert not bed.pools.tree_cache.protected_size() and bed.runner.is_empty()
    later = bed.add(2, max_tokens=2, request_id="later")
    assert bed.drain()[later] == "length"
    bed.flush()


def check_each(
    make: Callable[[], RadixBed],
    act: Callable[[RadixBed], Any],
    modules: list[ModuleType] = SCHEDULER,
    **lines: int,
) -> None:
    """Interrupt `act` everywhere, then look at what comes of it."""
    for bed, marked, interrupt in before_every_line(modules, make, act, **lines):
        try:
            check_the_rest(bed, marked)
        except Exception as error:
            raise AssertionError(f"after an interrupt before {interrupt.where}: {error!r}") from error


def test_the_beds_are_as_they_say() -> None:
    bed = extending_bed()
    evicted = bed.pools.tree_cache.num_evicted_tokens
    step = bed.step()
    assert step.output.mode == "extend" and len(step.counts) == 4 and step.ended == {"once": "length", "gone": "abort"}
    assert any(step.output.hits.values()) and bed.pools.tree_cache.num_evicted_tokens > evicted
    step = (bed := decoding_bed()).step()
    assert step.output.mode == "decode" and bed.retracted() == ["victim"]
    assert step.ended == {"ends": "length", "gone": "abort"}
    assert outgrown_bed().step().ended == {"r0": "error"}


@pytest.mark.sample(1)
@EVERY_BED
def test_schedule_can_be_interrupted_anywhere(make: Callable[[], RadixBed]) -> None:
    """Most lines have their turn in one of the first two beds, and in some other test."""
    check_each(make, lambda bed: bed.scheduler.schedule(), one_of=2, first=BEDS.index(make))


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [extending_bed, decoding_bed, hash_bed], ids=lambda make: make.__name__)
def test_schedule_can_be_interrupted_inside_its_parts(make: Callable[[], RadixBed]) -> None:
    check_each(make, lambda bed: bed.scheduler.schedule(), REST, one_of=6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", BEDS[:2], ids=lambda make: make.__name__)
@pytest.mark.parametrize("failed", [False, True], ids=["of a result", "of a failure"])
def test_update_can_be_interrupted_anywhere(make: Callable[[], RadixBed], failed: bool) -> None:
    def executed_bed() -> RadixBed:
        bed: Any = make()
        batch = bed.scheduler.schedule()
        bed.pools.release()
        if failed:
            bed.fail([req.rid for req in batch.reqs], RuntimeError("the model crashed"))
        bed.decision = batch, bed.result_of(None if failed or batch is None else bed.execute(batch))
        return bed

    def update(bed: Any) -> None:
        bed.scheduler.update_from_output(*bed.decision)

    check_each(executed_bed, update, one_of=2 + failed, first=BEDS.index(make))
    check_each(executed_bed, update, REST, one_of=8)


@pytest.mark.sample(1)
@pytest.mark.parametrize("inside", [False, True], ids=["a lost step", "interrupted books"])
def test_the_step_after_an_interrupt_can_be_interrupted_anywhere(inside: bool) -> None:
    """That is, the recovery. Where the books were being written, it flushes; else it sends back."""

    def interrupted_bed() -> RadixBed:
        bed = decoding_bed()
        if inside:
            with interrupted(40, [scheduler_module, schedule_batch]) as interrupt:
                bed.scheduler.schedule()
            assert interrupt.where is not None
        else:
            bed.interrupt(executed=True)
        bed.pools.release()
        return bed

    check_each(interrupted_bed, lambda bed: bed.scheduler.schedule(), [recovery])
    check_each(interrupted_bed, lambda bed: bed.scheduler.schedule(), [scheduler_module, scheduler_base], one_of=3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("n", [1, 3])
def test_an_arrival_can_be_interrupted_anywhere_and_given_up(n: int) -> None:
    """The face gives up whatever it could not hand over, and may use the id again."""
    for bed, marked, interrupt in before_every_line(
        SCHEDULER, outgrown_bed, lambda bed: bed.add(2, n=n, request_id="late")
    ):
        bed.abort("late")
        came = [rid for rid in ("late", "late/0", "late/1", "late/2") if rid in bed.scheduler.requests]
        for rid in [rid for rid in bed.requests if "late" in rid and rid not in came]:
            del bed.requests[rid]
        try:
            check_the_rest(bed, marked | dict.fromkeys(came, "abort"))
            bed.add(1, 2, n=n, request_id="late")
            bed.drain()
            assert bed.reported_ends.count("late") == (2 if came else 1)
        except Exception as error:
            raise AssertionError(f"after an interrupt before {interrupt.where}: {error!r}") from error


def test_an_abort_can_be_interrupted_anywhere_and_made_again() -> None:
    victims = ("family", "first", "once")
    whom = dict.fromkeys(["family/0", "family/1", "first", "once", "gone"], "abort")
    for bed, _, interrupt in before_every_line(SCHEDULER, extending_bed, lambda bed: bed.abort(*victims)):
        bed.abort(*victims)
        try:
            check_the_rest(bed, whom)
        except Exception as error:
            raise AssertionError(f"after an interrupt before {interrupt.where}: {error!r}") from error


# --- what a recovery keeps --------------------------------------------------------------------------------------------


def test_an_interrupt_while_the_model_runs_flushes_nothing() -> None:
    bed = make_radix_bed(trace=True)
    bed.add(9), bed.drain()
    bed.add(9, same_as="r0"), bed.step()
    bed.interrupt()
    bed.step()
    assert bed.events("cache_flushed") == [] and bed.steps[-1].output.hits == {"r1": 9}
    bed.drain()


def test_an_interrupt_inside_the_books_flushes_the_cache_and_tells_so() -> None:
    bed = make_radix_bed(trace=True)
    bed.add(9), bed.drain()
    bed.add(9, same_as="r0"), bed.step()
    with interrupted(3, [schedule_batch]) as interrupt:
        bed.scheduler.schedule()
    assert interrupt.where is not None and bed.checks is not None
    bed.checks.lost()
    step = bed.step()
    assert [event.kind for event in bed.events("cache_flushed")] == ["cache_flushed"]
    assert step.output.hits == {"r1": 0} and bed.retracted() == []
    bed.drain()
