"""m2's events are true of small batches. Their form is tested for all milestones in `tests/events`."""

from m2_continuous_batching.events import LeftOut
from tests.m2_continuous_batching.engines import MAX_MODEL_LEN, MakeEngine, greedy, limits, run
from tests.m2_continuous_batching.event_examples import ADMIT, BATCH, USAGE
from tests.support.traces import fields, traced


def test_readers_show_a_batch_by_its_requests_and_its_padding() -> None:
    """How the console and the Chrome trace show such events is tested with m1."""
    assert (ADMIT.request_ids(), BATCH.request_ids()) == (("req-7",), ("d", "a", "c"))
    assert BATCH.lanes() == (("d", "prefill"), ("a", "decode"), ("c", "decode"))
    assert BATCH.brief() == "mixed   14 tokens of 3 requests"
    assert LeftOut(rids=("a", "b"), available=9).brief() == "left out: a, b"
    assert USAGE.counters() == {"padded tokens": 10, "KV bytes used": 8192, "KV bytes reserved": 2**20}


# --- the truth --------------------------------------------------------------------------------------------------------


def test_a_request_that_must_wait_is_named_with_the_limit_in_its_way(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **limits(2, 10))
    for rid, length in (("a", 6), ("b", 7), ("c", 1)):
        engine.add_request([5] * length, greedy(2 + (rid == "b")), request_id=rid)
    for _ in range(3):
        engine.step()
    assert fields(recorder.events("not_admitted"), "rid", "limit", "needed", "available", "num_waiting") == [
        ("b", "max_num_batched_tokens", 7, 4, 2),  # a's prompt leaves 4; c would fit, but none overtakes
        ("c", "max_num_seqs", 3, 2, 1),
    ]
    run(engine)


def test_requests_that_left_in_a_step_that_ran_nothing_are_named_in_the_next_batch(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine)
    engine.add_request([5], greedy(1), request_id="a")
    engine.add_request([6], greedy(9), request_id="b")
    engine.step()  # a ends
    engine.abort_request("b")
    engine.step()  # b ends, and nothing runs
    engine.add_request([7], greedy(1), request_id="c")
    engine.step()
    assert recorder.events("batch")[-1].left == ("a", "b")


def test_forwards_count_their_padding(make_engine: MakeEngine) -> None:
    """Prompts of 9, 3 and 5: 27 places. Then c ends, b and a go on, and d comes into slot 2."""
    engine, recorder = traced(make_engine, **limits(4, 50))
    for rid, length, max_tokens in (("a", 9, 4), ("b", 3, 2), ("c", 5, 1)):
        engine.add_request([5] * length, greedy(max_tokens), request_id=rid)
    engine.step()
    engine.step()
    engine.add_request([5] * 2, greedy(2), request_id="d")
    run(engine)
    wanted = ("mode", "num_requests", "num_rows", "width", "useful_tokens", "padded_tokens", "kv_read", "kv_needed")
    assert fields(recorder.events("forward"), *wanted) == [
        ("prefill", 3, 3, 9, 17, 10, 27, 17),
        ("decode", 2, 2, 1, 2, 0, 2 * 10, 10 + 4),  # a and b; c has left slot 2
        ("prefill", 1, 1, 2, 2, 0, 2, 2),  # d takes slot 1, b's
        ("decode", 1, 1, 1, 1, 0, 11, 11),  # a alone
        ("decode", 2, 2, 1, 2, 0, 2 * 12, 12 + 3),
    ]
    assert fields(recorder.events("kv_usage"), "useful_tokens", "padded_tokens") == [(17, 10), (2, 0), (3, 0), (2, 0)]


def test_kv_usage_counts_what_is_reserved_and_what_of_it_is_used(make_engine: MakeEngine, execution: str) -> None:
    engine, recorder = traced(make_engine, **limits(4, 50, execution))
    per_token = engine.engine_core.kv_bytes_per_token
    engine.add_request([5] * 7, greedy(3), request_id="a")
    engine.add_request([5] * 2, greedy(1), request_id="b")
    run(engine)
    used = [9, 8, 9]  # b has left before the second
    reserved = used if execution == "per_request" else [4 * MAX_MODEL_LEN] * 3
    assert fields(recorder.events("kv_usage"), "kv_bytes_used", "kv_bytes_reserved") == [
        (tokens * per_token, places * per_token) for tokens, places in zip(used, reserved, strict=True)
    ]
    assert [event.tokens for event in recorder.events("free")] == [2, 9]
