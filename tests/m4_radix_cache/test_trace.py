"""What m4's events say is the truth about the cache. Their form is tested for all milestones in `tests/events`.

The trace alone must explain why a request computed as little as it did, and which limit kept others out. Whose each
page is: the stored trace, and `test_radix_tree_view.py`.
"""

import dataclasses
from typing import Any

import pytest

from m4_radix_cache import LLMEngine
from tests.m4_radix_cache.engines import MakeEngine, greedy, ids, run, scheduler_of, setting
from tests.m4_radix_cache.event_examples import ADMIT, AUDIT, BATCH, EVICTED, MATCHED, ORDER, RETRACT
from tests.support.traces import fields, traced

HEAD = ids(40)
"""What several prompts have in common: more than is needed to wait for."""


def crowd(engine: LLMEngine) -> None:
    """Sharing, a salt, a family and long answers, which together outgrow a memory of 88 tokens."""
    engine.add_request(HEAD[:12], greedy(40), request_id="long")
    engine.step()
    engine.add_request([*HEAD, 60, 61], greedy(6), request_id="a")
    engine.add_request([*HEAD, 70, 71, 72], greedy(5), request_id="b")
    engine.add_request(HEAD, greedy(7), request_id="whole")
    engine.add_request(ids(13, 100), greedy(30), request_id="salted", cache_salt="tenant", priority=2)
    engine.add_request(ids(9, 150), greedy(5, n=2, temperature=1.0, seed=3), request_id="two")


CROWDED = {"tokens": 88, "conservativeness": 0.0}


# --- forms of events --------------------------------------------------------------------------------------------------


def test_events_name_their_requests() -> None:
    assert ORDER.request_ids() == ("a", "b", "c") and BATCH.request_ids() == ("a", "b")
    assert MATCHED.request_ids() == ("c",) and RETRACT.request_ids() == ADMIT.request_ids() == ("a",)


def test_summaries_lanes_and_curves_of_events() -> None:
    assert BATCH.brief() == "prefill 3 tokens of 2 requests, 527 more cached"
    assert dataclasses.replace(BATCH, mode="decode").brief() == "decode  3 tokens of 2 requests"
    assert (EVICTED.brief(), RETRACT.brief()) == ("evicted for a, b: 48 tokens", "retracted: a")
    assert BATCH.lanes() == (("a", "prefill"), ("b", "prefill"))
    assert AUDIT.counters() == {
        "KV slots free": 1000,
        "KV slots evictable": 500,
        "KV slots protected": 400,
        "KV slots owned": 100,
    }


# --- why so little was computed ---------------------------------------------------------------------------------------


@pytest.mark.sample(1)
def test_the_trace_alone_tells_how_much_each_request_skipped_and_why(make_engine: MakeEngine, cache: str) -> None:
    engine, recorder = traced(make_engine, **setting(3, cache=cache, **CROWDED))
    crowd(engine)
    outputs = run(engine)
    found: dict[str, Any] = {}
    first: dict[str, Any] = {}
    for record in recorder.records:
        event: Any = record.event
        if event.kind == "matched":
            found[event.rid] = event
        elif event.kind == "admit":
            match = found.pop(event.rid)
            assert (event.prefix, event.extend) == (match.device_hit, match.query_len - match.device_hit)
            assert match.device_hit <= match.limit == match.query_len - 1
            first.setdefault(event.rid, event)
    assert {rid: output.metrics.cached_tokens for rid, output in outputs.items() if rid != "two"} == {
        rid: admit.prefix for rid, admit in first.items() if not rid.startswith("two/")
    }
    stats, admits = engine.stats(), recorder.events("admit")
    extends = [event for event in recorder.events("batch") if event.mode == "extend"]
    assert sum(event.num_cached for event in extends) == sum(admit.prefix for admit in admits)
    assert stats.num_cached_tokens == sum(admit.prefix for admit in admits)
    assert stats.num_prompt_tokens == sum(event.total_tokens for event in extends)
    assert stats.num_evicted_tokens == sum(event.freed for event in recorder.events("evicted"))
    assert stats.num_retractions == len(recorder.events("retract")) > 0
    assert (stats.num_cached_tokens > 0) == (stats.num_evicted_tokens > 0) == (cache != "chunk")


# --- who got in, and who had to go ------------------------------------------------------------------------------------


def test_who_must_wait_is_told_which_limit_stands_in_the_way(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(2, tokens=40, policy="fcfs"))
    engine.generate(ids(17), greedy(1))
    for rid, prompt in (("a", ids(6, 50)), ("hit", ids(18)), ("c", ids(1, 70))):
        engine.add_request(prompt, greedy(12), request_id=rid)
    engine.step()
    (waits,) = recorder.events("not_admitted")
    assert (waits.rid, waits.limit, waits.is_locked, waits.prefix) == ("hit", "memory", True, 16)
    assert waits.needed >= waits.available and "once its 16 cached tokens are locked" in (waits.explain())
    run(engine)
    engine, recorder = traced(make_engine, **setting(2))
    for rid in ("a", "b", "c"):
        engine.add_request(ids(3), greedy(3), request_id=rid)
        engine.step()
    assert recorder.events("not_admitted") == [], "with no place free nobody is even asked"
    run(engine)
    assert fields(recorder.events("admit"), "rid") == [("a",), ("b",), ("c",)]


# --- whose each page is -----------------------------------------------------------------------------------------------


def test_a_lock_that_stays_where_it_is_and_one_on_the_root_are_not_told(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(2))
    engine.generate(ids(6), greedy(2))
    wanted = ("delta", "num_tokens", "protected")
    assert fields(recorder.events("locked"), *wanted) == [(1, 4, 4), (-1, 4, 0)]
    engine.generate(ids(6), greedy(2))  # it finds the page that it would cache
    assert fields(recorder.events("locked"), *wanted) == [(1, 4, 4), (-1, 4, 0)] * 2


def test_an_audit_that_fails_tells_the_equation_first(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(2, tokens=80))
    engine.add_request(ids(6), greedy(3))
    engine.step()
    lost = scheduler_of(engine).pools.token_to_kv_pool_allocator.alloc(8)
    with pytest.raises(AssertionError, match="72 of 80 tokens are accounted for"):
        engine.step()
    assert recorder.events("audit")[-1].explain() == (
        "64 free + 0 evictable + 4 protected + 4 owned by requests is not 80 slots: 8 slots lost."
    )
    assert lost is not None
    scheduler_of(engine).pools.token_to_kv_pool_allocator.free(lost)
    run(engine)


# --- steps ------------------------------------------------------------------------------------------------------------


def test_without_debug_nothing_is_audited(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(2, debug=False))
    engine.generate(ids(6), greedy(3))
    assert recorder.events("audit") == [] and len(recorder.events("step_done")) == 3
