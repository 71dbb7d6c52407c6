"""What m3's events say: readable sentences with the numbers in them, and the truth about blocks.

The trace alone must explain the memory: who got which blocks, who shares them, what was copied and moved, who lost them
and why, and how many there are.
"""

import ast
import dataclasses
import inspect
import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from m1_single_request.trace_event import Event
from m3_paged_attention import (
    ChromeTraceReader,
    ConsoleReader,
    JsonlReader,
    LLMEngine,
    TraceConfig,
    engine_core,
    events,
    scheduler_events,
)
from m3_paged_attention.events import (
    BackendChosen,
    BlockCopied,
    BlocksAllocated,
    BlocksForked,
    BlocksFreed,
    BlocksSwapped,
    KVSized,
    KVUsage,
)
from m3_paged_attention.scheduler_events import Admit, LeftOut, NotAdmitted, ParallelSampling, Preempted, StepLost
from tests.m3_paged_attention.engines import MakeEngine, Recorder, greedy, ids, run, setting, unfinished

SIZED = KVSized(
    source="kv_cache_memory_bytes",
    budget_bytes=512 * 2**20,
    total_bytes=None,
    gpu_memory_utilization=None,
    peak_bytes=None,
    block_size=16,
    block_bytes=256 * 2**10,
    bytes_per_token=16 * 2**10,
    fitting_blocks=2048,
    num_blocks=2047,
    num_host_blocks=0,
    num_bytes=512 * 2**20,
    num_host_bytes=0,
    max_model_len=1024,
    max_num_seqs=64,
)
ADMIT = Admit(
    rid="req-7",
    how="prefill",
    source=None,
    prefix=0,
    extend=31,
    num_output_tokens=0,
    num_blocks=2,
    num_free=40,
    num_running=3,
    max_num_seqs=16,
    budget_left=2000,
    num_waiting=4,
)
WAITS = NotAdmitted(rid="req-7", limit="blocks", needed=5, available=7, kept_free=4, num_waiting=1)
PREEMPTED = Preempted(
    rid="req-7",
    mode="recompute",
    num_blocks=5,
    num_freed=3,
    needed=2,
    available=1,
    num_tokens=70,
    num_output_tokens=9,
)
USAGE = KVUsage(num_used=10, num_free=1000, num_shared=3, num_host_used=0, block_size=16, tokens_held=152)

EXAMPLES: dict[Event, list[str]] = {
    BackendChosen(asked="auto", backend="native", obstacle=None): ["Kernels: native, the fastest here."],
    BackendChosen(asked="torch", backend="torch", obstacle=None): ["Kernels: torch, as asked for."],
    BackendChosen(asked="auto", backend="torch", obstacle="no compiler"): ["torch;", "cannot run here: no compiler."],
    SIZED: ["512.0 MiB / 256.0 KiB per block = 2,048 blocks of 16 tokens", "block 0", "32,752 tokens", "32.0 requests"],
    dataclasses.replace(SIZED, num_blocks=64, num_bytes=65 * 2**18, max_num_seqs=1): [
        "1 request of 64 blocks at most never fill more than 64, so no more are made",
    ],
    dataclasses.replace(SIZED, source="num_blocks", budget_bytes=None, num_blocks=7, fitting_blocks=8): [
        "num_blocks=7 of 16 tokens was asked for, 256.0 KiB each"
    ],
    dataclasses.replace(
        SIZED,
        source="gpu_memory_utilization",
        total_bytes=80 * 2**30,
        gpu_memory_utilization=0.9,
        peak_bytes=20 * 2**30,
        budget_bytes=52 * 2**30,
    ): ["90% of 80.0 GiB, less 20.0 GiB for all else, leave 52.0 GiB"],
    dataclasses.replace(SIZED, num_host_blocks=100, num_host_bytes=100 * 2**18): ["100 more blocks on the host"],
    BlocksAllocated(owner="a", block_ids=(3, 4, 5, 9), num_tokens=50, num_owned=6, num_free=12): [
        "a needs room for 50 tokens",
        "blocks 3-5, 9",
        "owns 6 now",
        "12 are free",
    ],
    BlocksFreed(owner="a", block_ids=(3,), num_kept=1, on_host=False, num_free=12): [
        "a gives block 3 back",
        "1 stays in use",
    ],
    BlocksFreed(owner="a", block_ids=(), num_kept=2, on_host=True, num_free=12): [
        "gives no block back",
        "2 stay in use",
        "12 host blocks are free",
    ],
    BlocksForked(owner="a/1", parent="a/0", block_ids=(3, 4), num_tokens=30): [
        "a/1 shares blocks 3-4 with a/0",
        "30 tokens",
    ],
    BlockCopied(owner="a/1", source=4, target=9, num_holders=1, num_free=3): [
        "a/1 is about to write into block 4",
        "1 other holds",
        "copied to block 9",
    ],
    BlocksSwapped(owner="a", direction="out", block_ids=(1, 2), host_block_ids=(0, 7), num_free=3, num_host_free=1): [
        "a is swapped out: blocks 1-2 to host blocks 0, 7"
    ],
    BlocksSwapped(owner="a", direction="in", block_ids=(5, 2), host_block_ids=(0, 7), num_free=3, num_host_free=1): [
        "a is swapped in: host blocks 0, 7 to blocks 5, 2"
    ],
    USAGE: ["10 of 1,010 blocks in use", "3 of them shared", "152 tokens in 160 slots", "95.0% used, 5.0% reserved"],
    dataclasses.replace(USAGE, num_used=0, num_shared=0, tokens_held=0, num_host_used=2): ["2 blocks on the host"],
    ParallelSampling(rid="a", children=("a/0", "a/1"), seeds=(7, 8)): ["a asks for 2", "a/0, a/1", "7, 8"],
    ADMIT: ["req-7 joins: 31 tokens to compute", "takes 2 free blocks, 40 are left", "3 of at most 16", "4 still wait"],
    dataclasses.replace(ADMIT, num_output_tokens=9): ["9 of them its own output from before it was preempted"],
    dataclasses.replace(ADMIT, how="fork", source="req-7/0", extend=1, num_blocks=1): [
        "req-7 joins on the blocks of req-7/0",
        "1 free block,",
    ],
    dataclasses.replace(ADMIT, how="fork", source="req-7/0", extend=0, num_blocks=0): [
        "it starts when that prompt is computed"
    ],
    dataclasses.replace(ADMIT, how="swap_in", extend=1, prefix=40): [
        "comes back from host memory with the KV of 40 tokens"
    ],
    WAITS: ["req-7 must wait:", "5 blocks of 7 free ones", "4 must stay free"],
    dataclasses.replace(WAITS, limit="max_num_seqs", needed=3, available=2, num_waiting=4): [
        "req-7 must wait, and 3 others behind it",
        "max_num_seqs = 2",
    ],
    dataclasses.replace(WAITS, limit="max_num_batched_tokens", needed=1200, available=1100, num_waiting=2): [
        "1 other behind it",
        "1,200 tokens",
        "1,100",
    ],
    LeftOut(rids=("a", "b"), limit="max_num_batched_tokens", available=64): [
        "No token for a, b: the budget of 64 is used up",
    ],
    LeftOut(rids=("a",), limit="blocks", available=0): ["too few blocks are free (0) before those that end"],
    PREEMPTED: ["2 new blocks", "1 is free", "3 of its 5 blocks come free", "70 tokens is dropped", "in front of all"],
    dataclasses.replace(PREEMPTED, mode="swap"): ["70 tokens moves to host memory"],
    StepLost(reset=("a", "b")): ["interrupted", "a, b will be computed again"],
    StepLost(reset=()): ["decided anew."],
}
MODULES: list[ModuleType] = [events, scheduler_events]
EVENT_CLASSES = [
    value
    for module in MODULES
    for value in vars(module).values()
    if inspect.isclass(value) and issubclass(value, Event) and value.__module__ == module.__name__
]


def name_of(event: Event) -> str:
    return event.kind


# --- sentences --------------------------------------------------------------------------------------------------------


def test_there_is_an_example_of_every_event() -> None:
    assert {type(event) for event in EXAMPLES} == set(EVENT_CLASSES)


@pytest.mark.parametrize("event", EXAMPLES, ids=name_of)
def test_an_event_explains_itself_in_sentences_with_its_numbers(event: Event) -> None:
    text = event.explain()
    assert re.fullmatch(r"[A-Z0-9ra].*[.]", text) and "  " not in text and "None" not in text
    for part in EXAMPLES[event]:
        assert part in text
    assert all(rid in text for rid in event.request_ids())


@pytest.mark.parametrize("event", EXAMPLES, ids=name_of)
def test_an_event_s_data_are_its_fields_as_plain_json(event: Event) -> None:
    assert json.loads(json.dumps(event.data())) == json.loads(json.dumps(dataclasses.asdict(event)))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_field_says_what_it_is(module: ModuleType) -> None:
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        assert ast.get_docstring(node), node.name
        for statement, behind in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
                is_docstring = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
                assert is_docstring, f"{node.name}.{ast.unparse(statement.target)} has no docstring"


def test_events_name_their_requests() -> None:
    forked = BlocksForked(owner="a/1", parent="a/0", block_ids=(3, 4), num_tokens=30)
    assert forked.request_ids() == ("a/0", "a/1")
    assert StepLost(reset=("a", "b")).request_ids() == ("a", "b")
    assert PREEMPTED.request_ids() == ADMIT.request_ids() == ("req-7",)


def test_usage_draws_curves() -> None:
    assert USAGE.counters() == {
        "KV blocks used": 10,
        "KV blocks free": 1000,
        "KV blocks shared": 3,
        "KV fragmentation %": 5.0,
    }


# --- the truth --------------------------------------------------------------------------------------------------------


def traced(make_engine: MakeEngine, **settings: Any) -> tuple[LLMEngine, Recorder]:
    """An engine and all that it says after it was built."""
    engine = make_engine(**settings)
    return engine, Recorder(engine.tracer)


def fields(found: list[Any], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(event, name) for name in names) for event in found]


def sized(make_engine: MakeEngine, **settings: Any) -> tuple[Any, LLMEngine]:
    """What an engine says of its memory while it is built."""

    class Reader:
        found: Any = None

        def read(self, record: Any) -> None:
            if record.event.kind == "kv_sized":
                self.found = record.event

        def close(self) -> None: ...

    reader = Reader()
    engine = make_engine(trace_config=TraceConfig(readers=(reader,)), **settings)
    return reader.found, engine


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
        assert event.num_bytes == (event.num_blocks + 1) * event.block_bytes == kv.num_bytes
        assert event.num_host_bytes == event.num_host_blocks * event.block_bytes == kv.num_host_bytes
        assert (event.num_host_blocks > 0) == (engine.config.scheduler.preemption_mode == "swap")
        assert engine.stats().num_blocks == event.num_blocks


def test_the_trace_alone_tells_who_holds_which_block(make_engine: MakeEngine, mode: str) -> None:
    """Block tables kept from events are the real ones, after every step, through forks, copies, swaps and ends."""
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


def test_a_preemption_says_who_why_and_how(make_engine: MakeEngine, mode: str) -> None:
    engine, recorder = traced(make_engine, **setting(2, blocks=5, block_size=2, mode=mode))
    engine.add_request(ids(4), greedy(6), request_id="old")
    engine.step()
    engine.add_request(ids(2), greedy(6), request_id="new")
    outputs = run(engine)
    (event,) = recorder.events("preempted")
    wanted = ("rid", "mode", "num_blocks", "num_freed", "needed", "available", "num_tokens", "num_output_tokens")
    assert fields([event], *wanted) == [("new", mode, 2, 2, 1, 0, 3, 2)]
    step = next(record.step for record in recorder.records if record.event is event)
    of_step = [record.event for record in recorder.records if record.step == step]
    assert "admit" not in [one.kind for one in of_step], "no admission in a step that preempted"
    back = [admit for admit in recorder.events("admit") if admit.num_output_tokens]
    how = "swap_in" if mode == "swap" else "prefill"
    assert fields(back, "rid", "how", "num_output_tokens") == [("new", how, 2)]
    assert (back[0].prefix, back[0].extend) == ((3, 1) if mode == "swap" else (0, 4))
    assert all(output.finish_reason == "length" for output in outputs.values())


def test_admissions_count_down_budget_blocks_and_queue(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(3, 20, blocks=20))
    for rid, length in (("a", 9), ("b", 3), ("c", 5), ("d", 2)):
        engine.add_request(ids(length), greedy(2), request_id=rid)
    engine.step()
    wanted = ("rid", "how", "extend", "num_blocks", "num_free", "num_running", "budget_left", "num_waiting")
    assert fields(recorder.events("admit"), *wanted) == [
        ("a", "prefill", 9, 3, 17, 1, 11, 3),
        ("b", "prefill", 3, 1, 16, 2, 8, 2),
        ("c", "prefill", 5, 2, 14, 3, 3, 1),
    ]
    run(engine)


def test_who_must_wait_is_told_which_limit_stands_in_the_way(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(2, 10, blocks=6))
    for rid, length in (("a", 6), ("b", 7), ("c", 1)):
        engine.add_request(ids(length), greedy(2 + (rid == "b")), request_id=rid)
    for _ in range(3):
        engine.step()
    wanted = ("rid", "limit", "needed", "available", "kept_free", "num_waiting")
    assert fields(recorder.events("not_admitted"), *wanted) == [
        ("b", "max_num_batched_tokens", 7, 4, 0, 2),  # a's prompt leaves 4; c would fit, but nobody overtakes
        ("c", "max_num_seqs", 3, 2, 0, 1),
    ]
    run(engine)
    engine, recorder = traced(make_engine, **setting(4, blocks=6))
    for rid in ("a", "b", "c"):
        engine.add_request(ids(7), greedy(2), request_id=rid)
    engine.step()
    assert fields(recorder.events("not_admitted"), *wanted) == [("c", "blocks", 2, 2, 3, 1)]
    run(engine)


def test_usage_says_how_much_is_reserved_for_nothing(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(4, blocks=20))
    engine.add_request(ids(7), greedy(3), request_id="a")
    engine.add_request(ids(2), greedy(1), request_id="b")
    engine.add_request(ids(5), greedy(3, n=2), request_id="c")
    run(engine)
    wanted = ("num_used", "num_free", "num_shared", "tokens_held")
    assert fields(recorder.events("kv_usage"), *wanted) == [
        (4, 16, 1, 7 + 5),  # b has left; c/1 holds c/0's first block, too
        (5, 15, 1, 8 + 6 + 1),
        (2, 18, 0, 6),  # c/1 is left, with all that was c/0's prompt
        (0, 20, 0, 0),
    ]
    first = recorder.events("kv_usage")[0]
    assert first.utilisation == pytest.approx(12 / 16) and first.fragmentation == pytest.approx(4 / 16)


def test_a_family_is_introduced_and_its_children_tell_their_own_story(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(4))
    engine.generate(ids(6), greedy(3, n=3, temperature=1.0, seed=40), request_id="p")
    (event,) = recorder.events("parallel_sampling")
    assert (event.rid, event.children, event.seeds) == ("p", ("p/0", "p/1", "p/2"), (40, 41, 42))
    assert [e.rid for e in recorder.events("finish")] == ["p/0", "p/1", "p/2"]
    assert [(e.rid, e.how, e.source) for e in recorder.events("admit")] == [
        ("p/0", "prefill", None),
        ("p/1", "fork", "p/0"),
        ("p/2", "fork", "p/0"),
    ]
    drawn = {(e.rid, e.position): e.uniform for e in recorder.events("sampled")}
    assert len(set(drawn.values())) == 9


def test_a_step_tells_its_story_in_order(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine, **setting(2))
    for rid in ("a", "b"):
        engine.add_request(ids(2), greedy(1), request_id=rid)
    engine.step()
    assert recorder.kinds() == [
        *["request_added"] * 2,
        *["blocks_allocated", "admit"] * 2,
        "batch",
        *["sampled"] * 2,
        *["result"] * 2,
        *["blocks_freed", "finish"] * 2,
        "kv_usage",
        "step_done",
    ]
    done = recorder.records[-1].event
    assert (done.num_tokens, done.num_running, done.num_waiting, done.kv_tokens) == (4, 0, 0, 0)


def test_a_step_that_failed_says_so_and_shows_no_usage(make_engine: MakeEngine) -> None:
    engine, recorder = traced(make_engine)
    engine.engine_core.executor.worker.model_runner.forward = None
    engine.add_request(ids(2), greedy(1), request_id="a")
    engine.step()
    (finish,) = recorder.events("finish")
    assert finish.reason == "error" and "TypeError" in finish.why
    assert recorder.events("kv_usage") == recorder.events("sampled") == []


def test_a_lost_step_says_who_starts_over(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder = traced(make_engine, **setting(4))
    for rid in ("a", "b"):
        engine.add_request(ids(3), greedy(5), request_id=rid)
    engine.step()
    engine.add_request(ids(2), greedy(5), request_id="new")
    runner = engine.engine_core.executor.worker.model_runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "forward", lambda model_input: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    run(engine)
    assert fields(recorder.events("step_lost"), "reset") == [(("new",),)], "who decodes goes on where it was"


# --- readers, and nobody who reads ------------------------------------------------------------------------------------


def test_without_a_reader_no_event_is_built(
    make_engine: MakeEngine, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"{type(self).__name__} was built")

    engine = make_engine(**setting(5, blocks=12, block_size=2, mode=mode))
    for module in (events, scheduler_events):
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, Event) and value is not Event:
                monkeypatch.setattr(value, "__init__", built)
    monkeypatch.setattr(engine_core.EngineCore, "_trace_usage", built)
    for n in range(3):
        engine.add_request(ids(4 + n), greedy(9, n=1 + n), request_id=str(n))
    run(engine)
    assert engine.stats().num_preemptions > 0


def test_the_consoles_show_blocks(make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    for verbose in (True, False):
        engine = make_engine(
            trace_config=TraceConfig(readers=(ConsoleReader(verbose=verbose),)), **setting(4, blocks=6, block_size=2)
        )
        for rid in ("a", "b"):
            engine.add_request(ids(3), greedy(6, n=2), request_id=rid)
        for _ in unfinished(engine):
            engine.step()
        said = re.sub(r"\s+", " ", capsys.readouterr().out)
        assert "KV memory: num_blocks=6 of 2 tokens was asked for" in said
        if verbose:
            assert "a asks for 2 continuations: a/0, a/1" in said
            assert "a/1 joins on the blocks of a/0; it starts when that prompt is computed" in said
            assert "is preempted: the next tokens need" in said
            assert "gives blocks" in said
        else:
            assert "preempted: " in said
            assert len(said.split("step ")) - 1 == engine.stats().num_steps


def test_the_jsonl_trace_holds_every_field_of_every_event(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    engine = make_engine(
        trace_config=TraceConfig(readers=(JsonlReader(path),)), **setting(5, blocks=12, block_size=2, mode="swap")
    )
    recorder = Recorder(engine.tracer)
    for n in range(3):
        engine.add_request(ids(4 + n), greedy(9, n=1 + n), request_id=str(n))
    run(engine)
    engine.close()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_kind = {line["event"]: line for line in lines}
    assert by_kind.keys() >= {
        *("kv_sized", "blocks_allocated", "blocks_freed", "blocks_forked", "block_copied", "blocks_swapped"),
        *("kv_usage", "parallel_sampling", "admit", "not_admitted", "preempted", "batch", "step_done"),
    }
    for record in recorder.records:
        assert {field.name for field in dataclasses.fields(record.event)} <= by_kind[record.event.kind].keys()


def test_the_chrome_trace_has_a_lane_for_each_child_and_curves_of_blocks(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    engine = make_engine(trace_config=TraceConfig(readers=(ChromeTraceReader(path),)), **setting(3))
    engine.add_request(ids(2), greedy(3), request_id="a")
    engine.add_request(ids(4), greedy(2, n=2), request_id="p")
    run(engine)
    engine.close()
    entries = json.loads(path.read_text())["traceEvents"]
    lanes = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    bars = [(lanes[e["tid"]], e["args"]["step"], e["name"]) for e in entries if e["ph"] == "X" and e["tid"] != 0]
    assert sorted(bars) == [
        ("a", 1, "prefill"),
        ("a", 2, "decode"),
        ("a", 3, "decode"),
        ("p/0", 1, "prefill"),
        ("p/0", 2, "decode"),
        ("p/1", 2, "decode"),
        ("p/1", 3, "decode"),
    ]
    curves = {e["name"] for e in entries if e["ph"] == "C"}
    assert {"running", "KV blocks used", "KV blocks free", "KV blocks shared", "KV fragmentation %"} <= curves
