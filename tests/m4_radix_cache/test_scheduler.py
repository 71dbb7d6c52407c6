"""The scheduler of a living batch by example: who is let in, who goes on, what is shared, and what is left at the end.

Every step runs on the test-bed: an oracle reads every slot of KV that a request uses, and every page, lock and count is
checked. What is asserted here comes on top. Retraction and lost steps have files of their own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from m1_single_request import DuplicateRequestError, SamplingParams
from m1_single_request.request import FinishAbort
from m4_radix_cache.errors import PoolError
from m4_radix_cache.mem_cache.base_prefix_cache import MatchResult
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.model_worker_batch import ForwardMode
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_batch import ScheduleBatch
from m4_radix_cache.scheduler import Scheduler
from tests.support.engines import OnEvent
from tests.testbed.fakes import make_request
from tests.testbed.radix import CACHES, RadixBed, make_radix_bed
from tests.testbed.radix_runner import answer_of

EVERY_CACHE = pytest.mark.parametrize("prefix_cache", CACHES)


def modes(bed: RadixBed) -> str:
    """The steps so far, a letter each."""
    return "".join({"extend": "E", "decode": "D", "none": "-"}[step.output.mode] for step in bed.steps)


# --- one step after the other -----------------------------------------------------------------------------------------


def test_the_worked_example() -> None:
    bed = make_radix_bed(max_num_seqs=3, page_size=4, num_tokens=64, tensors=True)
    first, second, third = bed.add(9), bed.add(3, max_tokens=2), bed.add(5)

    step = bed.step()
    assert step.output.mode == "extend" and step.counts == {first: 9, second: 3, third: 5}
    assert step.output.prefix_lens == (0, 0, 0)

    step = bed.step()
    assert step.output.mode == "decode" and step.output.hits == {first: 9, second: 3, third: 5}
    assert step.ended == {second: "length"} and bed.running() == [first, third]

    newcomer = bed.add(12, same_as=first)
    step = bed.step()
    assert step.output.mode == "extend", "prompts first: the others wait"
    assert step.counts == {newcomer: 4} and step.output.hits == {newcomer: 8}, "two pages are there already"

    step = bed.step()
    assert step.counts == {first: 1, third: 1, newcomer: 1}, "who ran before comes first"
    assert bed.drain() == {second: "length", first: "length", third: "length", newcomer: "length"}


def test_a_new_prompt_goes_before_the_next_token_of_those_who_run() -> None:
    bed = make_radix_bed(trace=True)
    bed.add(5, max_tokens=6), bed.step(), bed.step()
    bed.add(4), bed.step()
    assert modes(bed) == "EDE"
    (batch,) = [event for event in bed.events("batch") if event.rids == ("r1",)]
    assert batch.num_running == 2 and "1 running request must wait" in batch.explain()
    bed.drain()
    assert modes(bed) == "EDE" + "DDD" + "D", "after its prompt everybody decodes together"


def test_prompts_that_keep_coming_keep_the_others_waiting() -> None:
    """What prefill-or-decode costs, and m5 repairs."""
    bed = make_radix_bed(max_num_seqs=8)
    bed.add(5, max_tokens=4), bed.step()
    for _ in range(4):
        bed.add(3, max_tokens=2), bed.step()
    assert modes(bed) == "EEEEE" and len(bed.said("r0")) == 1
    bed.drain()


def test_whoever_ended_with_its_first_token_joins_nobody() -> None:
    bed = make_radix_bed()
    bed.add(5, max_tokens=1), bed.add(3, max_tokens=2)
    assert bed.step().ended == {"r0": "length"}
    assert bed.step().counts == {"r1": 1} and not bed.scheduler.requests


@pytest.mark.sample(3)
@EVERY_CACHE
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_answers_depend_neither_on_the_page_size_nor_on_the_cache(page_size: int, prefix_cache: str) -> None:
    bed = make_radix_bed(page_size=page_size, prefix_cache=prefix_cache, tensors=True, max_num_seqs=8, debug=True)
    bed.add(17, max_tokens=20)
    for length in (1, 2, 3, 4, 5, 15, 16, 17, 40):
        bed.add(length, max_tokens=20, same_as="r0")
    assert set(bed.drain().values()) == {"length"}
    assert all(len(bed.said(rid)) == 20 for rid in bed.requests)


def test_an_idle_scheduler_schedules_nothing() -> None:
    bed = make_radix_bed(trace=True)
    for _ in range(2):
        assert bed.step().output.mode == "none"
    assert bed.events() == []


def test_an_idle_scheduler_has_learnt_nothing_and_all_memory_is_of_use_again() -> None:
    bed = make_radix_bed(num_tokens=40)
    bed.add(9, max_tokens=12), bed.drain()
    scheduler, pools = bed.scheduler, bed.pools
    assert scheduler.new_token_ratio.value == scheduler.new_token_ratio.init == 0.7
    allocator, cache = pools.token_to_kv_pool_allocator, pools.tree_cache
    assert (allocator.available_size(), cache.evictable_size(), cache.protected_size()) == (20, 20, 0)
    bed.flush()


def test_the_ratio_falls_with_every_decode_and_with_nothing_else() -> None:
    bed = make_radix_bed()
    ratio = bed.scheduler.new_token_ratio
    bed.add(5, max_tokens=6), bed.step()
    assert ratio.value == ratio.init
    bed.step(), bed.step()
    assert ratio.value == pytest.approx(0.7 - 2 * 0.7 * 0.86 / 600)
    bed.add(3), bed.step()
    assert ratio.value == pytest.approx(0.7 - 2 * 0.7 * 0.86 / 600)
    bed.drain()


# --- what is shared ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", ["radix", "hash"])
@pytest.mark.parametrize("schedule_policy", ["lpm", "dfs-weight"])
def test_of_two_long_prompts_that_are_alike_the_second_comes_a_round_later_and_hits(
    prefix_cache: str, schedule_policy: str
) -> None:
    bed = make_radix_bed(prefix_cache=prefix_cache, schedule_policy=schedule_policy, page_size=4)
    bed.add(40), bed.add(40, same_as="r0")
    assert bed.step().counts == {"r0": 40}
    step = bed.step()
    assert step.output.mode == "extend" and step.counts == {"r1": 4} and step.output.hits == {"r1": 36}
    bed.drain()
    assert bed.runner.num_written == 40 + 4 + 2 * 3


@pytest.mark.parametrize("prefix_cache", ["radix", "hash"])
def test_fcfs_runs_them_together_and_frees_the_second_copy(prefix_cache: str) -> None:
    bed = make_radix_bed(prefix_cache=prefix_cache, page_size=4, num_tokens=128, trace=True)
    bed.add(42), bed.add(42, same_as="r0")
    assert bed.step().counts == {"r0": 42, "r1": 42}
    (freed,) = bed.events("duplicates_freed")
    assert (freed.rid, freed.start, freed.num_tokens) == ("r1", 0, 40)
    allocator, cache = bed.pools.token_to_kv_pool_allocator, bed.pools.tree_cache
    assert (allocator.available_size(), cache.protected_size()) == (128 - 40 - 2 * 4, 40), "a tail each is their own"
    rows = [bed.pools.req_to_token_pool.read(bed.reqs[rid].req_pool_idx, 0, 42).tolist() for rid in ("r0", "r1")]
    assert rows[0][:40] == rows[1][:40] and not set(rows[0][40:]) & set(rows[1][40:])
    bed.drain()


@pytest.mark.parametrize(("page_size", "hit"), [(1, 149), (4, 148), (16, 144)])
def test_a_second_turn_finds_prompt_and_answer_of_the_first(page_size: int, hit: int) -> None:
    bed = make_radix_bed(page_size=page_size, num_tokens=512, max_model_len=256)
    bed.add(100, max_tokens=50), bed.drain()
    first = bed.reqs["r0"]
    bed.add([*first.origin_input_ids, *first.output_ids, *range(33, 83)], request_id="next")
    assert bed.step().output.hits == {"next": hit}, "the last token that was said has no KV"
    assert bed.reqs["next"].cached_tokens == hit
    bed.drain()


@pytest.mark.parametrize("prefix_cache", ["radix", "hash"])
def test_a_prompt_that_is_cached_whole_computes_exactly_one_token(prefix_cache: str) -> None:
    bed = make_radix_bed(prefix_cache=prefix_cache)
    bed.add(5), bed.drain()
    bed.add(5, same_as="r0")
    assert bed.step().counts == {"r1": 1}
    bed.drain()


def test_whoever_wants_logprobs_of_its_prompt_computes_all_of_it() -> None:
    bed = make_radix_bed()
    bed.add(9), bed.drain()
    bed.add(9, same_as="r0", prompt_logprobs=1)
    assert bed.step().counts == {"r1": 9}
    assert bed.reqs["r1"].sequence.prompt_logprobs is not None
    bed.drain()


@pytest.mark.parametrize("prefix_cache", ["radix", "hash"])
def test_namespaces_share_nothing(prefix_cache: str) -> None:
    """The oracle gives each its own KV, so a hit across the border would be read and noticed, too."""
    bed = make_radix_bed(prefix_cache=prefix_cache, max_num_seqs=5)
    for number, extra_key in enumerate([None, "a", "b", "a", None]):
        bed.add(9, same_as="r0" if number else None, extra_key=extra_key), bed.step()
    hits = [step.output.hits for step in bed.steps]
    assert hits == [{"r0": 0}, {"r1": 0}, {"r2": 0}, {"r3": 8}, {"r4": 8}]
    bed.drain()


@EVERY_CACHE
def test_a_family_computes_its_prompt_once_where_there_is_a_cache(prefix_cache: str) -> None:
    bed = make_radix_bed(prefix_cache=prefix_cache, page_size=2)
    bed.add(9, n=3, max_tokens=3)
    bed.drain()
    prompts = 3 * 9 if prefix_cache == "chunk" else 9 + 1 + 1
    assert bed.runner.num_written == prompts + 3 * 2
    assert bed.reported_ends == ["r0"] and len({bed.said(f"r0/{i}") for i in range(3)}) == 3


def test_what_is_cached_makes_room_when_it_is_needed() -> None:
    bed = make_radix_bed(num_tokens=24, max_num_seqs=2)
    for _ in range(6):
        bed.add(8, max_tokens=5)
    assert set(bed.drain().values()) == {"length"}
    assert bed.pools.tree_cache.num_evicted_tokens > 0 and not bed.scheduler.num_retractions


def test_a_hit_is_not_evicted_for_whoever_makes_it() -> None:
    """All that is free lies in the cache, and half of that is what the newcomer starts from."""
    bed = make_radix_bed(num_tokens=24, max_num_seqs=2)
    bed.add(10, max_tokens=3), bed.drain()
    bed.add(9, max_tokens=4), bed.drain()
    bed.add(18, same_as="r0", max_tokens=2)
    assert bed.step().output.hits == {"r2": 10}
    assert bed.pools.tree_cache.num_evicted_tokens > 0
    bed.drain()


def test_a_hit_is_counted_once_for_each_request_that_joins_and_never_for_a_look() -> None:
    """Without this LFU and SLRU are LRU with longer names."""
    bed = make_radix_bed(num_tokens=40)
    bed.add(9, max_tokens=1), bed.drain()
    tree = bed.pools.tree_cache
    assert isinstance(tree, RadixCache)

    def num_hits() -> int:
        return sum(node.hit_count for node in tree.root.children.values())

    assert num_hits() == 0
    bed.add(12, same_as="r0", max_tokens=20), bed.step()
    assert num_hits() == 1
    bed.add(14, same_as="r0", max_tokens=20), bed.step()
    assert bed.waiting() == ["r2"] and num_hits() == 1, "it was looked up and refused"
    bed.drain()
    assert num_hits() == 2


# --- who is let in ----------------------------------------------------------------------------------------------------


def test_nobody_overtakes_a_head_that_was_refused() -> None:
    bed = make_radix_bed(num_tokens=20, max_num_seqs=4, trace=True)
    bed.add(8, max_tokens=6), bed.step()
    bed.add(10, max_tokens=6), bed.add(1, max_tokens=2)
    while "r0" not in bed.ended:
        assert bed.step().counts == {"r0": 1}, "r2 would fit, but r1 came first"
    assert {event.rid for event in bed.events("not_admitted")} == {"r1"}
    assert bed.step().output.rids[0] == "r1"
    bed.drain()


def test_who_was_refused_for_memory_is_not_asked_again_before_somebody_leaves() -> None:
    bed = make_radix_bed(num_tokens=20, trace=True)
    bed.add(8, max_tokens=8), bed.step()
    bed.add(10, max_tokens=6)
    while "r0" not in bed.ended:
        bed.step()
    assert len(bed.events("not_admitted")) == 1
    bed.drain()


def test_whoever_was_refused_and_gives_up_stands_in_nobodys_way() -> None:
    bed = make_radix_bed(num_tokens=20)
    bed.add(8, max_tokens=8), bed.step()
    bed.add(10, max_tokens=6), bed.add(1, max_tokens=1), bed.step()
    bed.abort("r1"), bed.step()
    assert bed.step().counts == {"r2": 1}
    bed.drain()


def test_whoever_ends_with_its_first_token_leaves_room_for_those_who_were_refused() -> None:
    bed = make_radix_bed(num_tokens=20)
    bed.add(8, max_tokens=1), bed.add(10, max_tokens=6)
    assert bed.step().ended == {"r0": "length"} and bed.waiting() == ["r1"]
    assert bed.step().counts == {"r1": 10}
    bed.drain()


def test_places_are_as_many_as_may_run_and_one_is_free_with_the_update_that_ends_its_owner() -> None:
    bed = make_radix_bed(max_num_seqs=2)
    for _ in range(3):
        bed.add(3, max_tokens=4)
    assert list(bed.step().counts) == ["r0", "r1"]
    bed.abort("r0")
    assert bed.step().counts == {"r1": 1} and bed.waiting() == ["r2"], "its row is still taken while this step runs"
    assert bed.step().counts == {"r2": 3}
    bed.drain()


def test_an_abort_of_the_only_one_that_runs_leaves_its_place_to_the_next_step() -> None:
    bed = make_radix_bed(max_num_seqs=1)
    bed.add(3, max_tokens=9), bed.add(3, max_tokens=2), bed.step()
    bed.abort("r0")
    assert bed.step().counts == {} and bed.step().counts == {"r1": 3}
    assert bed.drain() == {"r0": "abort", "r1": "length"}


def test_a_step_has_as_many_prompt_tokens_as_it_may() -> None:
    bed = make_radix_bed(max_num_batched_tokens=12, max_num_seqs=4)
    for _ in range(4):
        bed.add(5, max_tokens=2)
    assert [bed.step().counts for _ in range(2)] == [{"r0": 5, "r1": 5}, {"r2": 5, "r3": 5}]
    bed.drain()


@pytest.mark.parametrize(
    ("schedule_policy", "order"),
    [
        ("fcfs", ["r1", "r2", "r3", "r4"]),
        ("lof", ["r3", "r1", "r4", "r2"]),
        ("priority", ["r4", "r2", "r1", "r3"]),
        ("lpm", ["r2", "r4", "r1", "r3"]),
    ],
)
def test_those_who_wait_join_in_the_order_of_the_policy(schedule_policy: str, order: list[str]) -> None:
    bed = make_radix_bed(max_num_seqs=1, schedule_policy=schedule_policy, page_size=2)
    bed.add(9), bed.drain()
    bed.add(4, max_tokens=4)
    bed.add(9, max_tokens=2, same_as="r0", priority=1)
    bed.add(4, max_tokens=5)
    bed.add(4, max_tokens=3, same_as="r0", priority=2)
    bed.drain()
    joined = [step.output.rids[0] for step in bed.steps if step.output.mode == "extend"]
    assert joined == ["r0", *order]


@pytest.mark.exhaustive
def test_150_requests_go_through_a_small_pool() -> None:
    bed = make_radix_bed(num_tokens=96, page_size=4, max_num_seqs=8, max_num_batched_tokens=48, conservativeness=0.3)
    for number in range(150):
        bed.add(1 + number * 7 % 40, 1 + number * 5 % 13, same_as=f"r{number - number % 5}" if number % 5 else None)
    ended = bed.drain()
    assert set(ended.values()) == {"length"} and len(ended) == 150
    first = dict.fromkeys(rid for step in bed.steps if step.output.mode == "extend" for rid in step.output.rids)
    assert len(first) == 150
    assert bed.scheduler.num_retractions > 0 and bed.pools.tree_cache.num_evicted_tokens > 500


# --- leaving ----------------------------------------------------------------------------------------------------------


@EVERY_CACHE
def test_every_way_to_end_gives_the_memory_back_in_the_same_step(prefix_cache: str) -> None:
    bed = make_radix_bed(max_model_len=20, num_tokens=60, prefix_cache=prefix_cache, page_size=2)
    prompt = [1, 2, 3]
    request = make_request("any", prompt, SamplingParams(), request_class=Req)
    assert isinstance(request, Req)
    stops = bed.add(prompt, 50, stop_token_ids=[answer_of(request, 9)[4]])
    at_the_end, at_once = bed.add(15, max_tokens=50), bed.add(15, max_tokens=1)
    assert bed.drain() == {at_once: "length", stops: "stop", at_the_end: "length"}
    assert (len(bed.said(stops)), len(bed.said(at_the_end))) == (5, 5)
    bed.flush()


def test_an_id_can_be_used_again_at_once() -> None:
    bed = make_radix_bed(max_num_seqs=1)
    for length in (3, 5):
        bed.add(length, max_tokens=2, request_id="same")
        for face in (bed.scheduler, bed.families):
            with pytest.raises(DuplicateRequestError, match="'same' is in use"):
                face.add_request(make_request("same", [1], SamplingParams(), request_class=Req))
        while bed.scheduler.requests:
            bed.step()
    assert len(bed.steps) == 4


@EVERY_CACHE
def test_an_abort_while_waiting_decoding_and_in_a_step(prefix_cache: str) -> None:
    bed = make_radix_bed(max_num_seqs=2, prefix_cache=prefix_cache)
    for _ in range(4):
        bed.add(6, max_tokens=5)
    bed.step()
    assert bed.abort("r0", "r3", "nobody", "r0") == ["r0", "r3"]
    step = bed.step(between=lambda decision: bed.abort("r1"))
    assert step.counts == {"r1": 1} and step.ended == {"r0": "abort", "r1": "abort", "r3": "abort"}
    step = bed.step(between=lambda decision: bed.abort("r2"))
    assert step.counts == {"r2": 6} and step.ended == {"r2": "abort"}, "in its own prefill"
    assert bed.drain().keys() == {"r0", "r1", "r2", "r3"}


def test_what_an_aborted_request_has_computed_stays_for_others() -> None:
    bed = make_radix_bed()
    bed.add(9, max_tokens=9), bed.step(), bed.step(), bed.step()
    bed.abort("r0"), bed.step()
    assert bed.pools.tree_cache.evictable_size() == 9 + 2
    bed.add(12, same_as="r0")
    assert bed.step().output.hits == {"r1": 9}
    bed.drain()


def test_what_was_in_flight_when_its_request_was_aborted_is_not_shared() -> None:
    bed = make_radix_bed()
    bed.add(9)
    bed.step(between=lambda decision: bed.abort("r0"))
    assert bed.pools.tree_cache.evictable_size() == 0
    bed.add(9, same_as="r0")
    assert bed.step().counts == {"r1": 9}
    bed.drain()


def test_an_abort_in_the_middle_of_an_update_takes_effect_with_the_next_one() -> None:
    bed = make_radix_bed(max_num_seqs=1, trace=True, checked=False)  # they know only of marks between the two verbs
    for _ in range(3):
        bed.add(3, 2)
    OnEvent(bed.scheduler.tracer, "result", lambda: bed.abort("r2"))
    assert bed.step().ended == {}
    assert bed.step().ended["r2"] == "abort"
    assert bed.drain() == {"r0": "length", "r1": "length", "r2": "abort"}


@pytest.mark.parametrize("kind", ["matched", "locked", "admit", "policy_order", "batch"])
def test_an_abort_in_the_middle_of_a_decision(kind: str) -> None:
    bed = make_radix_bed(max_num_seqs=2, trace=True, checked=False)
    for _ in range(3):
        bed.add(3, 2)
    reader = OnEvent(bed.scheduler.tracer, kind, lambda: bed.abort("r1"))
    assert bed.step().ended == {"r1": "abort"} and reader.acted and reader.error is None
    assert bed.drain() == {"r1": "abort", "r0": "length", "r2": "length"}
    assert bed.runner.is_empty()


def test_a_model_that_raises_fails_the_requests_of_its_step_and_no_other() -> None:
    bed = make_radix_bed(max_num_seqs=4)
    bed.add(2, max_tokens=9), bed.add(2, max_tokens=9), bed.step()
    bed.add(3)
    step = bed.step(crash=True)
    assert step.ended == {"r2": "error"} and bed.running() == ["r0", "r1"], "a prefill, beside those who wait for it"
    bed.add(4)
    assert bed.step().counts == {"r3": 4}
    assert bed.step(crash=True).ended == {"r0": "error", "r1": "error", "r3": "error"}
    assert bed.pools.tree_cache.evictable_size() == 2 + 2 + 4, "the prompts; what an error touched is not kept"
    bed.drain()


def test_a_row_that_cannot_be_used_fails_its_own_request() -> None:
    bed = make_radix_bed()
    bed.add(3), bed.add(3), bed.add(3)
    assert bed.step(failing=["r0"]).ended == {"r0": "error"}
    assert bed.pools.tree_cache.protected_size() == 6, "the KV of a prompt that made no numbers is not shared"
    assert bed.step(failing=["r2"]).ended == {"r2": "error"}
    assert bed.drain() == {"r0": "error", "r2": "error", "r1": "length"}


@pytest.mark.parametrize("mode", ["extend", "decode"])
def test_a_step_without_a_result_sends_its_requests_back(mode: str) -> None:
    """Nobody marked them, so nobody is to blame: they start over."""
    bed = make_radix_bed(checked=False, num_tokens=16)
    bed.add(6, max_tokens=4), bed.add(6, max_tokens=4)
    if mode == "decode":
        bed.step(), bed.step()
    batch = bed.schedule()
    assert batch.forward_mode.name.lower() == mode
    ran = [req.rid for req in batch.reqs]
    bed.update(batch, None)
    assert bed.retracted() == ran and bed.running() == []
    assert bed.drain(limit=100) == {"r0": "length", "r1": "length"}


def test_who_left_the_batch_is_kept_for_the_trace_until_the_next_batch() -> None:
    bed = make_radix_bed(trace=False)
    bed.add(4, max_tokens=1), bed.drain()
    assert bed.scheduler.unreported == ["r0"]
    bed.add(4), bed.step()
    assert bed.scheduler.unreported == []


def test_who_was_in_no_batch_is_not_kept_and_a_reset_forgets_the_others() -> None:
    bed = make_radix_bed(trace=False)
    bed.add(4, max_tokens=1), bed.drain()
    for rid in ("r1", "r2"):
        bed.add(4), bed.abort(rid), bed.step()
    assert bed.scheduler.unreported == ["r0"]
    bed.scheduler.reset(FinishAbort())
    assert bed.scheduler.unreported == []


# --- what the invariants notice ---------------------------------------------------------------------------------------


def lose_a_waiting_request(bed: RadixBed) -> None:
    bed.scheduler.waiting_queue.pop()


def lose_a_running_request(bed: RadixBed) -> None:
    bed.scheduler.running_batch.filter_batch([1])


def forget_a_request(bed: RadixBed) -> None:
    del bed.scheduler.requests["r0"]


def run_twice(bed: RadixBed) -> None:
    bed.scheduler.running_batch.reqs.append(bed.scheduler.running_batch.reqs[0])


def let_one_run_that_waits(bed: RadixBed) -> None:
    bed.scheduler.running_batch.reqs.append(bed.scheduler.waiting_queue.pop())


def keep_memory(bed: RadixBed) -> None:
    bed.pools.token_to_kv_pool_allocator.alloc(2)


def free_what_is_cached(bed: RadixBed) -> None:
    bed.pools.token_to_kv_pool_allocator.free(bed.reqs["r0"].prefix_indices[:2])


def free_what_is_in_use(bed: RadixBed) -> None:
    rows = bed.pools.req_to_token_pool
    bed.pools.token_to_kv_pool_allocator.free(rows.read(bed.reqs["r0"].req_pool_idx, 4, 5))


def share_a_page_of_its_own(bed: RadixBed) -> None:
    rows = bed.pools.req_to_token_pool
    first, second = (bed.reqs[rid].req_pool_idx for rid in ("r0", "r1"))
    rows.req_to_token[second, 4] = rows.req_to_token[first, 4]


def forget_a_lock(bed: RadixBed) -> None:
    bed.pools.tree_cache.dec_lock_ref(bed.reqs["r0"].last_node)


def read_what_is_free(bed: RadixBed) -> None:
    rows, allocator = bed.pools.req_to_token_pool, bed.pools.token_to_kv_pool_allocator
    page = np.setdiff1d(np.arange(1, allocator.num_pages + 1), allocator.owned_pages())[0]
    rows.req_to_token[bed.reqs["r0"].req_pool_idx, :2] = page * 2 + np.arange(2)


def read_what_another_one_owns(bed: RadixBed) -> None:
    rows = bed.pools.req_to_token_pool
    first, second = (bed.reqs[rid].req_pool_idx for rid in ("r0", "r1"))
    rows.req_to_token[first, 0] = rows.req_to_token[second, 4]


def read_what_another_one_has_cached(bed: RadixBed) -> None:
    rows = bed.pools.req_to_token_pool
    first, second = (bed.reqs[rid].req_pool_idx for rid in ("r0", "r1"))
    rows.req_to_token[first, :4] = rows.req_to_token[second, :4]


def lock_twice(bed: RadixBed) -> None:
    bed.pools.tree_cache.inc_lock_ref(bed.reqs["r0"].last_node)


def keep_a_row(bed: RadixBed) -> None:
    bed.pools.req_to_token_pool.alloc(1)


def count_a_token_twice(bed: RadixBed) -> None:
    bed.reqs["r0"].kv_committed_len += 1


def let_too_many_run(bed: RadixBed) -> None:
    bed.scheduler.max_num_seqs = 1


def forget_the_settings_of_one(bed: RadixBed) -> None:
    bed.scheduler.running_batch.sampling_info.filter_batch([0])


FAULTS = [
    lose_a_waiting_request,
    lose_a_running_request,
    forget_a_request,
    run_twice,
    let_one_run_that_waits,
    keep_memory,
    free_what_is_cached,
    free_what_is_in_use,
    share_a_page_of_its_own,
    forget_a_lock,
    read_what_is_free,
    read_what_another_one_owns,
    read_what_another_one_has_cached,
    keep_a_row,
    count_a_token_twice,
    let_too_many_run,
    forget_the_settings_of_one,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_invariants_notice(fault: Callable[[RadixBed], None]) -> None:
    bed = make_radix_bed(max_num_seqs=3, page_size=2, num_tokens=64)
    bed.add(4, max_tokens=6), bed.add(4, max_tokens=6), bed.step(), bed.step()
    bed.add(80)
    bed.scheduler.check_invariants()
    fault(bed)
    with pytest.raises(AssertionError):
        bed.scheduler.check_invariants()


@pytest.mark.parametrize("fault", [lock_twice, forget_a_lock], ids=lambda fault: fault.__name__)
def test_the_bed_notices_a_wrong_lock_while_its_owner_runs(fault: Callable[[RadixBed], None]) -> None:
    bed = make_radix_bed()
    bed.add(4, max_tokens=6), bed.step()
    fault(bed)
    with pytest.raises(AssertionError, match="locks for"):
        bed.step()


# --- what the bed notices ---------------------------------------------------------------------------------------------


class SharesBetweenNamespaces(RadixCache):
    """Hands out what it has to everybody."""

    def match_prefix(self, key: Any, max_len: int | None = None) -> MatchResult:
        key.extra_key = None
        return super().match_prefix(key, max_len)

    def insert(self, key: Any, value: Any, priority: int = 0) -> int:
        key.extra_key = None
        return super().insert(key, value, priority)


class FreesTooMuch(RadixCache):
    """Frees the duplicates, and what they duplicate: a page both free and mapped."""

    def _free_duplicates(self, req: Any, slots: np.ndarray, existing: int) -> None:
        if existing > req.cache_protected_len:
            mapped = self.match_prefix(req.key, existing).device_indices
            self.token_to_kv_pool_allocator.free(mapped[req.cache_protected_len :])
        super()._free_duplicates(req, slots, existing)


class KeepsItsOwn(RadixCache):
    """Frees its duplicates, and lets the request read on where they were."""

    def cache_unfinished_req(self, req: Any) -> None:
        row = self.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_committed_len)
        super().cache_unfinished_req(req)
        self.req_to_token_pool.write(req.req_pool_idx, 0, row)


class NeverUnlocks(RadixCache):
    def dec_lock_ref(self, node: Any) -> None:
        pass


class EvictsWhatIsLocked(RadixCache):
    """Takes the lock for a hint."""

    def inc_lock_ref(self, node: Any) -> None:
        pass

    def dec_lock_ref(self, node: Any) -> None:
        pass


class MatchesTooMuch(RadixCache):
    """Says that a prompt is there as far as its last page."""

    def match_prefix(self, key: Any, max_len: int | None = None) -> MatchResult:
        match = super().match_prefix(key, max_len)
        if not len(match.device_indices):
            return match
        more = match.device_indices[-1:] * 0 + 1
        return match._replace(device_indices=np.concatenate([match.device_indices, more]))


class ForgetsToMerge(Scheduler):
    """Merges everything but the sampling parameters."""

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        before = self.running_batch.sampling_info
        if self.last_batch is not None and self.running_batch.reqs and before is not None:
            self.last_batch.sampling_info = before
        return super().get_next_batch_to_run()


class MixesADecodeIn(Scheduler):
    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        batch = super().get_next_batch_to_run()
        if batch is not None and batch.forward_mode is ForwardMode.EXTEND and self.running_batch.reqs:
            batch.reqs.append(self.running_batch.reqs[0])
        return batch


BROKEN: dict[str, dict[str, Any]] = {
    one.__name__: {"cache_class": one}
    for one in (
        SharesBetweenNamespaces,
        FreesTooMuch,
        KeepsItsOwn,
        NeverUnlocks,
        EvictsWhatIsLocked,
        MatchesTooMuch,
    )
} | {one.__name__: {"scheduler_class": one} for one in (ForgetsToMerge, MixesADecodeIn)}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_part_that_is_broken_is_noticed(fault: str) -> None:
    bed = make_radix_bed(num_tokens=40, max_num_seqs=3, **BROKEN[fault])

    def serve() -> None:
        bed.add(9, max_tokens=8, repetition_penalty=1.2), bed.add(9, same_as="r0", max_tokens=4)
        for _ in range(3):
            bed.step()
        bed.add(9, same_as="r0", max_tokens=4, extra_key="another", seed=1)
        bed.drain()
        for _ in range(3):
            bed.add(20, max_tokens=6)
        bed.drain()

    with pytest.raises((AssertionError, PoolError)):
        serve()
