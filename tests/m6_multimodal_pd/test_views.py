"""The views of m6: drawn live or from a trace file, by events alone."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from m1_single_request.trace_file import read_trace
from m1_single_request.tracer import TraceRecord
from m6_multimodal_pd import DisaggregationConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig, TraceConfig
from m6_multimodal_pd.views import two_engines
from m6_multimodal_pd.views.positions import PositionsView, positions_of
from m6_multimodal_pd.views.two_engines import TwoEnginesView, replay
from tests.m6_multimodal_pd.engines import MakeEngine, setting
from tests.m6_multimodal_pd.event_examples import JOINED, LOST, REPORTED, ROUTED
from tests.m6_multimodal_pd.seeing import SHOWN, asking
from tests.support.views import text_of

# --- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHOWN)
def test_positions_are_those_that_the_model_gets(make_engine: MakeEngine, name: str) -> None:
    view = PositionsView()
    engine = make_engine(**setting(), trace_config=TraceConfig(readers=(view,)))
    prompt: Any = engine.chat_prompt(asking(3, name, 2))
    output = engine.generate(prompt, SamplingParams(max_tokens=1, n=2, temperature=1.0, seed=0))
    positions, is_picture = positions_of(view.assigned[output.request_id])
    inputs = prompt.multimodal_inputs
    assert positions.tolist() == inputs.mrope_positions.tolist()
    places = [place for start, end in inputs.mm_items[0].offsets for place in range(start, end)]
    assert np.flatnonzero(is_picture).tolist() == places


def test_a_column_for_each_token_in_lines_of_the_width(make_engine: MakeEngine) -> None:
    view = PositionsView()
    engine = make_engine(**setting(), trace_config=TraceConfig(readers=(view,)))
    prompt: Any = engine.chat_prompt(asking(9, "a", 9))
    engine.generate(prompt, SamplingParams(max_tokens=1), request_id="one")
    start, number = prompt.multimodal_inputs.mm_items[0].start, len(prompt)
    whole, narrow = (view.draw("one", width).plain.splitlines() for width in (200, 40))
    assert len(whole) == 5 and max(map(len, narrow)) <= 40 and len(narrow) > 5
    marks, place, time, height, across = (line.split() for line in whole)
    assert marks == [*"....", *"#########", *"...."] and place[1:] == [str(start - 4 + i) for i in range(17)]
    first, after = start, start + 3
    assert time[1:] == [str(i) for i in [*range(start - 4, start), *[first] * 9, *range(after, after + 4)]]
    assert height[5:14] == [str(first + i // 3) for i in range(9)]
    assert across[5:14] == [str(first + i % 3) for i in range(9)]
    again = [piece for line in range(1, len(narrow), 5) for piece in narrow[line].split()[1:]]
    assert again == place[1:] and number > start + 12


def test_the_positions_of_a_request_id_are_those_of_its_last_prompt(make_engine: MakeEngine) -> None:
    view = PositionsView()
    engine = make_engine(**setting(), trace_config=TraceConfig(readers=(view,)))
    for num_tokens in (9, 2):
        prompt = engine.chat_prompt(asking(num_tokens, "a", 2))
        engine.generate(prompt, SamplingParams(max_tokens=1), request_id="one")
        assert view.assigned["one"].num_tokens == len(prompt)


# --- two engines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlapped"])
def test_views_of_a_file_are_drawn_as_live_ones(seeing_directory: Path, tmp_path: Path, overlap: bool) -> None:
    path, live = tmp_path / "trace.jsonl", (PositionsView(), TwoEnginesView())
    with LLMEngine(
        model_config=ModelConfig(model=seeing_directory, device="cpu", dtype="float32"),
        scheduler_config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, enable_overlap=overlap),
        disaggregation_config=DisaggregationConfig(transport="in_process"),
        trace_config=TraceConfig(jsonl=path, readers=live),
    ) as engine:
        for rid, content in {"one": asking(2, "a", 20), "two": asking("v", 1)}.items():
            engine.add_request(engine.chat_prompt(content), SamplingParams(max_tokens=4), request_id=rid)
        while engine.has_unfinished_requests():
            engine.step()
    assert {engine for engine, what in live[1].latest if what == "step_arrived"} == (
        {"prefill-0", "decode-0"} if overlap else set()
    )
    stored = (PositionsView(), TwoEnginesView())
    for record in read_trace(path, "m6_multimodal_pd"):
        for view in stored:
            view.read(record)
    assert text_of(stored[0].draw("one")) == text_of(live[0].draw("one"))
    drawn = text_of(stored[1].draw())
    assert drawn == text_of(live[1].draw())
    assert re.search(r"^prefill-0 +[1-9]\d* +0 +0 +[\d,]+ of [\d,]+ +\w", drawn, re.M)
    chunks, pages = re.findall(r"^one +success +success +(\d+)/\1 +(\d+)/\2 +[\d.]+ KiB", drawn, re.M)[0]
    assert int(chunks) > 1 and int(pages) > 1


def record(event: Any, at: float = 0.0) -> TraceRecord:
    return TraceRecord(0, at, event)


def joined(name: str) -> TraceRecord:
    return record(replace(JOINED, name=name, role=name[:-2]))


def routed(rid: str, room: int) -> TraceRecord:
    return record(replace(ROUTED, rid=rid, room=room))


def report(engine: str, what: str, text: str = "", **facts: Any) -> TraceRecord:
    return record(replace(REPORTED, engine=engine, what=what, text=text, facts=(*facts.items(),)))


STORY = [
    routed("a", 7),
    report("decode-0", "kv_poll_changed", room=7, side="decode", new="WAITING_FOR_INPUT"),
    report("decode-0", "room_taken", room=7, num_pages=5),
    report("prefill-0", "kv_poll_changed", room=7, side="prefill", new="TRANSFERRING"),
    report("prefill-0", "chunk_sent", room=7, number=0, num_pages=2),
    report("prefill-0", "chunk_sent", room=7, number=1, num_pages=3),
    report("decode-0", "chunk_received", room=7, number=0, num_bytes=2048),
]


def drawn_of(*records: TraceRecord, width: int = 100) -> str:
    view = TwoEnginesView()
    for each in records:
        view.read(each)
    return text_of(view.draw(), width)


def test_the_next_attempt_of_a_request_takes_the_place_of_the_first() -> None:
    late = report("prefill-0", "chunk_sent", room=7, number=2, num_pages=1)
    lines = drawn_of(*STORY, routed("a", 9), late).splitlines()
    assert [line.split()[1:4] for line in lines if line.startswith("a ")] == [["bootstrapping", "bootstrapping", "0/0"]]


def test_a_chunk_whose_beginning_is_not_in_the_trace_is_no_error() -> None:
    assert "1/0" in drawn_of(*STORY[:4], STORY[6])


def test_an_engine_has_its_state_and_its_last_step_in_80_columns() -> None:
    done = report("prefill-0", "step_done", num_running=3, num_waiting=4, kv_tokens=7000)
    batch = report("prefill-0", "batch", text="Batch of 2 requests: " + "x" * 200)
    lines = drawn_of(joined("decode-0"), joined("prefill-0"), done, batch, width=80).splitlines()
    assert re.match(r"prefill-0 +12 +3 +4 +7,000 of 131,072 +Batch of 2 requests: x+…", lines[1])
    assert re.match(r"decode-0 +0 +0 +0 +0 of 131,072 *$", lines[2]) and max(map(len, lines)) <= 80
    assert "decode-1" not in drawn_of(joined("decode-1"), record(LOST))


def test_the_view_of_a_long_run_keeps_the_last_transfers_alone() -> None:
    view = TwoEnginesView()
    for number in range(1000):
        view.read(routed(f"r{number}", number))
        view.read(report("decode-0", "room_taken", room=number, num_pages=5))
        view.read(report("decode-0", "step_done", kv_tokens=number))
    assert list(view.rooms) == [f"r{number}" for number in range(960, 1000)]
    assert sum(map(len, view.transfers.values())) == 40 == len(text_of(view.draw()).splitlines()) - 3


def test_elsewhere_a_replay_draws_the_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: seconds and pytest.fail("no terminal needs the time"))
    console = Console(file=io.StringIO(), width=100)
    replay(STORY, console)
    file: Any = console.file
    assert file.getvalue().count("waiting for input") == 1


def test_a_replay_takes_its_time_and_draws_all_records(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    console = Console(file=io.StringIO(), width=100, force_terminal=True, legacy_windows=False)
    start = TraceRecord(0, -9.0, joined("decode-0").event)  # long before the first request
    replay([start, *(TraceRecord(0, 0.1 * number, each.event) for number, each in enumerate(STORY))], console)
    file: Any = console.file
    assert sum(slept) == pytest.approx(two_engines.REPLAY_S) and "waiting for input" in file.getvalue()
