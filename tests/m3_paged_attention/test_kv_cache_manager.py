"""Block tables: room for tokens, shared blocks and their copies, swapping, and what the trace hears of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from m1_single_request.trace_event import Event
from m1_single_request.tracer import Tracer, TraceRecord
from m3_paged_attention.errors import OutOfBlocksError
from m3_paged_attention.kv_cache_config import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_cache_manager import KVCacheManager
from m3_paged_attention.kv_events import (
    BlockCopied,
    BlocksAllocated,
    BlocksForked,
    BlocksFreed,
    BlocksSwapped,
    BlocksUsed,
)

BLOCK = 4


class Recorder:
    """A reader that keeps the events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def read(self, record: TraceRecord) -> None:
        self.events.append(record.event)

    def close(self) -> None: ...


def manager(num_blocks: int = 8, *, host: int = 0, reader: Recorder | None = None) -> KVCacheManager:
    spec = KVCacheSpec(block_size=BLOCK, num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    tracer = Tracer()
    if reader is not None:
        tracer.attach(reader)
    config = KVCacheConfig(spec=spec, num_blocks=num_blocks, num_host_blocks=host)
    return KVCacheManager(kv_cache_config=config, tracer=tracer)


def forked(*, num_tokens: int, num_blocks: int = 8, host: int = 0) -> KVCacheManager:
    """`a` with 6 tokens in blocks 1 and 2, and `b` that shares the first `num_tokens` of them."""
    kv = manager(num_blocks, host=host)
    kv.reserve("a", 6)
    kv.fork("a", "b", num_tokens)
    return kv


# --- room for tokens --------------------------------------------------------------------------------------------------


def test_a_request_gets_as_many_blocks_as_its_tokens_fill() -> None:
    kv = manager()
    assert [kv.blocks_for(n) for n in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert kv.reserve("a", 9) == [1, 2, 3]
    assert kv.reserve("b", 4) == [4]
    assert kv.owned() == {"a": [1, 2, 3], "b": [4]} and kv.num_free == 4 and kv.num_blocks == 8


def test_it_grows_by_a_block_when_the_last_one_is_full() -> None:
    kv = manager()
    kv.reserve("a", 3)
    assert [kv.reserve("a", n) for n in range(4, 11)] == [[], [2], [], [], [], [3], []]
    assert kv.block_ids("a") == [1, 2, 3]
    assert kv.reserve("a", 20) == [4, 5], "a prompt that is computed again may be longer than it was"


def test_asking_for_less_than_there_is_takes_nothing_away() -> None:
    kv = manager()
    kv.reserve("a", 9)
    assert kv.reserve("a", 2) == [] and kv.block_ids("a") == [1, 2, 3]


def test_the_need_is_what_a_reservation_takes() -> None:
    kv = manager()
    assert kv.num_needed("a", 9) == 3
    kv.reserve("a", 6)
    assert [kv.num_needed("a", n) for n in (5, 6, 7, 8, 9, 12, 13)] == [0, 0, 0, 0, 1, 1, 2]


def test_only_those_are_in_need_who_have_come_to_the_end_of_a_block() -> None:
    kv = manager()
    kv.reserve("a", 4), kv.reserve("b", 5), kv.reserve("c", 8)
    assert kv.in_need([("c", 9), ("b", 6), ("a", 5)]) == [("c", 9), ("a", 5)]
    kv.fork("b", "d", 5)
    assert kv.in_need([("b", 6), ("d", 6)]) == [("b", 6), ("d", 6)]


def test_a_request_can_be_held_if_its_need_is_free() -> None:
    kv = manager(3)
    assert kv.can_hold("a", 12) and not kv.can_hold("a", 13)
    kv.reserve("a", 8)
    assert kv.can_hold("a", 12) and not kv.can_hold("a", 13)
    assert kv.can_hold("b", 4) and not kv.can_hold("b", 5)
    kv.reserve("b", 1)
    assert kv.can_hold("a", 8) and not kv.can_hold("a", 9) and kv.can_hold("b", 4)


def test_a_pool_of_one_block_serves_one_request_after_another() -> None:
    kv = manager(1)
    for name in "ab":
        assert kv.reserve(name, 1) == [1] and kv.reserve(name, 4) == []
        assert not kv.can_hold(name, 5) and not kv.can_hold("c", 1)
        kv.release(name)


def test_reserving_more_than_is_free_raises_and_changes_nothing() -> None:
    kv = manager(3)
    kv.reserve("a", 8)
    for name, num_tokens in (("a", 13), ("b", 5)):
        with pytest.raises(OutOfBlocksError):
            kv.reserve(name, num_tokens)
    assert kv.owned() == {"a": [1, 2]} and kv.num_free == 1
    kv.check_invariants()


def test_released_blocks_are_handed_out_again_and_a_second_release_is_harmless() -> None:
    kv = manager(3)
    kv.reserve("a", 8), kv.reserve("b", 4)
    kv.release("a"), kv.release("a"), kv.release("nobody")
    assert kv.owned() == {"b": [3]} and kv.num_free == 2
    assert kv.reserve("c", 8) == [1, 2]


def test_what_a_caller_does_to_the_answers_changes_no_owner() -> None:
    kv = manager(host=2)
    kv.reserve("a", 4).append(7)
    kv.fork("a", "b", 4)
    kv.swap_out("b")
    kv.block_ids("a").append(7), kv.owned()["a"].append(7), kv.swapped()["b"].append(7)
    assert kv.owned() == {"a": [1]} and kv.swapped() == {"b": [0]}
    kv.check_invariants()


def test_whoever_owns_nothing_has_no_ids() -> None:
    with pytest.raises(KeyError):
        manager().block_ids("nobody")


# --- fork and copy on write -------------------------------------------------------------------------------------------


def test_a_fork_shares_the_blocks_with_its_first_tokens() -> None:
    kv = forked(num_tokens=5)
    assert kv.owned() == {"a": [1, 2], "b": [1, 2]} and kv.usage() == (8, 6, 2, 2)
    kv.fork("a", "c", 4)
    kv.fork("a", "d", 0)
    assert kv.block_ids("c") == [1] and kv.block_ids("d") == []
    assert kv.reserve("c", 5) == [3], "what it shares is full: it goes on in a block of its own"
    assert kv.reserve("d", 1) == [4]
    assert kv.take_moves() == ([], [], [])


def test_whoever_writes_into_a_shared_block_first_gets_a_copy_and_the_last_one_needs_none() -> None:
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


def test_a_copy_is_made_once() -> None:
    kv = forked(num_tokens=5)
    kv.reserve("b", 6), kv.take_moves()
    assert [kv.num_needed("b", n) for n in (7, 8, 9)] == [0, 0, 1]
    assert kv.reserve("b", 7) == [] == kv.reserve("b", 8) and kv.reserve("b", 9) == [4]


def test_a_copy_of_a_block_that_is_itself_to_be_copied_comes_from_where_the_data_is() -> None:
    kv = forked(num_tokens=5)
    kv.reserve("b", 6)
    kv.fork("b", "c", 5)
    kv.fork("c", "d", 5)
    kv.reserve("c", 6), kv.reserve("d", 6)
    assert (kv.block_ids("b"), kv.block_ids("c"), kv.block_ids("d")) == ([1, 3], [1, 4], [1, 5])
    assert kv.take_moves().copies == [(2, 3), (2, 4), (2, 5)]


def test_a_copy_to_a_block_that_was_let_go_of_is_forgotten() -> None:
    kv = forked(num_tokens=5, num_blocks=3)
    kv.reserve("b", 6)
    kv.release("b")
    assert kv.take_moves().copies == []
    kv.fork("a", "c", 5), kv.fork("a", "d", 5)
    kv.reserve("c", 6)
    kv.release("c")
    kv.reserve("d", 6)
    assert kv.take_moves().copies == [(2, 3)], "a block is a target once"


def test_whoever_writes_its_tokens_again_copies_every_block_that_is_shared() -> None:
    """After a lost step, say: the token that is written need not be in the last block."""
    kv = forked(num_tokens=6)
    assert [kv.num_needed("a", n) for n in (1, 4, 5, 8)] == [1, 1, 1, 1]
    assert kv.reserve("a", 1) == [3] and kv.block_ids("a") == [3, 2]
    assert kv.reserve("a", 4) == [] and kv.num_needed("a", 5) == 1
    assert kv.reserve("a", 5) == [4] and kv.block_ids("a") == [3, 4] and kv.block_ids("b") == [1, 2]


def test_the_parent_may_end_before_its_children() -> None:
    kv = forked(num_tokens=5)
    kv.release("a")
    assert kv.owned() == {"b": [1, 2]} and kv.num_free == 6
    assert kv.reserve("b", 6) == []
    kv.release("b")
    assert kv.num_free == 8
    kv.check_invariants()


def test_a_fork_of_what_is_not_there_is_a_bug_of_ours() -> None:
    kv = forked(num_tokens=5, host=2)
    with pytest.raises(KeyError):
        kv.fork("nobody", "c", 1)
    for parent, child, num_tokens in (("a", "b", 1), ("a", "c", 9)):
        with pytest.raises(AssertionError):
            kv.fork(parent, child, num_tokens)
    kv.swap_out("a")
    with pytest.raises(AssertionError):
        kv.fork("a", "c", 1)


def test_shared_slots_count_once() -> None:
    kv = forked(num_tokens=5)
    assert kv.num_tokens_held({"a": 6, "b": 5}) == 6
    assert kv.num_tokens_held({"b": 5}) == 5
    kv.reserve("b", 6)
    assert kv.num_tokens_held({"a": 6, "b": 6}) == 4 + 2 + 2
    kv.release("a")
    assert kv.num_tokens_held({"b": 6, "nobody": 3}) == 6, "nothing is shared any more"


# --- swap -------------------------------------------------------------------------------------------------------------


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


def test_without_room_on_the_host_nothing_changes() -> None:
    kv = manager(3, host=1)
    kv.reserve("a", 6)
    assert not kv.swap_out("a")
    assert kv.owned() == {"a": [1, 2]} and kv.swapped() == {} and kv.take_moves() == ([], [], [])


def test_without_room_on_the_device_nothing_changes() -> None:
    kv = manager(3, host=2)
    kv.reserve("a", 6)
    kv.swap_out("a"), kv.take_moves()
    kv.reserve("b", 5)
    with pytest.raises(OutOfBlocksError):
        kv.swap_in("a")
    assert kv.swapped() == {"a": [0, 1]} and kv.take_moves() == ([], [], [])
    kv.check_invariants()


def test_blocks_of_a_swapped_request_are_at_others_disposal_in_the_same_step() -> None:
    kv = manager(2, host=2)
    kv.reserve("a", 8)
    kv.swap_out("a")
    assert kv.reserve("b", 8) == [1, 2]
    assert kv.take_moves().swap_out == [(1, 0), (2, 1)]


def test_swapping_a_fork_takes_its_share_along_and_leaves_the_others_theirs() -> None:
    kv = forked(num_tokens=5, host=4)
    kv.swap_out("b")
    assert kv.owned() == {"a": [1, 2]} and kv.take_moves().swap_out == [(1, 0), (2, 1)]
    assert kv.reserve("a", 7) == [], "nobody shares its last block any more"
    kv.swap_in("b")
    assert kv.owned() == {"a": [1, 2], "b": [3, 4]}
    kv.check_invariants()


def test_a_copy_that_is_swapped_out_before_it_is_made_comes_from_its_source() -> None:
    """Swaps come before copies."""
    kv = forked(num_tokens=5, host=2)
    kv.reserve("b", 6)
    kv.swap_out("b")
    assert kv.take_moves() == ([], [(1, 0), (2, 1)], [])


def test_a_request_may_come_in_and_go_out_in_one_step() -> None:
    kv = manager(2, host=2)
    kv.reserve("a", 8)
    kv.swap_out("a"), kv.take_moves()
    kv.swap_in("a")
    kv.swap_out("a")
    assert kv.take_moves() == ([(0, 1), (1, 2)], [(1, 0), (2, 1)], [])
    assert kv.swapped() == {"a": [0, 1]}


def test_a_released_request_leaves_the_host_and_is_not_moved_there() -> None:
    kv = manager(2, host=2)
    kv.reserve("a", 8)
    kv.swap_out("a")
    kv.release("a")
    assert kv.swapped() == {} and kv.take_moves() == ([], [], [])
    kv.reserve("b", 8)
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
    assert kv.touched() == {"b", "d"}, "whoever starts on such data depends on it, too"
    kv.take_moves()
    assert kv.touched() == {"b", "d"}
    kv.take_moves()
    assert kv.touched() == frozenset()
    kv.swap_out("b")
    assert kv.touched() == {"b"}, "host block 0 is not device block 0"


# --- the trace --------------------------------------------------------------------------------------------------------


def test_the_trace_hears_of_every_block() -> None:
    recorder = Recorder()
    kv = manager(8, host=4, reader=recorder)
    kv.reserve("a", 6), kv.reserve("a", 7), kv.reserve("a", 8)
    kv.fork("a", "b", 7)
    kv.reserve("b", 8)
    kv.swap_out("b")
    kv.take_moves(), kv.swap_in("b")
    kv.release("b"), kv.release("a"), kv.release("nobody")
    assert recorder.events == [
        BlocksAllocated(owner="a", block_ids=(1, 2), num_tokens=6, num_owned=2, num_free=6),
        BlocksForked(owner="b", parent="a", block_ids=(1, 2), num_tokens=7),
        BlockCopied(owner="b", source=2, target=3, num_holders=1, num_free=5),
        BlocksSwapped(owner="b", direction="out", block_ids=(1, 3), host_block_ids=(0, 1), num_free=6, num_host_free=2),
        BlocksSwapped(owner="b", direction="in", block_ids=(4, 5), host_block_ids=(0, 1), num_free=4, num_host_free=4),
        BlocksFreed(owner="b", block_ids=(4, 5), num_kept=0, on_host=False, num_free=6),
        BlocksFreed(owner="a", block_ids=(1, 2), num_kept=0, on_host=False, num_free=8),
    ]


def test_the_trace_tells_blocks_that_others_keep_and_blocks_on_the_host() -> None:
    recorder = Recorder()
    kv = manager(8, host=4, reader=recorder)
    kv.reserve("a", 6)
    kv.fork("a", "b", 5)
    kv.reserve("b", 6)
    kv.release("b")
    kv.swap_out("a")
    kv.release("a")
    kv.reserve("c", 1)
    kv.fork("c", "d", 0)
    kv.release("d")
    freed = [event for event in recorder.events if isinstance(event, BlocksFreed)]
    assert freed == [
        BlocksFreed(owner="b", block_ids=(3,), num_kept=1, on_host=False, num_free=6),
        BlocksFreed(owner="a", block_ids=(0, 1), num_kept=0, on_host=True, num_free=4),
    ]


USAGE = BlocksUsed(num_used=6, num_free=10, num_shared=2, num_host_used=0, block_size=16, tokens_held=72)

SENTENCES: list[tuple[Event, str]] = [
    (
        BlocksAllocated(owner="req-1", block_ids=(3, 4, 5, 9), num_tokens=60, num_owned=4, num_free=1200),
        "req-1 needs room for 60 tokens: it gets blocks 3-5, 9 and owns 4 now; 1,200 are free.",
    ),
    (
        BlocksFreed(owner="req-1", block_ids=(7,), num_kept=2, on_host=False, num_free=9),
        "req-1 frees block 7; 2 stay in use, because others hold them; 9 blocks are free.",
    ),
    (
        BlocksFreed(owner="req-1", block_ids=(), num_kept=1, on_host=True, num_free=9),
        "req-1 frees no block; 1 stays in use, because others hold it; 9 host blocks are free.",
    ),
    (
        BlocksForked(owner="req-1/1", parent="req-1/0", block_ids=(7, 2), num_tokens=21),
        "req-1/1 shares blocks 7, 2 with req-1/0: the KV of its first 21 tokens need not be computed, nor stored "
        "twice.",
    ),
    (
        BlockCopied(owner="req-1/1", source=2, target=9, num_holders=1, num_free=3),
        "req-1/1 is about to write into block 2, which 1 other holds, too: it gets a copy, block 9; 3 are free.",
    ),
    (
        BlockCopied(owner="req-1/1", source=2, target=9, num_holders=3, num_free=3),
        "req-1/1 is about to write into block 2, which 3 others hold, too: it gets a copy, block 9; 3 are free.",
    ),
    (
        BlocksSwapped(owner="a", direction="out", block_ids=(4, 5), host_block_ids=(0, 1), num_free=3, num_host_free=6),
        "a is swapped out: blocks 4-5 to host blocks 0-1; 3 blocks are free on the device, 6 on the host.",
    ),
    (
        BlocksSwapped(owner="a", direction="in", block_ids=(4,), host_block_ids=(0,), num_free=3, num_host_free=6),
        "a is swapped in: host block 0 to block 4; 3 blocks are free on the device, 6 on the host.",
    ),
    (
        USAGE,
        "6 of 16 blocks in use, 2 of them shared. They hold 72 tokens in 96 slots: 75.0% used, 25.0% reserved for "
        "nothing.",
    ),
]


@pytest.mark.parametrize(("event", "sentence"), SENTENCES, ids=lambda value: getattr(value, "kind", ""))
def test_an_event_says_in_a_sentence_what_happened(event: Event, sentence: str) -> None:
    assert event.explain() == sentence
    assert all(request_id in sentence for request_id in event.request_ids())


def test_a_fork_is_about_both_requests() -> None:
    event = BlocksForked(owner="b", parent="a", block_ids=(1,), num_tokens=3)
    assert event.request_ids() == ("a", "b")


def test_usage_has_curves_and_an_empty_pool_wastes_nothing() -> None:
    assert (USAGE.utilisation, USAGE.fragmentation) == (0.75, 0.25)
    assert USAGE.counters() == {
        "KV blocks used": 6,
        "KV blocks free": 10,
        "KV blocks shared": 2,
        "KV fragmentation %": 25.0,
    }
    empty = BlocksUsed(num_used=0, num_free=16, num_shared=0, num_host_used=3, block_size=16, tokens_held=0)
    assert empty.fragmentation == 0 and "3 blocks on the host in use" in empty.explain()


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
