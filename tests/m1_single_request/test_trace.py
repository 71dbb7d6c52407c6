"""The trace: a tracer that costs nothing unread, readers that cannot hurt, events that explain themselves."""

import dataclasses
import io
import json
import statistics
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from m1_single_request import (
    DEFAULT_MODEL,
    ChromeTraceReader,
    ConfigError,
    ConsoleReader,
    JsonlReader,
    LLMEngine,
    ModelConfig,
    SamplingParams,
    TraceConfig,
    Tracer,
    TraceRecord,
)
from m1_single_request.events import Event, Free, size, some
from m1_single_request.output_events import Finish, Result
from m1_single_request.trace_event import Phase
from tests.m1_single_request.engines import MakeEngine, Recorder, drain, greedy, scripted, unfinished
from tests.m1_single_request.event_examples import DECODE, EXAMPLES, GREEDY, PREFILL, STARTED, STEP, finish, result
from tests.support.traces import chrome_entries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed(Event):
    """An event as a later milestone brings it: its requests share a step, and each does something else in it."""

    rids: tuple[str, ...]
    """Request ids."""
    modes: tuple[str, ...]
    """What each of them does."""
    padding: int
    """Tokens without a use."""

    def explain(self) -> str:
        return f"{some(len(self.rids), 'request')} share the step, {some(self.padding, 'token')} of it padding."

    def brief(self) -> str:
        return f"{len(self.rids)} together"

    def lanes(self) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.rids, self.modes, strict=True))

    def counters(self) -> dict[str, float]:
        return {"padded tokens": self.padding}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quiet(Event):
    """An event with no more than it must have."""

    pages: int
    """Some number."""

    def explain(self) -> str:
        return f"{self.pages} pages are gone."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival(Event):
    """An event that comes between steps."""

    rid: str
    """Request id."""

    def explain(self) -> str:
        return f"{self.rid} is here."

    def brief(self) -> str:
        return f"{self.rid} comes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun(Quiet):
    """An event with which a bar of its step begins."""

    pages: int = 0
    begins_bar = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lasted(Quiet):
    """An event that has the length of a bar."""

    pages: int = 0
    lane: str
    """Its lane."""
    ms: float
    """Its length."""

    def bar(self) -> tuple[str, float]:
        return self.lane, self.ms


MIXED = Mixed(rids=("a", "b", "c"), modes=("prefill", "decode", "decode"), padding=5)


def record(event: Event, step: int = 3, at: float = 12.5) -> TraceRecord:
    return TraceRecord(step, at, event)


def step_from(*begins: float) -> Event:
    """The end of a step with a phase of 5 ms at each of these times."""
    phases = zip(("schedule", "execute", "update"), begins, strict=False)
    return dataclasses.replace(STEP, laps=tuple(Phase(name, begin, begin + 0.005) for name, begin in phases))


class Keeper(Recorder):
    """A recorder that counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


class Broken(Keeper):
    """A reader that fails at its `nth` record, and perhaps when it is closed."""

    def __init__(self, nth: int = 1, close_fails: bool = False) -> None:
        super().__init__()
        self.nth, self.close_fails = nth, close_fails

    def read(self, record: TraceRecord) -> None:
        super().read(record)
        if len(self.records) == self.nth:
            raise OSError("disk full")

    def close(self) -> None:
        super().close()
        if self.close_fails:
            raise OSError("still full")


# --- the tracer -------------------------------------------------------------------------------------------------------


def has_reader(tracer: Tracer) -> bool:
    """Whether an event is built."""
    built: list[object] = []
    tracer.emit(lambda: built.append(1))
    return bool(built)


def test_an_event_is_built_exactly_while_there_is_a_reader() -> None:
    tracer, reader, other = Tracer(), Keeper(), Keeper()
    assert not has_reader(tracer)
    tracer.attach(reader)
    tracer.attach(other)
    tracer.detach(reader)
    assert has_reader(tracer)
    tracer.detach(other)
    assert not has_reader(tracer)


def test_an_unread_trace_costs_less_than_a_thousandth_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls of `emit` of a decode step of the shipped model, against the step; measured at a two-thousandth."""
    with LLMEngine(model_config=ModelConfig(device="cpu", dtype="float32")) as engine:
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=41, ignore_eos=True, stop="never", temperature=1.0))
        engine.step()
        emitted: list[tuple[Any, ...]] = []
        seconds: list[float] = []
        with monkeypatch.context() as patch:
            patch.setattr(Tracer, "emit", lambda *arguments, **keywords: emitted.append((arguments, keywords)))
            for _ in unfinished(engine):
                begin = time.perf_counter()
                engine.step()
                seconds.append(time.perf_counter() - begin)
        costs = []
        for _ in range(99):
            begin = time.perf_counter()
            for (tracer, *arguments), keywords in emitted:
                tracer.emit(*arguments, **keywords)
            costs.append((time.perf_counter() - begin) / len(seconds))
    assert len(emitted) >= 4 * len(seconds), "scheduled, alloc, sampled, step done"
    assert min(costs) < statistics.median(seconds) / 1000


def test_a_factory_gets_the_arguments_and_may_build_nothing() -> None:
    tracer, reader = Tracer(), Keeper()
    tracer.attach(reader)
    tracer.emit(Free, owner="a", tokens=3, bytes=96)
    tracer.emit(lambda first, *, second: STEP if first < second else None, 1, second=2)
    tracer.emit(lambda first, *, second: STEP if first < second else None, 2, second=1)
    assert [record.event for record in reader.records] == [Free(owner="a", tokens=3, bytes=96), STEP]


def test_an_event_that_cannot_be_built_is_a_warning_and_no_error() -> None:
    tracer, reader = Tracer(), Keeper()
    tracer.attach(reader)
    with pytest.warns(RuntimeWarning, match=r"could not be built: ZeroDivisionError"):
        tracer.emit(lambda: STEP if 1 // 0 else None)
    tracer.emit(lambda: STEP)
    assert [record.event for record in reader.records] == [STEP]


def test_every_reader_gets_everything_from_attach_to_detach_stamped_with_step_and_time() -> None:
    tracer, early, late = Tracer(), Keeper(), Keeper()
    tracer.attach(early)
    begin = time.perf_counter()
    tracer.emit(lambda: PREFILL)
    tracer.step = 5
    tracer.attach(late)
    tracer.emit(lambda: STEP)
    tracer.detach(early)
    tracer.emit(lambda: DECODE)
    assert [(r.step, r.event) for r in early.records] == [(0, PREFILL), (5, STEP)]
    assert [(r.step, r.event) for r in late.records] == [(5, STEP), (5, DECODE)]
    times = [r.time for r in (*early.records, late.records[-1])]
    assert begin <= times[0] <= times[1] <= times[2] <= time.perf_counter()
    assert early.records[1] is late.records[0], "one record for all"


def test_detaching_closes_a_reader_once_and_a_stranger_never() -> None:
    tracer, reader, stranger = Tracer(), Keeper(), Keeper()
    tracer.attach(reader)
    tracer.detach(reader)
    tracer.detach(reader)
    tracer.detach(stranger)
    assert (reader.closed, stranger.closed) == (1, 0)


def test_closing_the_tracer_closes_all_readers_and_leaves_it_usable() -> None:
    tracer, readers = Tracer(), [Keeper(), Keeper()]
    for reader in readers:
        tracer.attach(reader)
    tracer.close()
    tracer.emit(lambda: STEP)
    assert not has_reader(tracer) and [(reader.closed, reader.records) for reader in readers] == [(1, []), (1, [])]
    tracer.attach(readers[0])
    tracer.emit(lambda: STEP)
    assert len(readers[0].records) == 1


def test_a_reader_that_fails_is_detached_with_a_warning_and_the_others_go_on() -> None:
    tracer, first, broken, last = Tracer(), Keeper(), Broken(nth=2), Keeper()
    for reader in (first, broken, last):
        tracer.attach(reader)
    tracer.emit(lambda: PREFILL)
    with pytest.warns(RuntimeWarning, match=r"Broken.*detached.*disk full"):
        tracer.emit(lambda: DECODE)
    tracer.emit(lambda: STEP)
    assert len(broken.records) == 2
    assert [r.event for r in first.records] == [r.event for r in last.records] == [PREFILL, DECODE, STEP]


def test_a_reader_that_fails_to_close_does_not_keep_the_others_open() -> None:
    tracer, broken, other = Tracer(), Broken(close_fails=True), Keeper()
    tracer.attach(broken)
    tracer.attach(other)
    with pytest.warns(RuntimeWarning, match="still full"):
        tracer.close()
    assert (broken.closed, other.closed) == (1, 1) and not has_reader(tracer)


def test_a_reader_may_detach_itself_while_it_reads() -> None:
    class Once(Keeper):
        def read(self, record: TraceRecord) -> None:
            super().read(record)
            tracer.detach(self)

    tracer, once, other = Tracer(), Once(), Keeper()
    tracer.attach(once)
    tracer.attach(other)
    tracer.emit(lambda: PREFILL)
    tracer.emit(lambda: STEP)
    assert (len(once.records), once.closed, len(other.records)) == (1, 1, 2)


# --- events -----------------------------------------------------------------------------------------------------------


def test_capitals_in_a_row_are_one_word_of_an_events_kind() -> None:
    names = ("KVUsage", "StepDone", "LastKV", "Batch", "Top2Kept")
    kinds = [dataclasses.make_dataclass(name, [], bases=(Quiet,), frozen=True)(pages=1).kind for name in names]
    assert kinds == ["kv_usage", "step_done", "last_kv", "batch", "top2_kept"]


def test_an_event_is_about_the_requests_that_its_fields_name() -> None:
    assert MIXED.request_ids() == ("a", "b", "c")
    assert Arrival(rid="a").request_ids() == Free(owner="a", tokens=1, bytes=1).request_ids() == ("a",)
    assert STARTED.request_ids() == STEP.request_ids() == Quiet(pages=1).request_ids() == ()


def test_numbers_of_bytes_and_things_are_written_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536, 1024**2, 5 * 1024**3, 5000 * 1024**3)] == [
        "0 bytes", "1023 bytes", "1.0 KiB", "1.5 KiB", "1.0 MiB", "5.0 GiB", "5,000.0 GiB",
    ]  # fmt: skip
    assert [some(n, "token") for n in (0, 1, 2, 1234)] == ["0 tokens", "1 token", "2 tokens", "1,234 tokens"]


# --- JSONL ------------------------------------------------------------------------------------------------------------


def written(path: Path, *, stable: bool = False) -> list[dict[str, Any]]:
    """All examples, and an event of a later milestone, written and read back."""
    reader = JsonlReader(path, stable=stable)
    for number, event in enumerate([*EXAMPLES, MIXED]):
        reader.read(record(event, step=number, at=number / 2))
    reader.close()
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_stable_jsonl_leaves_out_times_and_volatile_fields(tmp_path: Path) -> None:
    lines = written(tmp_path / "t.jsonl", stable=True)
    for line, event in zip(lines, [*EXAMPLES, MIXED], strict=True):
        assert "time" not in line
        assert list(line) == ["step", "event", *event.data(stable=True)]
    assert not any(key.endswith("_ms") or key == "candidates" for line in lines for key in line)


def test_jsonl_is_in_the_file_at_once_and_keeps_any_text(tmp_path: Path) -> None:
    event = result("req-7", 1, '日本 🙂 "quoted"\n\u2028\0')
    path = tmp_path / "t.jsonl"
    reader = JsonlReader(path)
    reader.read(record(event))
    content = path.read_text(encoding="utf-8")
    reader.close()
    assert content.count("\n") == 1 and "日本 🙂" in content
    line = json.loads(content)
    assert (line["time"], line["new_text"]) == (12.5, event.new_text)


def test_the_new_texts_of_a_request_joined_are_its_text(make_engine: MakeEngine) -> None:
    text = "a café 🐈!"
    token_ids = make_engine().engine_core.input_processor.tokenizer.encode(text)
    engine, keeper = make_engine({"sampler": scripted(token_ids)}), Keeper()
    engine.tracer.attach(keeper)
    assert engine.generate("b", greedy(len(token_ids))).text == text
    pieces = [r.event.new_text for r in keeper.records if isinstance(r.event, Result)]
    assert len(pieces) == len(token_ids) and "".join(pieces) == text
    assert "" in pieces, "half a character is no text yet"


def test_a_reader_that_comes_late_gets_only_the_text_that_is_new(make_engine: MakeEngine) -> None:
    tokenizer = make_engine().engine_core.input_processor.tokenizer
    token_ids = tokenizer.encode("one two three")
    engine, keeper = make_engine({"sampler": scripted(token_ids)}), Keeper()
    engine.add_request("b", greedy(len(token_ids)))
    for _ in token_ids[1:]:
        engine.step()
    engine.tracer.attach(keeper)
    (output,) = drain(engine).values()
    assert output.text == "one two three"
    assert [r.event.new_text for r in keeper.records if isinstance(r.event, Result)] == [
        tokenizer.decode(token_ids[-1])
    ]


@pytest.mark.parametrize("reader", [JsonlReader, ChromeTraceReader])
def test_a_trace_file_that_cannot_be_written_is_a_clear_error(reader: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be written"):
        reader(tmp_path / "nowhere" / "trace.json")


# --- Chrome trace -----------------------------------------------------------------------------------------------------


def chrome(path: Path, records: list[TraceRecord]) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The entries of a written file, and the names of its lanes."""
    reader = ChromeTraceReader(path)
    for one in records:
        reader.read(one)
    reader.close()
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    lanes = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    assert all(entry["ph"] == "M" or entry["tid"] in lanes for entry in entries)
    return entries, lanes


def spans(entry: dict[str, Any], lane: str, lanes: dict[int, str]) -> bool:
    """Whether an entry is a bar of this lane."""
    return entry["ph"] == "X" and lanes[entry["tid"]] == lane


def test_a_chrome_trace_of_every_event_is_valid(tmp_path: Path) -> None:
    chrome(tmp_path / "t.json", [record(event) for event in EXAMPLES])
    entries = chrome_entries(tmp_path / "t.json")
    instants = {entry["name"] for entry in entries if entry["ph"] == "i"}
    assert instants == {event.kind for event in EXAMPLES} - {"step_done"}
    assert [entry["ph"] for entry in chrome(tmp_path / "empty.json", [])[0]] == ["M"]


def test_an_event_is_a_mark_in_the_lane_of_its_request_or_of_the_engine(tmp_path: Path) -> None:
    """The engine's, if it is about many or none. A request may have the engine's name."""
    events = [MIXED, Quiet(pages=2), PREFILL, finish("b"), Arrival(rid="engine"), Free(owner="b", tokens=1, bytes=1)]
    entries, lanes = chrome(tmp_path / "t.json", [record(event) for event in events])
    (own, *others) = sorted(lanes)
    assert lanes[own] == "engine" and sorted(lanes[tid] for tid in others) == ["b", "engine"]
    marks = [(entry["tid"] == own, lanes[entry["tid"]], entry["name"]) for entry in entries if entry["ph"] == "i"]
    assert marks == [
        (True, "engine", "mixed"),
        (True, "engine", "quiet"),
        (True, "engine", "batch"),
        (False, "b", "finish"),
        (False, "engine", "arrival"),
        (False, "b", "free"),
    ]


def test_a_step_is_a_span_of_its_request_and_four_phases_of_the_engine_end_to_end(tmp_path: Path) -> None:
    entries, lanes = chrome(tmp_path / "t.json", [record(PREFILL, at=10.0), record(STEP, at=10.01)])
    spans = [entry for entry in entries if entry["ph"] == "X"]
    (whole,) = [entry for entry in spans if lanes[entry["tid"]] == "req-7"]
    assert (whole["name"], whole["args"]["step"]) == ("prefill", 3)
    assert whole["dur"] == pytest.approx(7500) and whole["ts"] + whole["dur"] == pytest.approx(10.01e6)
    phases = [entry for entry in spans if lanes[entry["tid"]] == "engine"]
    assert [e["name"] for e in phases] == ["schedule", "execute", "sample", "update"]
    assert [e["dur"] for e in phases] == pytest.approx([250, 5500, 1000, 750])
    ends = [whole["ts"], *(e["ts"] + e["dur"] for e in phases)]
    assert [e["ts"] for e in phases] == pytest.approx(ends[:-1]) and ends[-1] == pytest.approx(10.01e6)


def test_steps_that_interleave_have_their_own_bars_where_they_were(tmp_path: Path) -> None:
    """Step 4 begins before step 3 ends: no lane has two bars at a time."""
    third = step_from(10.0, 10.02, 10.03)  # with pauses
    fourth = step_from(10.01, 10.04)
    both = Mixed(rids=("a", "b"), modes=("decode", "prefill"), padding=0)
    records = [record(MIXED, step=3), record(both, step=4), record(third, step=3), record(fourth, step=4)]
    entries, lanes = chrome(tmp_path / "t.json", records)
    bars = [(lanes[e["tid"]], e["name"], e["args"]["step"]) for e in entries if e["ph"] == "X"]
    assert [bar for bar in bars if bar[0] != "engine"] == [
        ("a", "prefill", 3), ("b", "decode", 3), ("c", "decode", 3), ("a", "decode", 4), ("b", "prefill", 4),
    ]  # fmt: skip
    on_engine = sorted((e["ts"], e["ts"] + e["dur"], e["args"]["step"]) for e in entries if spans(e, "engine", lanes))
    assert [step for _, _, step in on_engine] == [3, 4, 3, 3, 4]
    begins = [10.0e6, 10.01e6, 10.02e6, 10.03e6, 10.04e6]
    assert [begin for begin, _, _ in on_engine] == pytest.approx(begins)
    for lane in ("engine", "a", "b", "c"):
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in entries if spans(e, lane, lanes))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(times)), lane


def test_an_event_may_have_a_bar_on_a_lane_of_its_own(tmp_path: Path) -> None:
    """It begins with one event, or has ended there, and a later event of its step has its length."""
    records = [
        record(Begun(), step=3, at=10.0),
        record(Begun(), step=4, at=10.01),
        record(Lasted(lane="disk", ms=2.5), step=3, at=10.02),
        record(Lasted(lane="disk", ms=-1.5), step=4, at=10.03),
        record(Lasted(lane="disk", ms=1.5), step=5, at=10.04),  # its begin is not in the trace
        record(Begun(), step=6, at=10.05),
        record(Lasted(lane="disk", ms=4.0), step=6, at=10.052),  # so it began earlier
        record(Arrival(rid="disk"), step=5),
    ]
    entries, lanes = chrome(tmp_path / "t.json", records)
    bars = [e for e in entries if e["ph"] == "X"]
    assert [(lanes[e["tid"]], e["name"], e["args"]) for e in bars] == [
        ("disk", "step 3", {"step": 3}),
        ("disk", "step 4", {"step": 4}),
        ("disk", "step 6", {"step": 6}),
    ]
    assert [e["ts"] for e in bars] == pytest.approx([10.0e6, 10.01e6 - 1500, 10.048e6])
    assert [e["dur"] for e in bars] == pytest.approx([2500, 1500, 4000])
    assert sorted(lanes.values()) == ["disk", "disk", "engine"], "a request may have its name"


def test_a_bar_begins_when_the_one_before_it_on_its_lane_has_ended(tmp_path: Path) -> None:
    records = [
        record(Begun(), step=3, at=10.0),
        record(Begun(), step=4, at=10.001),
        record(Lasted(lane="disk", ms=5.0), step=3, at=10.006),
        record(Begun(), step=5, at=10.007),
        record(Lasted(lane="disk", ms=4.0), step=4, at=10.02),
        record(Lasted(lane="tape", ms=3.0), step=5, at=10.02),
    ]
    entries, lanes = chrome(tmp_path / "t.json", records)
    bars = [(lanes[e["tid"]], e["ts"] / 1e6, e["dur"]) for e in entries if e["ph"] == "X"]
    assert [(lane, pytest.approx(begin, abs=1e-8)) for lane, begin, _ in bars] == [
        ("disk", 10.0), ("disk", 10.005), ("tape", 10.007),
    ]  # fmt: skip
    assert [duration for _, _, duration in bars] == pytest.approx([5000, 4000, 3000])


def test_a_step_counts_tokens_kv_and_running_requests_and_an_event_what_it_brings(tmp_path: Path) -> None:
    entries, _ = chrome(tmp_path / "t.json", [record(PREFILL), record(MIXED), record(STEP)])
    counters = {entry["name"]: list(entry["args"].values()) for entry in entries if entry["ph"] == "C"}
    assert counters == {"padded tokens": [5], "batched tokens": [31], "KV tokens": [64], "running": [1]}


# --- console ----------------------------------------------------------------------------------------------------------


def printed(records: list[TraceRecord], *, verbose: bool) -> str:
    """What the console reader prints, without colours."""
    file = io.StringIO()
    reader = ConsoleReader(verbose=verbose, console=Console(file=file, width=400, highlight=False))
    for one in records:
        reader.read(one)
    reader.close()
    return file.getvalue()


def test_the_verbose_console_prints_every_event_with_its_numbers() -> None:
    for event in EXAMPLES:
        text = printed([record(event)], verbose=True)
        assert event.explain() in text and "step 3" in text


def test_the_verbose_console_names_each_step_once_and_indents_what_belongs_to_it() -> None:
    later = [record(event, step=4) for event in (DECODE, MIXED, Quiet(pages=2))]
    text = printed([record(STARTED, step=0), record(PREFILL), record(GREEDY), *later], verbose=True)
    assert [line.rstrip() for line in text.splitlines() if line.strip()] == [
        STARTED.explain(),
        "step 3",
        f"  {PREFILL.explain()}",
        f"    {GREEDY.explain()}",
        "step 4",
        f"  {DECODE.explain()}",
        "  3 requests share the step, 5 tokens of it padding.",
        "  2 pages are gone.",
    ]


@pytest.mark.parametrize("text", ["[bold]no markup[/bold]", "[/nothing]", ":smile: \\[x]", "\x1b[31mred"])
def test_the_console_prints_text_of_the_model_as_it_is(text: str) -> None:
    """Neither rich's markup nor a terminal's escape codes that happen to be in a text do anything."""
    event = result("req-7", 1, text)
    said = printed([record(event)], verbose=True)
    assert repr(text) in said and "\x1b" not in said


def test_the_summary_is_a_line_per_step_with_its_numbers() -> None:
    said = [PREFILL, GREEDY, result("req-7", 5, " cat"), finish("req-7"), STEP]
    text = printed([record(STARTED, step=0), *map(record, said)], verbose=False)
    started, line = text.splitlines()
    assert started.rstrip() == STARTED.explain()
    assert line == (
        "step    3  prefill 31 tokens  req-7 #5 ' cat'  req-7 ends: length  KV 64 tokens, 2 waiting, 7.5 ms"
    )


def test_the_summary_of_a_step_repeats_no_other_step() -> None:
    """Step 5 was interrupted: it has no line, and leaves nothing in the next."""
    abort = Finish(rid="req-9", reason="abort", matched=None, why="the caller gave it up", out_len=0)
    interrupted = record(PREFILL, step=5)
    events = [*map(record, (PREFILL, STEP)), record(abort, step=4), record(STEP, step=4), interrupted]
    text = printed([*events, record(DECODE, step=6), record(STEP, step=6)], verbose=False)
    first, second, third = text.splitlines()
    assert "prefill" in first and "prefill" not in second
    assert "req-9 ends: abort" in second and "step    4" in second
    assert third.startswith("step    6  decode") and "prefill" not in third


def test_steps_that_interleave_have_a_line_each_with_their_own_numbers() -> None:
    """Step 4 begins before step 3 ends, and what comes after that end, before step 5 begins, is in the line of 5."""
    records = [
        *(record(event, step=3) for event in (PREFILL, GREEDY)),
        record(MIXED, step=4),
        *(record(event, step=3) for event in (finish("req-7"), STEP, Arrival(rid="x"), Arrival(rid="y"))),
        record(DECODE, step=5),
        *(record(event, step=4) for event in (finish("b"), STEP)),
        *(record(event, step=5) for event in (finish("c"), STEP)),
    ]
    numbers = "KV 64 tokens, 2 waiting, 7.5 ms"
    assert printed(records, verbose=False).splitlines() == [
        f"step    3  prefill 31 tokens  req-7 ends: length  {numbers}",
        f"step    4  3 together  b ends: length  {numbers}",
        f"step    5  x comes  y comes  decode  1 token  c ends: length  {numbers}",
    ]
    headings = [line for line in printed(records, verbose=True).splitlines() if line.startswith("step")]
    assert headings == [f"step {number}" for number in (3, 4, 3, 5, 4, 5)]


def test_the_next_engine_of_a_trace_begins_with_its_first_line() -> None:
    engine = [record(Arrival(rid="x"), step=0), record(PREFILL, step=1), record(STEP, step=1)]
    more = [record(DECODE, step=2), record(STEP, step=2)]
    first, second, third = printed([*engine, *engine, *more], verbose=False).splitlines()
    assert first == second and first.startswith("step    1  prefill")
    assert third.startswith("step    2  decode") and "prefill" not in third


def test_the_summary_names_a_few_requests_of_a_large_step_and_counts_the_others() -> None:
    rids = [f"r{number}" for number in range(16)]
    said: list[Event] = [MIXED]
    for number, rid in enumerate(rids):  # as in an update: one request after the other
        said.append(result(rid, number + 1, " x"))
        if number % 3 == 0:
            said.append(finish(rid))
    text = printed([record(event) for event in [*said, Quiet(pages=1), STEP]], verbose=False)
    assert text.splitlines() == [
        "step    3  3 together  "
        "r0 #1 ' x'  r1 #2 ' x'  r2 #3 ' x'  r3 #4 ' x'  and 12 more  "
        "r0 ends: length  r3 ends: length  r6 ends: length  r9 ends: length  and 2 more  "
        "KV 64 tokens, 2 waiting, 7.5 ms"
    ]


# --- readers from the configuration -----------------------------------------------------------------------------------


def test_the_configuration_names_the_readers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = TraceConfig(console="summary", jsonl=tmp_path / "t.jsonl", chrome=tmp_path / "t.json")
    with LLMEngine(model_config=ModelConfig(device="cpu"), trace_config=trace) as engine:
        engine.generate([1, 2], SamplingParams(max_tokens=1))
    assert "step    1" in capsys.readouterr().out
    first = json.loads((tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert first["event"] == "engine_started" and first["model"] == DEFAULT_MODEL.name
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]


# --- cost -------------------------------------------------------------------------------------------------------------


def test_a_failing_reader_disturbs_nothing_even_where_warnings_are_errors(make_engine: MakeEngine) -> None:
    engine = make_engine()
    expected = engine.generate([5, 6, 7], greedy(3)).token_ids
    engine.tracer.attach(Broken())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.generate([5, 6, 7], greedy(3)).token_ids == expected
    assert not has_reader(engine.tracer)


@pytest.mark.parametrize("reader", [object(), 5, "text"])
def test_a_reader_that_cannot_read_is_refused(make_engine: MakeEngine, reader: Any) -> None:
    with pytest.raises(ConfigError, match=r"read\(record\) and close\(\)"):
        make_engine().tracer.attach(reader)
