"""Retraction: requests that leave the batch when memory runs out, what they keep, and requests that outgrow the memory.

The choice of victims, their order when they come back and their tokens: `test_scheduler_properties.py`.
"""

from typing import Any

import pytest

from m3_paged_attention.errors import KVCapacityError
from tests.testbed.bed import Step
from tests.testbed.radix import CACHES, RadixBed, make_radix_bed

EVERY_CACHE = pytest.mark.parametrize("prefix_cache", CACHES)


def crowd(*, num_tokens: int = 18, **settings: Any) -> RadixBed:
    """Two requests of four tokens that may become twelve each; eighteen have room, and nothing is kept for later."""
    bed = make_radix_bed(num_tokens=num_tokens, conservativeness=0, trace=True, **settings)
    bed.add(4, max_tokens=8), bed.step()
    bed.add(4, max_tokens=8), bed.step()
    return bed


def step_until_retracted(bed: RadixBed) -> Step:
    while True:
        step = bed.step()
        if bed.retracted():
            return step


# --- what becomes of it -----------------------------------------------------------------------------------------------


def test_the_ratio_is_measured_anew() -> None:
    bed = crowd()
    step_until_retracted(bed)
    said = len(bed.said("r0")) - 1  # the decision was made before its newest token
    assert bed.scheduler.new_token_ratio.value == min(1.0, (said + 20) / (8 + 1))
    bed.drain()
    assert bed.scheduler.new_token_ratio.value == 0.0, "idle: as at the start"


# --- who cannot be helped ---------------------------------------------------------------------------------------------


@EVERY_CACHE
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_request_that_outgrows_the_pool_alone_fails_and_others_go_on(prefix_cache: str, page_size: int) -> None:
    bed = make_radix_bed(num_tokens=8, page_size=page_size, prefix_cache=prefix_cache)
    large, waits = bed.add(5, max_tokens=50), bed.add(3, max_tokens=3)
    assert bed.drain(limit=100) == {large: "error", waits: "length"}
    error = bed.error_of(large)
    assert isinstance(error, KVCapacityError) and len(bed.said(large)) == 4
    assert str(error) == (
        f"request 'r0' has grown to 9 tokens, and the KV memory has room for 8, in pages of {page_size}: give it more, "
        "or ask for fewer tokens"
    )


def test_the_last_one_waits_for_whoever_is_about_to_end_before_it_gives_up() -> None:
    bed = make_radix_bed(num_tokens=14, max_num_seqs=2, conservativeness=0)
    stays, _ = bed.add(2, max_tokens=7), bed.step()
    leaves, _ = bed.add(2, max_tokens=7), bed.step()
    while bed.pools.token_to_kv_pool_allocator.available_size():
        bed.step()
    assert bed.running() == [stays, leaves] and not bed.pools.tree_cache.evictable_size()
    bed.abort(leaves)
    step = bed.step()
    assert step.counts == {} and step.ended == {leaves: "abort"}, "its slots are still taken: no token, and no error"
    assert bed.drain() == {leaves: "abort", stays: "length"}
