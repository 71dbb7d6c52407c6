"""The events of m3 are true of the blocks. Their form is tested for all milestones in `tests/events`.

That the trace alone explains the memory, with the owners of all blocks: `test_block_map.py`.
"""

import dataclasses

from m3_paged_attention.kv_events import BlocksForked
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
