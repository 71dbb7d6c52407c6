"""The events of m3 are true of the blocks. Their form is tested for all milestones in `tests/events`.

That the trace alone explains the memory, with the owners of all blocks: `test_block_map.py`.
"""

import dataclasses
from typing import Any

from m3_paged_attention import LLMEngine, TraceConfig
from m3_paged_attention.kv_events import BlocksForked
from tests.m3_paged_attention.engines import MakeEngine, Recorder, setting
from tests.m3_paged_attention.event_examples import PREEMPTED, USAGE


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
