"""The events of m3 are true of the blocks. Their form is tested for all milestones in `tests/events`.

The trace alone must explain the memory: allocated, shared, copied, moved and freed blocks, and their owners.
"""

import dataclasses
from collections import Counter
from typing import Any

from m3_paged_attention import LLMEngine, TraceConfig
from m3_paged_attention.kv_events import BlocksForked
from tests.m3_paged_attention.engines import MakeEngine, Recorder, greedy, ids, setting, unfinished
from tests.m3_paged_attention.event_examples import PREEMPTED, USAGE
from tests.support.traces import traced


def test_events_name_their_requests() -> None:
    forked = BlocksForked(owner="a/1", parent="a/0", block_ids=(3, 4), num_tokens=30)
    assert forked.request_ids() == ("a/0", "a/1")
    assert PREEMPTED.brief() == "preempted: req-7"


def test_usage_draws_curves_and_an_empty_pool_wastes_nothing() -> None:
    assert USAGE.utilisation == 0.95
    assert USAGE.counters() == {
        "KV blocks used": 10,
        "KV blocks free": 1000,
        "KV blocks shared": 3,
        "KV fragmentation %": 5.0,
    }
    assert dataclasses.replace(USAGE, num_used=0, tokens_held=0).fragmentation == 0


# --- the truth --------------------------------------------------------------------------------------------------------


def sized(make_engine: MakeEngine, **settings: Any) -> tuple[Any, LLMEngine]:
    """The event of the sizing, and the engine."""
    recorder = Recorder()
    engine = make_engine(trace_config=TraceConfig(readers=(recorder,)), **settings)
    (event,) = recorder.events("kv_sized")
    return event, engine


def test_the_sizing_can_be_computed_again_from_its_event(make_engine: MakeEngine) -> None:
    for settings in (
        setting(4, kv_cache_memory_bytes=5 * 2**20),
        setting(1, kv_cache_memory_bytes=50 * 2**20, block_size=16),
        setting(4, blocks=9),
        setting(4, blocks=9, mode="swap"),
        setting(4, blocks=9, mode="swap", swap_space_bytes=10**5),
    ):
        event, engine = sized(make_engine, **settings)
        kv = engine.engine_core.executor.worker.model_runner.kv
        assert event.block_bytes == event.block_size * event.bytes_per_token
        if event.budget_bytes is not None:
            assert event.fitting_blocks == event.budget_bytes // event.block_bytes
            most = (event.max_num_seqs or 0) * event.blocks_per_request
            assert event.num_blocks == min(event.fitting_blocks - 1, most)
        else:
            assert (event.source, event.num_blocks) == ("num_blocks", 9)
        assert event.num_bytes == (event.num_blocks + 1) * event.block_bytes == kv.blocks.nbytes
        assert event.num_host_bytes == event.num_host_blocks * event.block_bytes == kv.host_blocks.nbytes
        assert (event.num_host_blocks > 0) == (engine.config.scheduler.preemption_mode == "swap")
        assert engine.stats().num_blocks == event.num_blocks


def test_block_tables_made_of_events_are_the_real_ones(make_engine: MakeEngine, mode: str) -> None:
    """After every step, through forks, copies, swaps and ends."""
    engine, recorder = traced(make_engine, **setting(5, blocks=12, block_size=2, mode=mode))
    kv_manager = engine.engine_core.scheduler.kv_manager
    for n in range(3):
        engine.add_request(ids(4 + n), greedy(9, n=1 + n, temperature=1.0, seed=n), request_id=str(n))
    tables: dict[str, list[int]] = {}
    on_host: dict[str, list[int]] = {}
    seen, kinds = 0, Counter[str]()
    for _ in unfinished(engine):
        engine.step()
        for record in recorder.records[seen:]:
            event: Any = record.event
            kinds[event.kind] += 1
            if event.kind == "blocks_allocated":
                tables[event.owner] = tables.get(event.owner, []) + list(event.block_ids)
                assert len(tables[event.owner]) == event.num_owned
            elif event.kind == "blocks_forked":
                assert list(event.block_ids) == tables[event.parent][: len(event.block_ids)]
                tables[event.owner] = list(event.block_ids)
            elif event.kind == "block_copied":
                tables[event.owner] = [event.target if b == event.source else b for b in tables[event.owner]]
                assert event.num_holders == sum(event.source in table for table in tables.values())
            elif event.kind == "blocks_freed":
                gone = (on_host if event.on_host else tables).pop(event.owner)
                others = {block for table in tables.values() for block in table} if not event.on_host else set()
                assert set(event.block_ids) == set(gone) - others
                assert event.num_kept == len(gone) - len(event.block_ids)
            elif event.kind == "blocks_swapped":
                here, there = (tables, on_host) if event.direction == "out" else (on_host, tables)
                moved = event.block_ids, event.host_block_ids
                source, target = moved if event.direction == "out" else moved[::-1]
                assert here.pop(event.owner) == list(source)
                there[event.owner] = list(target)
                assert event.num_host_free == 12 - sum(map(len, on_host.values()))
            if event.kind in ("blocks_allocated", "block_copied", "blocks_swapped") or (
                event.kind == "blocks_freed" and not event.on_host
            ):
                assert event.num_free == 12 - len({block for table in tables.values() for block in table})
        seen = len(recorder.records)
        assert tables == kv_manager.owned() and on_host == kv_manager.swapped()
    assert not tables and not on_host
    wanted = {"blocks_allocated", "blocks_forked", "block_copied", "blocks_freed", "preempted"}
    assert kinds.keys() >= wanted | ({"blocks_swapped"} if mode == "swap" else set())
