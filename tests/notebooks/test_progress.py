"""The record of what a learner has solved: who writes it and when, what harms it, and the table that shows it."""

import importlib
import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from notebooks import progress
from notebooks.checks import GRADERS, check
from notebooks.progress import FILE, KINDS, ROOT, VARIABLE, RecordError, exercises, main, path_of_record, read, record
from tests.contracts.part import Part, all_parts
from tests.contracts.plugin import ENGINE_TEST, is_solved
from tests.notebooks.exercises import open_exercise

TODAY = date.today().isoformat()
DAMAGED = {
    "empty": b"",
    "cut": b'{"exercises": {"m1.kv_by',
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "one kind": b'{"exercises": {}}',
    "names without dates": b'{"exercises": ["m1.kv_bytes"], "parts": {}}',
    "a number for a date": b'{"exercises": {"m1.kv_bytes": 1}, "parts": {}}',
    "another date": b'{"exercises": {"m1.kv_bytes": "yesterday"}, "parts": {}}',
    "deep": b"[" * 100_000,
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of a learner who has solved nothing."""
    path = tmp_path / "record.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def kv_bytes(config: Any, num_tokens: int, width: int) -> int:
    """Solve `m1.kv_bytes`."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * num_tokens * width


def bytes_moved(num_tokens: int, num_cached: int, page_size: int, width: int) -> int:
    """Solve `m6_pd.bytes_moved`."""
    return (-(-num_tokens // page_size) - num_cached // page_size) * page_size * width


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the program prints, in lines that are not broken."""
    assert main(arguments) == 0
    return capsys.readouterr().out


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_an_exercise_that_passes_is_recorded_with_its_date_and_nothing_else(path: Path) -> None:
    assert check("m1.kv_bytes", kv_bytes)
    assert json.loads(path.read_text()) == {"exercises": {"m1.kv_bytes": TODAY}, "parts": {}}


def test_what_does_not_pass_is_not_recorded(path: Path) -> None:
    assert not check("m1.kv_bytes", open_exercise) and not check("m1.kv_bytes", lambda *_: 0)
    assert not path.exists()


def test_the_date_of_the_first_solution_stays(path: Path) -> None:
    path.write_text('{"exercises": {"m1.kv_bytes": "2026-01-31"}, "parts": {"gone": "2025-12-31"}}')
    check("m1.kv_bytes", kv_bytes)
    check("m6_pd.bytes_moved", bytes_moved)
    record("parts", "eviction_heap")
    assert read(path) == {
        "exercises": {"m1.kv_bytes": "2026-01-31", "m6_pd.bytes_moved": TODAY},
        "parts": {"gone": "2025-12-31", "eviction_heap": TODAY},
    }


def test_the_record_is_in_the_checkout_and_ignored_by_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    assert path_of_record() == ROOT / FILE
    ignored = [FILE, f"{FILE}1a2b3c"]  # and the file that becomes the next record
    assert subprocess.run(["git", "check-ignore", *ignored], cwd=ROOT, capture_output=True).stdout.split() == [
        name.encode() for name in ignored
    ]
    monkeypatch.setenv(VARIABLE, "elsewhere.json")
    assert path_of_record() == ROOT / "elsewhere.json"


def test_tests_record_nothing(tmp_path: Path) -> None:
    assert os.environ[VARIABLE] == "" and path_of_record() is None
    for name in (".ci/run", "docs/hooks.py"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert f"\nexport {VARIABLE}= " in text or f'\nos.environ["{VARIABLE}"] = ""' in text, name


def test_a_record_is_replaced_as_a_whole_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check("m1.kv_bytes", kv_bytes)
    before = path.read_bytes()

    def is_killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", is_killed)
    with pytest.raises(KeyboardInterrupt):
        check("m6_pd.bytes_moved", bytes_moved)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


# --- a record that cannot be used -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", DAMAGED)
def test_a_damaged_record_breaks_no_check_is_left_alone_and_is_named(
    path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    path.write_bytes(DAMAGED[form])
    assert check("m1.kv_bytes", kv_bytes)
    assert path.read_bytes() == DAMAGED[form]
    text = shown(capsys)
    assert f"Nothing is recorded: {path} is damaged: " in text and f"0 of {len(GRADERS)} exercises" in text


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no folder/record.json", "cannot be written: No such file or directory"),
        ("file/record.json", "cannot be read: Not a directory"),
        ("folder", "cannot be read: Is a directory"),
    ],
)
def test_a_record_that_cannot_be_written_breaks_no_check_and_the_reason_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path / name))
    assert check("m1.kv_bytes", kv_bytes)
    assert f"Nothing is recorded: {tmp_path / name} {why}." in shown(capsys)


def test_a_full_disk_breaks_no_check(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(progress.tempfile, "mkstemp", is_full)
    assert check("m1.kv_bytes", kv_bytes)
    with pytest.raises(RecordError, match="cannot be written: No space left on device"):
        progress.write(path, {kind: {} for kind in KINDS})


def test_where_recording_is_switched_off_the_program_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert f"Nothing is recorded: {VARIABLE} is empty." in shown(capsys)
    assert f"Nothing is recorded: {VARIABLE} is empty." in shown(capsys, "--reset")


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_exercises_are_those_that_are_graded_each_with_its_section() -> None:
    tasks = exercises()
    assert sorted(task.name for task in tasks) == sorted(GRADERS)
    places = {task.name: task.place for task in tasks}
    assert places["m1.off_by_one"] == "notebooks/m1_single_request.ipynb, section 6, Lab A"
    assert places["m2.starved_decode"] == "notebooks/m2_continuous_batching.ipynb, section 6, Break it"
    assert places["m3.join"] == "notebooks/m3_paged_attention.ipynb, section 7, exercise 2"
    assert places["m4_tiers.layer_wait"] == "notebooks/m4_tiers.ipynb, section 10, Break it (2)"
    assert places["m6_overlap.loop"] == "notebooks/m6_overlap.ipynb, section 8, exercise 2"


def test_the_table_counts_what_is_solved_and_names_the_next_one(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("m1.off_by_one", "m1.detokenizer", "m7.zombie", "m9.gone"):
        record("exercises", name)
    parts = [part for part in all_parts().values() if part.target.startswith("m4_")]
    record("parts", parts[0].name)
    rows = [" ".join(line.split()) for line in shown(capsys).splitlines()]
    place = rows.index("m1 exercises 2 / 6 m1.output_processor") + 1
    assert rows[place] == "notebooks/m1_single_request.ipynb, section 6, Lab B"
    assert "m7 exercises 1 / 5 m7.half_character" in rows and "m4 exercises 0 / 10 m4.freed_while_mapped" in rows
    following = f" {parts[1].name}" if len(parts) > 1 else ""
    assert f"parts 1 / {len(parts)}{following}" in rows
    if following:
        assert f"starters/{parts[1].name}.py" in rows
    assert f"3 of {len(GRADERS)} exercises, 1 of {len(all_parts())} parts" in rows
    assert not [row for row in rows if "Nothing is recorded" in row]


def test_a_milestone_that_is_solved_has_no_next_exercise(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for task in exercises():
        record("exercises", task.name)
    rows = [" ".join(line.split()) for line in shown(capsys).splitlines()]
    assert {"m1 exercises 6 / 6", "m4 exercises 10 / 10", "m6 exercises 20 / 20"} <= set(rows)
    assert any(row.startswith("{0} of {0} exercises, 0 of ".format(len(GRADERS))) for row in rows)


def test_without_what_contracts_need_the_exercises_are_shown_alone(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tests.contracts.part", None)
    text = shown(capsys)
    assert (
        f"0 of {len(GRADERS)} exercises" in text
        and "Parts are left out: " in text
        and 'pip install -e ".[test]"' in text
    )


def test_reset_prints_what_it_forgets(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text('{"exercises": {"m1.kv_bytes": "2026-01-31"}, "parts": {"eviction_heap": "2026-02-01"}}')
    lines = shown(capsys, "--reset").splitlines()
    assert lines[:2] == ["m1.kv_bytes, solved on 2026-01-31", "eviction_heap, solved on 2026-02-01"]
    assert lines[2:] == [f"All of this is forgotten: {path} is removed."] and not path.exists()
    assert shown(capsys, "--reset") == "Nothing is recorded.\n"


def test_reset_removes_a_damaged_record(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text("{")
    assert f"{path} is damaged: " in shown(capsys, "--reset") and not path.exists()
    check("m1.kv_bytes", kv_bytes)
    assert list(read(path)["exercises"]) == ["m1.kv_bytes"]


def test_what_reset_cannot_remove_it_names(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.mkdir()
    assert main(["--reset"]) == 1
    assert f"{path} cannot be removed: " in capsys.readouterr().out


# --- parts, and notebooks ---------------------------------------------------------------------------------------------


def test_a_part_is_solved_if_all_behaviours_and_the_engine_passed() -> None:
    part = all_parts()["eviction_heap"]
    passed = {*part.behaviours, ENGINE_TEST}
    assert is_solved(part, passed)
    assert not any(is_solved(part, passed - {name}) for name in passed)
    assert not is_solved(Part("m4_x.y:Z", target="m4_x.y:Z", lesson="", starter="", variant="any"), passed)


def test_a_part_that_runs_in_no_engine_of_the_suite_needs_its_behaviours_only() -> None:
    part = all_parts()["eviction_heap"]
    without = Part(part.name, target=part.target, lesson="", starter="")
    assert is_solved(without, set(part.behaviours)) and not is_solved(without, {ENGINE_TEST})


def pytest_part(path: Path, solution: str, *arguments: str) -> int:
    """Run `pytest --part` for an eviction heap as a learner does, with this record."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--part", f"eviction_heap={solution}"]
    env = os.environ | {VARIABLE: str(path), "PYTEST_ADDOPTS": ""}
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=env, capture_output=True, timeout=150)
    return done.returncode


REFERENCE = f"{ROOT / 'm4_radix_cache' / 'mem_cache' / 'eviction.py'}:EvictionHeap"


@pytest.mark.exhaustive
def test_a_part_is_not_recorded_if_some_behaviours_or_the_engine_did_not_run(path: Path) -> None:
    assert pytest_part(path, REFERENCE, "-k", "not engine") == 0
    assert not path.exists()


@pytest.mark.exhaustive
def test_a_part_that_an_engine_runs_is_recorded_and_a_starter_is_not(path: Path) -> None:
    assert pytest_part(path, f"{ROOT / 'starters' / 'eviction_heap.py'}:MyEvictionHeap") == 1
    assert not path.exists()
    assert pytest_part(path, REFERENCE) == 0
    assert read(path) == {"exercises": {}, "parts": {"eviction_heap": TODAY}}


def test_a_check_beside_the_notebook_has_hints_and_records_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter starts in `notebooks/`, where no module is `notebooks.checks`."""
    for name in ("notebooks", "notebooks.hints", "notebooks.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    own = ("checks", "hints", "progress")
    assert not set(own) & set(sys.modules)
    try:
        checks = importlib.import_module("checks")
        assert "Hint 1: " in checks.check("m1.held_back", None, hint=1).message
        assert checks.check("m1.kv_bytes", kv_bytes)
    finally:
        for name in own:
            sys.modules.pop(name, None)
    assert list(read(path)["exercises"]) == ["m1.kv_bytes"]
