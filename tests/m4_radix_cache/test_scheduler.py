"""The scheduler of a living batch by example: hits, aborts and lost steps, invariants.

Every step runs on the test-bed: an oracle reads every slot of KV that a request uses, and every page, lock and count is
checked. What is asserted here comes on top of `test_scheduler_properties.py`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from m1_single_request.request import FinishAbort
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from tests.support.engines import OnEvent
from tests.testbed.radix import RadixBed, make_radix_bed

# --- one step after the other -----------------------------------------------------------------------------------------


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


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_what_was_in_flight_when_its_request_was_aborted_is_not_shared() -> None:
    bed = make_radix_bed()
    bed.add(9)
    bed.step(between=lambda decision: bed.abort("r0"))
    assert bed.pools.tree_cache.evictable_size() == 0
    bed.add(9, same_as="r0")
    assert bed.step().counts == {"r1": 9}
    bed.drain()


@pytest.mark.parametrize("kind", ["matched", "locked", "admit", "policy_order", "batch"])
def test_an_abort_in_the_middle_of_a_decision(kind: str) -> None:
    bed = make_radix_bed(max_num_seqs=2, trace=True, checked=False)
    for _ in range(3):
        bed.add(3, 2)
    reader = OnEvent(bed.scheduler.tracer, kind, lambda: bed.abort("r1"))
    assert bed.step().ended == {"r1": "abort"} and reader.acted and reader.error is None
    assert bed.drain() == {"r1": "abort", "r0": "length", "r2": "length"}
    assert bed.runner.is_empty()


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


def test_who_left_the_batch_is_kept_for_the_trace_until_the_next_batch_or_a_reset() -> None:
    bed = make_radix_bed(trace=False)
    for rid in ("r0", "r1"):
        bed.add(4, max_tokens=1), bed.drain()
        assert bed.scheduler.unreported == [rid]
    bed.add(4), bed.abort("r2"), bed.step()
    assert bed.scheduler.unreported == ["r1"], "r2 was in no batch"
    bed.scheduler.reset(FinishAbort())
    assert bed.scheduler.unreported == []


# --- what the invariants notice ---------------------------------------------------------------------------------------


def slots_of(bed: RadixBed, rid: str) -> np.ndarray:
    """The row of a request, to be read and changed."""
    table: np.ndarray = bed.pools.req_to_token_pool.req_to_token
    return table[bed.reqs[rid].req_pool_idx]


def read_a_free_page(bed: RadixBed) -> None:
    allocator = bed.pools.token_to_kv_pool_allocator
    page = np.setdiff1d(np.arange(1, allocator.num_pages + 1), allocator.owned_pages())[0]
    slots_of(bed, "r0")[:2] = page * 2 + np.arange(2)


def read_as_the_other(bed: RadixBed, first: slice, second: slice) -> None:
    slots_of(bed, "r0")[first] = slots_of(bed, "r1")[second]


def free(bed: RadixBed, slots: Any) -> None:
    bed.pools.token_to_kv_pool_allocator.free(np.array(slots, dtype=np.int64))


FAULTS: dict[str, Callable[[RadixBed], object]] = {
    "a waiting request is lost": lambda bed: bed.scheduler.waiting_queue.pop(),
    "a running request is lost": lambda bed: bed.scheduler.running_batch.filter_batch([1]),
    "a request is forgotten": lambda bed: bed.scheduler.requests.pop("r0"),
    "a request runs twice": lambda bed: bed.scheduler.running_batch.reqs.append(bed.reqs["r0"]),
    "a request that waits runs": lambda bed: bed.scheduler.running_batch.reqs.append(bed.scheduler.waiting_queue.pop()),
    "pages have no owner": lambda bed: bed.pools.token_to_kv_pool_allocator.alloc(2),
    "a cached page is free": lambda bed: free(bed, bed.reqs["r0"].prefix_indices[:2]),
    "a page in use is free": lambda bed: free(bed, slots_of(bed, "r0")[4:5]),
    "two own a page": lambda bed: read_as_the_other(bed, slice(4, 5), slice(4, 5)),
    "a lock is forgotten": lambda bed: bed.pools.tree_cache.dec_lock_ref(bed.reqs["r0"].last_node),
    "a row reads a free page": read_a_free_page,
    "a row reads a page of another one": lambda bed: read_as_the_other(bed, slice(0, 1), slice(4, 5)),
    "a row reads the cached pages of another one": lambda bed: read_as_the_other(bed, slice(0, 4), slice(0, 4)),
    "a row has no owner": lambda bed: bed.pools.req_to_token_pool.alloc(1),
    "a token counts twice": lambda bed: setattr(bed.reqs["r0"], "kv_committed_len", 6),
    "too many run": lambda bed: setattr(bed.scheduler, "max_num_seqs", 1),
    "settings of one are forgotten": lambda bed: bed.scheduler.running_batch.sampling_info.filter_batch([0]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_invariants_notice(fault: str) -> None:
    bed = make_radix_bed(max_num_seqs=3, page_size=2, num_tokens=64)
    bed.add(4, max_tokens=6), bed.add(4, max_tokens=6), bed.step(), bed.step()
    bed.add(80)
    bed.scheduler.check_invariants()
    FAULTS[fault](bed)
    with pytest.raises(AssertionError):
        bed.scheduler.check_invariants()
