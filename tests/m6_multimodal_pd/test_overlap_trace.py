"""The trace of overlapped steps: every reader and view shows of each step what it shows of the normal loop's.

Events of step N + 1 come before the last ones of step N. The launches and arrivals are in the trace of overlapped steps
alone; so are the bars of the device, which stand beside the phases of the host.
"""

import io
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from m1_single_request.output_events import Finish
from m1_single_request.trace_file import read_trace
from m1_single_request.trace_readers import ConsoleReader, Records
from m1_single_request.tracer import TraceReader, TraceRecord
from m2_continuous_batching.views.timeline import Timeline
from m3_paged_attention.views.block_map import BlockMap
from m4_radix_cache.views.radix_tree import RadixTreeView
from m5_chunked_prefill_spec.views.token_origins import TokenOrigins
from m6_multimodal_pd import ChromeTraceReader, JsonlReader, SamplingParams
from m6_multimodal_pd.overlap.events import NormalOrder, StepArrived, StepLaunched
from m6_multimodal_pd.views.positions import PositionsView
from tests.m6_multimodal_pd.engines import MakeEngine, check_drained, greedy, setting
from tests.m6_multimodal_pd.seeing import asking
from tests.support.traces import chrome_bars

OVERLAP_ALONE = (NormalOrder, StepArrived, StepLaunched)


class Run:
    """A run as all readers and views show it."""

    def __init__(self, directory: Path) -> None:
        self.chrome = directory / "chrome.json"
        self.consoles = [Console(file=io.StringIO(), width=1000, highlight=False) for _ in range(2)]
        summary, verbose = (ConsoleReader(verbose=bool(i), console=each) for i, each in enumerate(self.consoles))
        self.records, self.timeline, self.block_map = Records(), Timeline(), BlockMap()
        self.tree, self.origins, self.positions = RadixTreeView(), TokenOrigins(), PositionsView()
        self.views = (self.timeline, self.block_map, self.tree, self.origins, self.positions)
        self.readers: tuple[TraceReader, ...] = (
            self.records, ChromeTraceReader(self.chrome), summary, verbose, *self.views,
        )  # fmt: skip

    def text(self, *, verbose: bool) -> list[str]:
        """The lines of a console."""
        file: Any = self.consoles[verbose].file
        return [line.rstrip() for line in file.getvalue().splitlines() if line.strip()]

    def lines(self) -> list[list[str]]:
        """The parts of each step's summary line, without times, KV that is held, launches and arrivals."""
        parts = [line.split("  ") for line in self.text(verbose=False) if line.startswith("step ")]
        return [[part for part in line if not part.startswith(("KV ", "device "))] for line in parts]

    def bars(self) -> list[tuple[str, int, str]]:
        """The bars of the requests."""
        return [bar for bar in chrome_bars(self.chrome) if bar[0] != "device"]

    def decisions(self) -> list[tuple[int, list[Any]]]:
        """The ends in each frame of the block map."""
        return [(frame.step, frame.of(Finish)) for frame in self.block_map.frames]


def run(make_engine: MakeEngine, directory: Path, *, overlap: bool) -> Run:
    """Requests with a prompt in pieces, a picture and several answers, that arrive at different steps."""
    directory.mkdir()
    story = Run(directory)
    limits = setting(8, max_num_batched_tokens=32, policy="fcfs", enable_overlap=overlap)
    engine = make_engine(**limits)
    for reader in (*story.readers, JsonlReader(directory / "t.jsonl")):
        engine.tracer.attach(reader)
    asked = {
        0: [("a", list(range(300, 309)), greedy(4)), ("b", list(range(310, 360)), greedy(7))],
        2: [("sees", engine.chat_prompt(asking("a", 1)), greedy(5))],
        4: [
            ("n", [400, 401, 402], SamplingParams(max_tokens=3, n=2, temperature=1.0, seed=1)),
            ("c", [7, 8], greedy(1)),
        ],
    }
    call = 0
    while engine.has_unfinished_requests() or call <= max(asked):
        for rid, prompt, params in asked.get(call, ()):
            engine.add_request(prompt, replace(params, ignore_eos=True), request_id=rid)
        engine.step()
        call += 1
    check_drained(engine)
    engine.close()
    return story


Runs = tuple[Run, Run]


@pytest.fixture
def runs(make_engine: MakeEngine, book: None, tmp_path: Path) -> Runs:
    """The same requests in the normal order, and in overlapped steps."""
    normal = run(make_engine, tmp_path / "normal", overlap=False)
    overlapped = run(make_engine, tmp_path / "overlapped", overlap=True)
    return normal, overlapped


def steps_of(records: Iterable[TraceRecord]) -> list[int]:
    """The steps as the trace names them, each stretch once."""
    return [step for step, _ in groupby(record.step for record in records)]


# --- content ----------------------------------------------------------------------------------------------------------


def test_steps_go_back_by_one_and_each_has_its_events(runs: Runs) -> None:
    normal, overlapped = runs
    steps = steps_of(overlapped.records)
    assert {before - after for before, after in pairwise(steps) if after < before} == {1}
    assert steps_of(normal.records) == sorted(set(steps)), "the normal loop's never do"
    kinds: list[dict[int, dict[str, int]]] = []
    for each in runs:
        kinds.append(defaultdict(lambda: defaultdict(int)))
        for record in each.records:
            if record.step and not isinstance(record.event, OVERLAP_ALONE):
                kinds[-1][record.step][record.event.kind] += 1
    for step, found in kinds[0].items():
        for kind in ("batch", "sampled", "result", "finish", "encoder_run", "step_done"):
            assert kinds[1][step][kind] == found[kind], (step, kind)
    launched, arrived = ([s for s, _ in overlapped.records.of(kind)] for kind in (StepLaunched, StepArrived))
    assert launched == arrived == list(range(1, len(launched) + 1)) and not overlapped.records.of(NormalOrder)


def test_the_verbose_console_has_a_heading_wherever_the_step_changes(runs: Runs) -> None:
    for each in runs:
        headings = [line for line in each.text(verbose=True) if line.startswith("step ")]
        assert headings == [f"step {step}" for step in steps_of(each.records) if step]
        sentences = [record.event.explain() for record in each.records]
        assert [line.strip() for line in each.text(verbose=True) if line not in headings] == sentences


def test_the_views_show_the_same(runs: Runs) -> None:
    normal, overlapped = runs
    assert (overlapped.timeline.steps, overlapped.timeline.lanes) == (normal.timeline.steps, normal.timeline.lanes)
    assert overlapped.origins.tokens == normal.origins.tokens != {}
    assert overlapped.positions.assigned == normal.positions.assigned != {}
    assert overlapped.decisions() == normal.decisions() and any(ends for _, ends in normal.decisions())
    assert overlapped.lines() == normal.lines() and len(normal.lines()) > 6


def test_a_file_shows_what_was_shown_live(make_engine: MakeEngine, book: None, tmp_path: Path) -> None:
    live = run(make_engine, tmp_path / "live", overlap=True)
    stored = Run(tmp_path)
    for record in read_trace(tmp_path / "live" / "t.jsonl", "m6_multimodal_pd"):
        for reader in stored.readers:
            reader.read(record)
    for reader in stored.readers:
        reader.close()
    written, shown = ([(r.step, r.time, r.event.kind, r.event.data()) for r in each.records] for each in (stored, live))
    assert written == shown  # not their classes: a batch of a decode engine is of another one
    for verbose in (False, True):
        assert stored.text(verbose=verbose) == live.text(verbose=verbose)
    for ours, theirs in zip(stored.views, live.views, strict=True):
        assert {**vars(ours), "nodes": None} == {**vars(theirs), "nodes": None}
    assert json.loads(stored.chrome.read_text()) == json.loads(live.chrome.read_text())


# --- lanes ------------------------------------------------------------------------------------------------------------

Bar = tuple[float, float, str, int]
"""Begin and end in microseconds, name, step."""


def lanes_of(path: Path) -> dict[str, list[Bar]]:
    """The bars of each lane of a Chrome trace in the order of time."""
    entries = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    lanes: dict[str, list[Bar]] = defaultdict(list)
    for e in entries:
        if e["ph"] == "X":
            lanes[names[e["tid"]]].append((e["ts"], e["ts"] + e["dur"], e["name"], e["args"]["step"]))
    return {lane: sorted(bars) for lane, bars in lanes.items()}


def test_the_requests_have_the_same_bars_and_the_host_the_same_phases(runs: Runs) -> None:
    normal, overlapped = runs
    assert overlapped.bars() == normal.bars() != []
    phases = [{(name, step) for *_, name, step in lanes_of(each.chrome)["engine"]} for each in runs]
    assert phases[0] == phases[1]
    assert {name for name, step in phases[0]} == {"schedule", "execute", "sample", "update"}
    assert "device" not in lanes_of(normal.chrome)


def test_no_lane_has_two_bars_at_a_time(runs: Runs) -> None:
    for each in runs:
        for lane, bars in lanes_of(each.chrome).items():
            for (_, end, *_), (begin, *_) in pairwise(bars):
                assert end <= begin + 0.01, lane


def test_the_device_computes_a_step_beside_the_update_of_the_step_before(
    make_engine: MakeEngine, book: None, tmp_path: Path
) -> None:
    story = run(make_engine, tmp_path / "overlapped", overlap=True)
    marks = {kind: {record.step: record for record in story.records if isinstance(record.event, kind)}
             for kind in (StepLaunched, StepArrived)}  # fmt: skip
    assert any(record.event.is_async for record in marks[StepLaunched].values())
    lanes = lanes_of(story.chrome)
    device = {step: (begin, end) for begin, end, _, step in lanes["device"]}
    assert list(device) == list(marks[StepLaunched])
    updates = {step: (begin, end) for begin, end, name, step in lanes["engine"] if name == "update"}
    beside = 0
    for step, (begin, end) in device.items():
        launched, arrived = (marks[kind][step] for kind in (StepLaunched, StepArrived))
        assert end - begin == pytest.approx(arrived.event.device_ms * 1e3, abs=0.01)
        assert end <= arrived.time * 1e6 + 0.01
        if launched.event.is_async:
            end_before = device[step - 1][1] if step - 1 in device else 0.0
            assert end_before - 0.01 <= begin <= max(launched.time * 1e6, end_before) + 0.01
            if launched.event.behind is not None:
                beside += 1
                assert launched.event.behind == step - 1
                assert launched.time * 1e6 <= updates[step - 1][0] + 0.01, "the host updates behind the launch"
        else:
            assert end == pytest.approx(launched.time * 1e6, abs=0.01)
    assert beside > 5
