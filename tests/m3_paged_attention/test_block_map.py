"""The block map: what it makes of a trace, how it is drawn, and what is said of it. A real engine's trace agrees."""

from collections.abc import Iterable

import pytest

from m1_single_request.events import Event
from m1_single_request.output_events import Finish
from m2_continuous_batching.events import Batch
from m3_paged_attention import SamplingParams, TraceConfig, TraceRecord
from m3_paged_attention.demo_tour import facts, highlights
from m3_paged_attention.events import KVSized
from m3_paged_attention.kv_events import BlockCopied, BlocksAllocated, BlocksForked, BlocksFreed, BlocksSwapped
from m3_paged_attention.scheduler_events import Admit, NotAdmitted, Preempted
from m3_paged_attention.views.block_map import KEY, BlockMap, Frame, draw
from tests.m3_paged_attention.engines import MakeEngine, greedy, ids, setting, unfinished
from tests.support.views import added, done, ended, fed, text_of


def sized(num_blocks: int = 8, block_size: int = 4) -> KVSized:
    return KVSized(
        source="num_blocks", budget_bytes=None, total_bytes=None, gpu_memory_utilization=None, peak_bytes=None,
        block_size=block_size, dtype="float32", block_bytes=40, bytes_per_token=10, fitting_blocks=num_blocks + 1,
        num_blocks=num_blocks, num_host_blocks=num_blocks, num_bytes=40 * (num_blocks + 1), num_host_bytes=0,
        max_model_len=100, max_num_seqs=4,
    )  # fmt: skip


def admit(rid: str, how: str = "prefill", *, said: int = 0, extend: int = 6, prefix: int = 0) -> Admit:
    return Admit(
        rid=rid, how=how, source=None, prefix=prefix, extend=extend, num_output_tokens=said, num_blocks=2, num_free=6,
        num_running=1, max_num_seqs=4, num_waiting=0,
    )  # fmt: skip


def got(owner: str, *block_ids: int) -> BlocksAllocated:
    return BlocksAllocated(owner=owner, block_ids=block_ids, num_tokens=6, num_owned=len(block_ids), num_free=6)


def forked(owner: str, parent: str, *block_ids: int, num_tokens: int = 5) -> BlocksForked:
    return BlocksForked(owner=owner, parent=parent, block_ids=block_ids, num_tokens=num_tokens)


def copied(owner: str, source: int, target: int) -> BlockCopied:
    return BlockCopied(owner=owner, source=source, target=target, num_holders=1, num_free=5)


def freed(owner: str, *block_ids: int, on_host: bool = False) -> BlocksFreed:
    return BlocksFreed(owner=owner, block_ids=block_ids, num_kept=0, on_host=on_host, num_free=8)


def swapped(owner: str, direction: str, block_ids: tuple[int, ...], host: tuple[int, ...]) -> BlocksSwapped:
    return BlocksSwapped(
        owner=owner, direction=direction, block_ids=block_ids, host_block_ids=host, num_free=8, num_host_free=6
    )


def preempted(rid: str, mode: str = "recompute") -> Preempted:
    return Preempted(
        rid=rid, mode=mode, num_blocks=2, num_freed=2, needed=2, available=1, num_tokens=7, num_output_tokens=2
    )


def refused(rid: str, limit: str = "blocks") -> NotAdmitted:
    return NotAdmitted(rid=rid, limit=limit, needed=2, available=1, kept_free=2, num_waiting=1)


def batch(**seq_lens: int) -> Batch:
    return Batch(
        mode="mixed", rids=tuple(seq_lens), extend_lens=(1,) * len(seq_lens),
        prefix_lens=tuple(n - 1 for n in seq_lens.values()), seq_lens=tuple(seq_lens.values()), joined=(), left=(),
        total_tokens=len(seq_lens), budget=9,
    )  # fmt: skip


def heard(*steps: Iterable[Event], head: Iterable[Event] = (sized(),)) -> BlockMap:
    """A map of these events, step by step."""
    block_map = BlockMap()
    for event in head:
        block_map.read(TraceRecord(0, 0.0, event))
    return fed(block_map, *steps)


START = (added("a"), added("b"), admit("a"), got("a", 1, 2), admit("b"), got("b", 3, 4), batch(a=6, b=6))


# --- from events to frames --------------------------------------------------------------------------------------------


def test_steps_that_interleave_have_their_own_decisions() -> None:
    """Step 2 is scheduled before step 1 ends; what comes between two steps is a decision of the next one."""
    block_map = heard()
    stream: list[tuple[int, Event]] = [
        (1, added("a")), (1, admit("a")), (1, got("a", 1)), (1, batch(a=3)),
        (2, got("a", 2)), (2, batch(a=4)), (1, ended("a")), (1, done()), (1, refused("b")),
        (3, refused("c")), (2, freed("a", 2)), (2, done()), (3, done()),
    ]  # fmt: skip
    for step, event in stream:
        block_map.read(TraceRecord(step, 0.0, event))
    assert [(frame.step, frame.events) for frame in block_map.frames] == [
        (1, [admit("a"), got("a", 1), ended("a")]),
        (2, [got("a", 2), freed("a", 2)]),
        (3, [refused("b"), refused("c")]),
    ]


def test_a_frame_keeps_the_decisions_of_its_step_the_most_remarkable_first() -> None:
    first, second, third = heard(
        START, (freed("b", 3, 4), preempted("b"), got("a", 5), ended("z"), freed("z")), (refused("b"), batch(a=9))
    ).frames
    assert [type(event) for event in first.events] == [Admit, BlocksAllocated, Admit, BlocksAllocated]
    assert [type(event) for event in second.decisions()] == [
        Preempted,
        Finish,
        BlocksFreed,
        BlocksFreed,
        BlocksAllocated,
    ]
    assert [event.owner for event in second.of(BlocksFreed)] == ["b", "z"], "nothing is lost"
    assert [type(event) for event in third.events] == [NotAdmitted]


def test_frames_do_not_change_when_the_run_goes_on() -> None:
    block_map = heard(START)
    kept = block_map.frames[0]
    fed(block_map, (copied("a", 2, 7), freed("b", 3, 4), ended("b"), added("c"), batch(a=7)), first_step=2)
    assert kept.tables == {"a": (1, 2), "b": (3, 4)} and kept.num_kv == {"a": 6, "b": 6} and kept.waiting == {}


# --- on a console -----------------------------------------------------------------------------------------------------


def drawn(frame: Frame, width: int = 100, most: int = 3) -> list[str]:
    """The lines of a frame on a console without colours."""
    lines = text_of(draw(frame, width, most=most), width).splitlines()
    assert all(len(line) <= width for line in lines)
    return [line.replace("\N{NO-BREAK SPACE}", " ").rstrip() for line in lines]


def test_a_frame_has_a_cell_for_every_block_and_the_decisions_below() -> None:
    first, second, third = heard(
        (
            *(added("a"), added("b"), admit("a"), got("a", 1, 2), forked("b", "a", 1, 2), admit("b", "fork")),
            *(batch(a=6), added("c"), refused("c")),
        ),
        (copied("b", 2, 3), admit("c"), preempted("c"), batch(a=8, b=6)),
        (swapped("a", "out", (1, 2), (0, 1)), preempted("a", "swap")),
    ).frames
    assert drawn(first, most=2) == [
        "step 1: 2 of 8 blocks in use, 2 of them by several requests; 6 free",
        "A a  B b  C c (waits)",
        "    1  A2 a2 .  .  .  .  .  .",
        "b shares blocks 1-2 with a: the KV of its first 5 tokens need not be computed, nor stored twice.",
        "c must wait: it needs 2 blocks of 1 free ones, and 2 must stay free for the next tokens of those",
        "that run.",
        "... and 3 decisions more",
    ]
    assert drawn(second, most=1)[1:3] == ["A a  B b  C c (preempted)", "    1  A2 A  b  .  .  .  .  ."]
    assert drawn(third)[1] == "B b  A a (on the host: 2 blocks)  C c (preempted)"


def test_every_letter_is_explained() -> None:
    for letters in ("A  full", "a  A still fills", "A3  held by 3", ".  free"):
        assert letters in KEY


def test_after_26_requests_the_letters_begin_anew() -> None:
    names = [f"r{i}" for i in range(27)]
    events = [event for i, rid in enumerate(names, 1) for event in (added(rid), got(rid, i))]
    lines = drawn(heard(events, head=[sized(40)]).frames[0], 60)
    assert "Z r25" in " ".join(lines) and "A r26" in " ".join(lines)
    assert next(line for line in lines if line.startswith("   17")).endswith("y  z  a  .  .  .  .  .")


def test_a_large_pool_is_drawn_without_its_free_lines() -> None:
    lines = drawn(heard((added("a"), got("a", 1, 900), batch(a=8)), head=[sized(1000)]).frames[0])
    assert [line for line in lines if line.endswith(" free") and "..." in line] == [
        "   25  ... 888 free", "  913  ... 1000 free"
    ]  # fmt: skip
    assert sum("A" in line for line in lines[2:]) == 2


@pytest.mark.parametrize("width", [10, 40, 61, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for frame in heard(START, (preempted("b"), added("c")), (copied("a", 2, 3),)).frames:
        drawn(frame, width)


# --- the facts of a run -----------------------------------------------------------------------------------------------

STORY = (
    (
        *(added("a"), added("b"), added("c", 9), admit("a"), got("a", 1, 2), forked("b", "a", 1, 2)),
        *(admit("b", "fork"), admit("c"), got("c", 3, 4, 5), batch(a=6, c=9)),
    ),
    (copied("b", 2, 6), batch(a=7, b=6, c=10)),
    (got("a", 7), batch(a=8, b=7, c=11)),
    (freed("c", 3, 4, 5), preempted("c"), batch(a=9, b=8)),
    (freed("a", 2, 7), ended("a", 3), batch(a=9, b=9)),
    (admit("c", said=2, extend=11), got("c", 3, 4, 5), batch(b=9, c=11)),
    (freed("b", 1, 6), ended("b", 3), freed("c", 3, 4, 5), ended("c", 4)),
)


def test_the_highlights_are_the_first_of_everything() -> None:
    assert [(title, frame.step) for title, frame in highlights(heard(*STORY).frames)] == [
        ("A prompt is stored once for several answers (fork)", 1),
        ("Most requests in flight", 1),
        ("Two answers differ: one gets a block of its own (copy on write)", 2),
        ("The memory is full (preemption)", 4),
        ("A preempted request runs again", 6),
    ]


def test_the_facts_have_the_numbers_of_the_run() -> None:
    assert facts(heard(*STORY).frames, sized()) == [
        "Reserved and empty: 17% of the places in used blocks, over all steps. They are the ends of last blocks, at "
        "most 3 places per request.",
        "Step 1 has the most requests in flight, 3, in 5 blocks. As many slots of m2 take 2.9 KiB; all blocks together "
        "take 360 bytes.",
        "Preemptions: 1. No output token was lost.",
    ]


# --- the trace of an engine -------------------------------------------------------------------------------------------


def test_the_map_agrees_with_the_engine_after_every_step(make_engine: MakeEngine, mode: str) -> None:
    block_map = BlockMap()
    engine = make_engine(**setting(6, blocks=14, mode=mode), trace_config=TraceConfig(readers=(block_map,)))
    kv_manager = engine.engine_core.scheduler.kv_manager
    engine.add_request(ids(10), SamplingParams(n=3, max_tokens=12, temperature=1.0, seed=3, ignore_eos=True))
    for number, length in enumerate((5, 9, 3, 14)):
        engine.add_request(ids(length), greedy(6 + 3 * number))
    for _ in unfinished(engine):
        if len(block_map.frames) == 9:
            engine.abort_request("req-2")
        engine.step()
        frame, counted = block_map.frames[-1], kv_manager.usage()
        assert {rid: list(table) for rid, table in frame.tables.items()} == kv_manager.owned()
        assert {rid: list(table) for rid, table in frame.host_tables.items()} == kv_manager.swapped()
        assert (frame.num_used, frame.num_shared) == (counted.num_used, counted.num_shared)
        assert sum(block.num_tokens for block in frame.blocks) == engine.stats().kv_tokens
        assert list(frame.waiting) == [request.request_id for request in engine.engine_core.scheduler.waiting]
    assert not block_map.frames[-1].tables and block_map.sized is not None
    for kind in (BlocksForked, BlockCopied, Preempted, Admit):
        assert any(frame.of(kind) for frame in block_map.frames), kind
    assert any(frame.of(BlocksSwapped) for frame in block_map.frames) == (mode == "swap")
