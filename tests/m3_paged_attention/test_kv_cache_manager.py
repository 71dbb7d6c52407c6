"""Block tables: room for tokens, shared blocks and their copies, swapping, and which requests a lost step touched.

Random steps are in `test_kv_cache_manager_properties.py`; here are the rules by example, and calls that are bugs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from m1_single_request.tracer import Tracer
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_events import BlocksFreed
from tests.support.engines import Recorder

BLOCK = 4


def manager(num_blocks: int = 8, *, host: int = 0) -> KVCacheManager:
    spec = KVCacheSpec(block_size=BLOCK, num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    config = KVCacheConfig(spec=spec, num_blocks=num_blocks, num_host_blocks=host)
    return KVCacheManager(kv_cache_config=config, tracer=Tracer())


def forked(*, num_tokens: int, num_blocks: int = 8, host: int = 0) -> KVCacheManager:
    """`a` with 6 tokens in blocks 1 and 2, and `b` that shares the first `num_tokens` of them."""
    kv = manager(num_blocks, host=host)
    kv.reserve("a", 6)
    kv.fork("a", "b", num_tokens)
    return kv


def test_only_requests_at_the_end_of_a_block_or_in_a_shared_one_need_a_block() -> None:
    kv = manager()
    kv.reserve("a", 4), kv.reserve("b", 5), kv.reserve("c", 8)
    assert kv.in_need([("c", 9), ("b", 6), ("a", 5)]) == [("c", 9), ("a", 5)]
    kv.fork("b", "d", 5)
    assert kv.in_need([("b", 6), ("d", 6)]) == [("b", 6), ("d", 6)]


# --- room for tokens --------------------------------------------------------------------------------------------------


def test_what_a_caller_does_to_the_answers_changes_no_owner() -> None:
    kv = manager(host=2)
    kv.reserve("a", 4).append(7)
    kv.fork("a", "b", 4)
    kv.swap_out("b")
    kv.block_ids("a").append(7), kv.owned()["a"].append(7), kv.swapped()["b"].append(7)
    assert kv.owned() == {"a": [1]} and kv.swapped() == {"b": [0]}
    kv.check_invariants()


def test_the_first_to_write_into_a_shared_block_gets_a_copy_and_the_last_one_needs_none() -> None:
    kv = forked(num_tokens=5)
    kv.fork("a", "c", 5)
    assert [kv.num_needed(name, 6) for name in "bc"] == [1, 1] and kv.num_needed("a", 7) == 1
    assert kv.num_needed_together([("a", 7), ("b", 6), ("c", 6)]) == 2 == kv.num_needed_together([("b", 6), ("c", 6)])
    assert kv.reserve("b", 6) == [3] and kv.block_ids("b") == [1, 3]
    assert kv.num_needed_together([("a", 7), ("b", 7), ("c", 6)]) == 1
    assert kv.num_needed_together([("a", 9), ("b", 12), ("c", 6)]) == 3, "two new blocks and a copy"
    assert kv.reserve("a", 7) == [4] and kv.block_ids("a") == [1, 4]
    assert kv.num_needed("c", 6) == 0 and kv.reserve("c", 6) == [] and kv.block_ids("c") == [1, 2]
    assert kv.take_moves() == ([], [], [(2, 3), (2, 4)])
    assert kv.take_moves() == ([], [], []), "moves are taken once"


def test_a_copy_of_a_block_that_is_itself_to_be_copied_comes_from_where_the_data_is() -> None:
    kv = forked(num_tokens=5)
    kv.reserve("b", 6)
    kv.fork("b", "c", 5)
    kv.fork("c", "d", 5)
    kv.reserve("c", 6), kv.reserve("d", 6)
    assert (kv.block_ids("b"), kv.block_ids("c"), kv.block_ids("d")) == ([1, 3], [1, 4], [1, 5])
    assert kv.take_moves().copies == [(2, 3), (2, 4), (2, 5)]


# --- fork and copy on write -------------------------------------------------------------------------------------------


def test_a_request_that_writes_its_tokens_again_copies_every_block_that_is_shared() -> None:
    """After a lost step, say: the token that is written need not be in the last block."""
    kv = forked(num_tokens=6)
    assert [kv.num_needed("a", n) for n in (1, 4, 5, 8)] == [1, 1, 1, 1]
    assert kv.reserve("a", 1) == [3] and kv.block_ids("a") == [3, 2]
    assert kv.reserve("a", 4) == [] and kv.num_needed("a", 5) == 1
    assert kv.reserve("a", 5) == [4] and kv.block_ids("a") == [3, 4] and kv.block_ids("b") == [1, 2]


def test_a_fork_of_what_is_not_there_is_a_bug_of_ours() -> None:
    kv = forked(num_tokens=5, host=2)
    for verb in (lambda: kv.fork("nobody", "c", 1), lambda: kv.block_ids("nobody")):
        with pytest.raises(KeyError):
            verb()
    for parent, child, num_tokens in (("a", "b", 1), ("a", "c", 9)):
        with pytest.raises(AssertionError):
            kv.fork(parent, child, num_tokens)
    kv.swap_out("a")
    with pytest.raises(AssertionError):
        kv.fork("a", "c", 1)


def test_a_swapped_request_owns_host_blocks_and_comes_back_to_any_others() -> None:
    kv = manager(3, host=4)
    kv.reserve("a", 6), kv.reserve("b", 4)
    assert kv.swap_out("a")
    assert kv.is_swapped("a") and not kv.is_swapped("b") and not kv.is_swapped("nobody")
    assert kv.owned() == {"b": [3]} and kv.swapped() == {"a": [0, 1]} and kv.num_free == 2
    assert kv.take_moves() == ([], [(1, 0), (2, 1)], [])
    assert kv.reserve("b", 5) == [1]
    assert kv.num_needed("a", 6) == 2 and not kv.can_hold("a", 6)
    kv.release("b")
    assert kv.num_needed("a", 9) == 3 and kv.num_needed("a", 1) == 2
    kv.swap_in("a")
    assert kv.owned() == {"a": [2, 3]} and kv.swapped() == {} and not kv.is_swapped("a")
    assert kv.take_moves() == ([(0, 2), (1, 3)], [], [])
    assert kv.reserve("a", 8) == [] and kv.reserve("a", 9) == [1]


def test_a_copy_that_is_swapped_out_before_it_is_made_comes_from_its_source() -> None:
    """Swaps come before copies."""
    kv = forked(num_tokens=5, host=2)
    kv.reserve("b", 6)
    kv.swap_out("b")
    assert kv.take_moves() == ([], [(1, 0), (2, 1)], [])


# --- swap -------------------------------------------------------------------------------------------------------------


def test_a_released_request_leaves_the_host_and_is_not_moved_there() -> None:
    kv = manager(2, host=2)
    recorder = Recorder(kv.tracer)
    kv.reserve("a", 8)
    kv.swap_out("a")
    kv.release("a")
    assert kv.swapped() == {} and kv.take_moves() == ([], [], [])
    (freed,) = recorder.events("blocks_freed")
    assert freed == BlocksFreed(owner="a", block_ids=(0, 1), num_kept=0, on_host=True, num_free=2)
    kv.reserve("b", 8)
    kv.fork("b", "c", 0), kv.release("c")
    assert len(recorder.events("blocks_freed")) == 1, "no event for a request without blocks"
    assert kv.swap_out("b")


def test_swapping_in_over_what_is_still_to_be_read_is_a_bug_of_ours() -> None:
    """Swaps in are made first: they would destroy it."""
    kv = manager(2, host=4)
    kv.reserve("a", 8)
    kv.swap_out("a"), kv.take_moves()
    kv.reserve("b", 8)
    kv.swap_out("b")
    with pytest.raises(AssertionError, match="swap in before others are swapped out"):
        kv.swap_in("a")


def test_a_swapped_request_has_no_room_until_it_is_back() -> None:
    kv = manager(2, host=2)
    kv.reserve("a", 4)
    kv.swap_out("a")
    for verb in (lambda: kv.reserve("a", 5), lambda: kv.swap_out("a")):
        with pytest.raises(AssertionError):
            verb()
    kv.take_moves()
    kv.swap_in("a")
    with pytest.raises(AssertionError):
        kv.swap_in("a")


# --- lost steps -------------------------------------------------------------------------------------------------------


def test_touched_are_the_owners_of_moves_that_may_not_have_been_made() -> None:
    kv = forked(num_tokens=5, host=2)
    kv.reserve("c", 4)
    kv.reserve("b", 6)
    assert kv.touched() == {"b"}
    kv.fork("b", "d", 6)
    assert kv.touched() == {"b", "d"}, "a request that starts on such data depends on it, too"
    kv.take_moves()
    assert kv.touched() == {"b", "d"}
    kv.take_moves()
    assert kv.touched() == frozenset()
    kv.swap_out("b")
    assert kv.touched() == {"b"}, "host block 0 is not device block 0"


# --- the invariants notice --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kv: kv._tables["a"].block_ids.append(4),
        lambda kv: kv._tables["a"].block_ids.append(2),
        lambda kv: kv._tables["c"].block_ids.append(2),
        lambda kv: kv._tables["a"].block_ids.pop(),
        lambda kv: kv._tables.pop("b"),
        lambda kv: kv._tables["h"].block_ids.pop(),
        lambda kv: setattr(kv._tables["a"], "room", 8),
        lambda kv: setattr(kv._tables["c"], "room", 8),
        lambda kv: kv.pool._free.append(2),
        lambda kv: kv.host_pool._free.popleft(),
    ],
)
def test_the_invariants_notice(spoil: Callable[[KVCacheManager], Any]) -> None:
    kv = forked(num_tokens=5, host=4)
    kv.reserve("h", 4), kv.swap_out("h")
    kv.reserve("c", 4)
    kv.check_invariants()
    spoil(kv)
    with pytest.raises(AssertionError):
        kv.check_invariants()
