"""What m2's events say: readable sentences with the numbers in them, and the truth about small batches."""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from m1_single_request.trace_event import Event
from m2_continuous_batching import ChromeTraceReader, ConsoleReader, LLMEngine, TraceConfig, events
from m2_continuous_batching.events import Admit, Batch, Forward, KVUsage, LeftOut, NotAdmitted
from tests.m2_continuous_batching.engines import (
    MAX_MODEL_LEN,
    MakeEngine,
    Recorder,
    greedy,
    limits,
    run,
    unfinished,
)

ADMIT = Admit(
    rid="req-7",
    prefix=0,
    extend=31,
    block_ids=(2,),
    num_running=3,
    max_num_seqs=16,
    budget_left=2000,
    max_num_batched_tokens=2048,
    num_waiting=4,
)
BATCH = Batch(
    mode="mixed",
    rids=("d", "a", "c"),
    extend_lens=(12, 1, 1),
    prefix_lens=(0, 10, 6),
    seq_lens=(12, 11, 7),
    joined=("d",),
    left=("b",),
    total_tokens=14,
    budget=2048,
)
FORWARD = Forward(
    mode="prefill",
    num_requests=3,
    num_rows=3,
    width=9,
    useful_tokens=17,
    padded_tokens=10,
    kv_read=27,
    kv_needed=17,
)
USAGE = KVUsage(useful_tokens=17, padded_tokens=10, kv_bytes_used=8192, kv_bytes_reserved=2**20)

EXAMPLES: dict[Event, list[str]] = {
    ADMIT: [
        "req-7 joins",
        "31 prompt tokens",
        "2,000 of this step's 2,048",
        "slot 2",
        "3 of at most 16",
        "4 still wait",
    ],
    dataclasses.replace(ADMIT, extend=1): ["its 1 prompt token "],
    NotAdmitted(rid="req-7", limit="max_num_seqs", needed=3, available=2, num_waiting=1): [
        "req-7 must wait:",
        "max_num_seqs = 2",
    ],
    NotAdmitted(rid="req-7", limit="max_num_batched_tokens", needed=1200, available=1100, num_waiting=2): [
        "req-7 must wait, and 1 other behind it",
        "1,200 prompt tokens",
        "1,100 that are left",
    ],
    NotAdmitted(rid="req-7", limit="kv_memory", needed=40, available=0, num_waiting=4): [
        "3 others behind it",
        "no KV memory for its 40 tokens",
    ],
    LeftOut(rids=("a", "b"), max_num_batched_tokens=2048): ["No token for a, b", "budget of 2,048"],
    BATCH: [
        "3 requests",
        "1 prefill of 12 tokens and 2 decodes of 1 token",
        "14 of at most 2,048 new tokens",
        "joined: d",
        "left: b",
    ],
    dataclasses.replace(
        BATCH,
        mode="prefill",
        rids=("d", "e"),
        extend_lens=(12, 3),
        prefix_lens=(0, 0),
        seq_lens=(12, 3),
        joined=("d", "e"),
        left=(),
        total_tokens=15,
    ): ["Batch of 2 requests: 2 prefills of 15 tokens, 15 of at most 2,048", "joined: d, e"],
    dataclasses.replace(
        BATCH,
        mode="decode",
        rids=("a",),
        extend_lens=(1,),
        prefix_lens=(10,),
        seq_lens=(11,),
        joined=(),
        left=(),
        total_tokens=1,
    ): ["Batch of 1 request: 1 decode of 1 token, 1 of at most 2,048 new tokens."],
    FORWARD: ["all prefills", "3 x 9", "10 of 27 places are padding", "27 positions", "17 of them needed"],
    dataclasses.replace(FORWARD, mode="decode", width=1, useful_tokens=3, padded_tokens=0, kv_read=30, kv_needed=20): [
        "all decodes",
        "3 x 1",
        "no padding",
        "30 positions of KV, 20 of them needed",
    ],
    USAGE: ["17 useful tokens", "10 padded", "8.0 KiB of 1.0 MiB", "(0.8%)"],
    dataclasses.replace(USAGE, kv_bytes_used=0, kv_bytes_reserved=0): ["0 bytes of 0 bytes"],
}
EVENT_CLASSES = [
    value
    for value in vars(events).values()
    if inspect.isclass(value) and issubclass(value, Event) and value.__module__ == events.__name__
]


def name_of(event: Event) -> str:
    return event.kind


# --- sentences --------------------------------------------------------------------------------------------------------


def test_there_is_an_example_of_every_event() -> None:
    assert {type(event) for event in EXAMPLES} == set(EVENT_CLASSES)


@pytest.mark.parametrize("event", EXAMPLES, ids=name_of)
def test_an_event_explains_itself_in_sentences_with_its_numbers(event: Event) -> None:
    text = event.explain()
    assert re.fullmatch(r"[A-Z0-9r].*[.]", text) and "  " not in text and "None" not in text
    for part in EXAMPLES[event]:
        assert part in text
    assert all(rid in text for rid in event.request_ids()) or isinstance(event, Batch)


@pytest.mark.parametrize("event", EXAMPLES, ids=name_of)
def test_an_event_s_data_are_its_fields_as_plain_json(event: Event) -> None:
    assert json.loads(json.dumps(event.data())) == json.loads(json.dumps(dataclasses.asdict(event)))
    assert event.data(stable=True) == event.data(), "nothing in a batch differs between machines"


def test_a_batch_is_about_all_its_requests_and_each_has_a_bar() -> None:
    assert BATCH.request_ids() == ("d", "a", "c")
    assert BATCH.lanes() == (("d", "prefill"), ("a", "decode"), ("c", "decode"))
    assert ADMIT.request_ids() == ("req-7",)


# --- the truth --------------------------------------------------------------------------------------------------------


def crowd(make_engine: MakeEngine, **setting: Any) -> tuple[LLMEngine, Recorder]:
    """An engine and all that it says."""
    engine = make_engine(**setting)
    return engine, Recorder(engine.tracer)


def fields(found: list[Any], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(event, name) for name in names) for event in found]


def test_admissions_count_down_the_budget_and_the_queue(make_engine: MakeEngine) -> None:
    engine, recorder = crowd(make_engine, **limits(3, 20))
    for rid, length in (("a", 9), ("b", 3), ("c", 5), ("d", 2)):
        engine.add_request([5] * length, greedy(2), request_id=rid)
    engine.step()
    wanted = ("rid", "extend", "block_ids", "num_running", "budget_left", "num_waiting")
    assert fields(recorder.events("admit"), *wanted) == [
        ("a", 9, (0,), 1, 11, 3),
        ("b", 3, (1,), 2, 8, 2),
        ("c", 5, (2,), 3, 3, 1),
    ]
    assert fields(recorder.events("admit"), "max_num_seqs", "max_num_batched_tokens", "prefix") == [(3, 20, 0)] * 3


def test_who_must_wait_is_told_which_limit_stands_in_the_way(make_engine: MakeEngine) -> None:
    engine, recorder = crowd(make_engine, **limits(2, 10))
    for rid, length in (("a", 6), ("b", 7), ("c", 1)):
        engine.add_request([5] * length, greedy(2 + (rid == "b")), request_id=rid)
    for _ in range(3):
        engine.step()
    assert fields(recorder.events("not_admitted"), "rid", "limit", "needed", "available", "num_waiting") == [
        ("b", "max_num_batched_tokens", 7, 4, 2),  # a's prompt leaves 4; c would fit, but nobody overtakes
        ("c", "max_num_seqs", 3, 2, 1),
    ]
    run(engine)


def test_who_is_left_out_is_named_and_runs_first_in_the_next_step(make_engine: MakeEngine) -> None:
    engine, recorder = crowd(make_engine, **limits(4, 6))
    for rid in ("a", "b"):
        engine.add_request([5, 6], greedy(4), request_id=rid)
    engine.step()
    for rid, length in (("c", 5), ("d", 6)):
        engine.add_request([7] * length, greedy(2), request_id=rid)
    engine.step()
    engine.step()
    batches = recorder.events("batch")
    assert [batch.rids for batch in batches] == [("a", "b"), ("c", "a"), ("b", "a", "c")]
    assert fields(recorder.events("left_out"), "rids", "max_num_batched_tokens") == [(("b",), 6)]
    assert recorder.events("not_admitted")[-1].available == 5, "b's token comes before d's prompt"
    run(engine)


def test_a_batch_says_who_came_and_who_went(make_engine: MakeEngine, execution: str) -> None:
    engine, recorder = crowd(make_engine, **limits(4, 50, execution))
    for rid, length, max_tokens in (("a", 9, 4), ("b", 3, 2), ("c", 5, 2)):
        engine.add_request([5] * length, greedy(max_tokens), request_id=rid)
    engine.step()
    engine.step()
    engine.add_request([5] * 12, greedy(1), request_id="d")
    run(engine)
    batches = recorder.events("batch")
    assert fields(batches, "mode", "rids", "joined", "left") == [
        ("prefill", ("a", "b", "c"), ("a", "b", "c"), ()),
        ("decode", ("a", "b", "c"), (), ()),
        ("mixed", ("d", "a"), ("d",), ("b", "c")),
        ("decode", ("a",), (), ("d",)),
    ]
    assert fields(batches, "extend_lens", "prefix_lens", "seq_lens", "total_tokens", "budget") == [
        ((9, 3, 5), (0, 0, 0), (9, 3, 5), 17, 50),
        ((1, 1, 1), (9, 3, 5), (10, 4, 6), 3, 50),
        ((12, 1), (0, 10), (12, 11), 13, 50),
        ((1,), (11,), (12,), 1, 50),
    ]


def test_who_went_in_a_step_that_ran_nothing_is_named_in_the_next_batch(make_engine: MakeEngine) -> None:
    engine, recorder = crowd(make_engine)
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
    engine, recorder = crowd(make_engine, **limits(4, 50))
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


def test_idle_slots_are_padding(make_engine: MakeEngine) -> None:
    engine, recorder = crowd(make_engine, **limits(4, 50))
    for rid, max_tokens in (("a", 1), ("b", 3), ("c", 1), ("d", 3)):
        engine.add_request([5, 6], greedy(max_tokens), request_id=rid)
    run(engine)
    decodes = [event for event in recorder.events("forward") if event.mode == "decode"]
    assert fields(decodes, "num_requests", "num_rows", "padded_tokens", "kv_read", "kv_needed") == [
        (2, 4, 2, 4 * 3, 2 * 3),  # slots 1 and 3; 0 and 2 are empty
        (2, 4, 2, 4 * 4, 2 * 4),
    ]


def test_kv_usage_says_what_is_reserved_and_what_of_it_is_used(make_engine: MakeEngine, execution: str) -> None:
    engine, recorder = crowd(make_engine, **limits(4, 50, execution))
    per_token = engine.engine_core.executor.kv_bytes_per_token
    engine.add_request([5] * 7, greedy(3), request_id="a")
    engine.add_request([5] * 2, greedy(1), request_id="b")
    run(engine)
    used = [9, 8, 9]  # b has left before the second
    reserved = used if execution == "per_request" else [4 * MAX_MODEL_LEN] * 3
    assert fields(recorder.events("kv_usage"), "kv_bytes_used", "kv_bytes_reserved") == [
        (tokens * per_token, places * per_token) for tokens, places in zip(used, reserved, strict=True)
    ]
    assert [event.tokens for event in recorder.events("free")] == [2, 9]


def test_a_step_tells_its_story_in_order(make_engine: MakeEngine) -> None:
    engine, recorder = crowd(make_engine, **limits(2))
    for rid in ("a", "b"):
        engine.add_request([5, 6], greedy(1), request_id=rid)
    engine.step()
    assert recorder.kinds() == [
        *["request_added"] * 2,
        *["admit"] * 2,
        "batch",
        "forward",
        "kv_usage",
        *["sampled"] * 2,
        *["result", "finish"] * 2,
        *["free"] * 2,
        "step_done",
    ]
    done = recorder.records[-1].event
    assert (done.num_tokens, done.num_running, done.num_waiting, done.kv_tokens) == (4, 0, 0, 0)


def test_a_step_that_failed_says_so_and_names_no_batch_that_was_not(make_engine: MakeEngine) -> None:
    engine, recorder = crowd(make_engine)
    engine.engine_core.executor.worker.model_runner.execution.decoder = None
    engine.add_request([5, 6], greedy(1), request_id="a")
    engine.step()
    (finish,) = recorder.events("finish")
    assert finish.reason == "error" and "TypeError" in finish.why
    assert recorder.events("forward") == recorder.events("kv_usage") == []


# --- readers ----------------------------------------------------------------------------------------------------------


def test_the_consoles_show_a_batch(make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    for verbose in (True, False):
        engine = make_engine(trace_config=TraceConfig(readers=(ConsoleReader(verbose=verbose),)), **limits(2, 6))
        for rid in ("a", "b", "c"):
            engine.add_request([5] * 5, greedy(2), request_id=rid)
        for _ in unfinished(engine):
            engine.step()
        said = re.sub(r"\s+", " ", capsys.readouterr().out)
        if verbose:
            assert "a joins: its 5 prompt tokens leave 1 of this step's 6; it gets slot 0" in said
            assert "b must wait, and 1 other behind it" in said
            assert "1 prefill of 5 tokens and 1 decode of 1 token" in said
            assert "c must wait: max_num_seqs = 2 requests run already" in said
        else:
            assert "mixed 6 tokens of 2 requests" in said
            assert len(said.split("step ")) - 1 == engine.stats().num_steps


def test_the_chrome_trace_has_a_lane_for_each_request_with_all_its_steps(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    engine = make_engine(trace_config=TraceConfig(readers=(ChromeTraceReader(path),)), **limits(2))
    for rid, max_tokens in (("a", 3), ("b", 2), ("c", 2)):
        engine.add_request([5, 6], greedy(max_tokens), request_id=rid)
    run(engine)
    engine.close()
    entries = json.loads(path.read_text())["traceEvents"]
    lanes = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    bars = [(lanes[e["tid"]], e["args"]["step"], e["name"]) for e in entries if e["ph"] == "X" and e["tid"] != 0]
    assert sorted(bars) == [
        ("a", 1, "prefill"),
        ("a", 2, "decode"),
        ("a", 3, "decode"),
        ("b", 1, "prefill"),
        ("b", 2, "decode"),
        ("c", 3, "prefill"),
        ("c", 4, "decode"),
    ]
    curves = {e["name"] for e in entries if e["ph"] == "C"}
    assert {"running", "padded tokens", "KV bytes used", "KV bytes reserved"} <= curves
