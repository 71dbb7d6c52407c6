"""The pages "One step, all of it": records are those of today's code, and pages show all of them."""

import json
import re

import pytest

from docs.record_steps import PACKAGE, STEPS, Call, Recorder, merged, own_path, record, rows, tree
from docs.source_code import ROOT
from docs.step_pages import earlier, fill_steps, function, keys_of, place_steps
from m1_single_request.stop_checker import StopChecker

MAX_BYTES = 450_000
"""Of the steps of one page; the theme adds some 40 kB."""


def page(milestone: str) -> tuple[str, set[str]]:
    """The page of a milestone's steps as HTML, and its anchors."""
    text = (STEPS / f"{milestone}.md").read_text(encoding="utf-8")
    return fill_steps(place_steps(text), "../../")


@pytest.mark.sample(2)
@pytest.mark.parametrize("milestone", PACKAGE)
def test_the_record_is_that_of_todays_code(milestone: str) -> None:
    stored = json.loads((STEPS / f"{milestone}.json").read_text(encoding="utf-8"))
    today = {name: list(map(list, lines)) for name, lines in record(milestone).items()}
    assert today == stored, "run: python -m docs.record_steps"


def test_steps_are_those_that_the_pages_name() -> None:
    names = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in STEPS.glob("*.json")}
    called = {(m, step): {name for *_, name in lines} for m, steps in names.items() for step, lines in steps.items()}
    assert "NgramProposer.lookup" in called["m5", "decode"] and "metadata_of_rows" in called["m5", "decode"]  # verified
    assert "ScheduleBatch.mix_with_running" in called["m5", "prefill"]
    assert "VisionTower.encode" in called["m6", "prefill"] and "VisionTower.encode" not in called["m6", "decode"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("milestone", PACKAGE)
def test_a_page_shows_every_function_of_its_steps_once(milestone: str) -> None:
    text, anchors = page(milestone)
    stored = json.loads((STEPS / f"{milestone}.json").read_text(encoding="utf-8"))
    ids = re.findall(r'id="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and set(ids) == anchors
    assert set(re.findall(r'href="#([^"]+)"', text)) <= anchors
    for step, lines in stored.items():
        functions = dict.fromkeys(keys_of(tree(lines)))
        assert len([each for each in ids if each.startswith(f"{step}.")]) == len(functions)
        assert f"<b>{len(functions)} functions in {len({path for path, _ in functions})} files" in text
        assert {name for _, name in functions} <= anchors
    codes = re.findall(r'<li id="([^"]+)">(?:<a id="[^"]+"></a>)?<details class="\w+">.*?<pre', text)
    assert set(re.findall(r'data-code="([^"]+)"', text)) <= set(codes)
    assert text.count("<ul>") == text.count("</ul>") and text.count("<li") == text.count("</li>")
    assert len(text.encode()) < MAX_BYTES


def test_a_place_without_a_record_stays_as_it_is() -> None:
    text = "See [step: decode](m1.json)."
    assert fill_steps(place_steps(text), "") == (text, set())


def test_calls_of_a_function_by_the_same_one_are_merged_in_the_order_of_the_first() -> None:
    calls = [
        Call("f.py", "a", calls=[Call("f.py", "x")]),
        Call("f.py", "b"),
        Call("f.py", "a", calls=[Call("f.py", "y")]),
    ]
    lines = rows(merged(calls))
    assert lines == [(0, 2, "f.py", "a"), (1, 1, "f.py", "x"), (1, 1, "f.py", "y"), (0, 1, "f.py", "b")]
    assert rows(tree(lines)) == lines


def test_recorded_is_what_belongs_to_the_packages() -> None:
    recorder = Recorder()
    with recorder:
        [StopChecker(eos_token_ids=(), max_model_len=1) for _ in range(2)]
        json.dumps({})
    assert rows(merged(recorder.top.calls)) == [(0, 2, "m1_single_request/stop_checker.py", "StopChecker.__init__")]
    assert own_path(test_recorded_is_what_belongs_to_the_packages.__code__) is None


def test_what_a_function_replaces() -> None:
    scheduler = "scheduler.py"
    of_m3, of_m4, of_m5 = (f"{PACKAGE[name]}/{scheduler}" for name in ("m3", "m4", "m5"))
    assert earlier(of_m5, "Scheduler.get_next_batch_to_run") == (of_m4, "Scheduler.get_next_batch_to_run")  # overrides
    assert earlier(of_m4, "Scheduler.schedule") == (of_m3, "Scheduler.schedule")  # the same name in the same file
    assert earlier(f"{PACKAGE['m4']}/mem_cache/radix_cache.py", "RadixCache.evict") is None
    assert all((ROOT / path).is_file() for path in (of_m3, of_m4, of_m5))


def test_small_are_properties_constructors_and_single_statements() -> None:
    path = "m1_single_request/request.py"
    assert not function("m1_single_request/engine_core.py", "EngineCore.step").is_small
    assert function("m1_single_request/engine_core.py", "EngineCoreBase.has_unfinished_requests").is_small
    assert function("m1_single_request/engine_core.py", "EngineCoreBase.__init__").is_small
    assert function(path, "Request.gone") is None
