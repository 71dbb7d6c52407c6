"""`python -m benchmarks`: its list, its errors, and the redrawing of every lesson's tables from stored results."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import HERE, RESULTS, lesson
from benchmarks.__main__ import COMMANDS, main
from benchmarks.against import CASES, work
from benchmarks.empty_kernels import TOKEN, empty_kernels
from benchmarks.report import sections
from benchmarks.roofline import experts_read
from benchmarks.side import SideProcess
from m3_paged_attention.attention import native_library
from tests.structure.circles import files_import_in_one_direction
from tests.structure.sources import Source

PAGES = [*HERE.glob("docs/m*.md"), HERE / "README.md", *HERE.glob("notebooks/*.ipynb")]
WITH_COMPILER = pytest.mark.skipif(native_library.obstacle() is not None, reason="the native backend cannot run here")
LESSONS = ("m1", "m2", "m3", "m4", "m4_tiers", "m5", "m6", "m6_pd", "m6_overlap", "m7")


def test_without_arguments_every_command_is_listed_with_its_subject_and_its_time(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        (line,) = re.findall(rf"^{name} .*$", shown, re.M)
        assert command.takes in line


def test_every_command_that_a_page_or_a_notebook_names_exists_and_explains_itself(capsys):
    named = {name for page in PAGES for name in re.findall(r"python -m benchmarks (\w+)", page.read_text("utf-8"))}
    assert named and named <= set(COMMANDS)
    assert not [page for page in PAGES if "python -m benchmarks." in page.read_text("utf-8")]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert f"python -m benchmarks {name}" in capsys.readouterr().out


def test_a_folder_that_is_no_checkout_is_not_compared(tmp_path, capsys):
    assert main(["against", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert "is no checkout" in capsys.readouterr().err


def test_a_command_without_a_trace_has_no_part_of_that_name(capsys):
    assert main(["busy", "--only", "trace"]) == 2
    assert "unknown parts trace; there are " in capsys.readouterr().err


def test_an_unknown_command_is_an_error_in_one_line_that_names_the_others(capsys):
    assert main(["m9"]) == 2
    assert capsys.readouterr().err.startswith("BenchmarkError: there is no command 'm9'; there are run, day, m1")


@pytest.mark.parametrize(
    "arguments", [("m1", "--rounds", "0"), ("m1", "--threads", "0"), ("against", ".", "--rounds", "0")]
)
def test_numbers_that_measure_nothing_are_an_error(arguments, capsys):
    assert main(arguments) == 2
    assert re.match(r"BenchmarkError: --(rounds|threads) 0 must be greater than 0\n$", capsys.readouterr().err)


@pytest.mark.exhaustive
def test_a_checkout_is_compared_with_itself(tmp_path, capsys):
    assert main(["against", str(HERE), "--only", "m1", "--rounds", "2", "--output", str(tmp_path)]) == 0
    case = json.loads((tmp_path / "against.json").read_text("utf-8"))["cases"]["m1"]
    assert case["same_answers"] and 0 < case["ratios"][0] <= case["ratio"] <= case["ratios"][1]
    assert [len(case["speeds"][side]) for side in ("before", "now")] == [2, 2]
    assert all("disturbed" in load for loads in case["load"].values() for load in loads)
    assert "| m1 | 1 | tok/s |" in capsys.readouterr().out


@WITH_COMPILER
def test_kernels_that_compute_nothing_have_the_names_of_the_measured_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(native_library, "SOURCES", native_library.SOURCES)
    monkeypatch.delitem(native_library.SIGNATURES, "run_layers")  # as in a checkout that is older
    with empty_kernels():
        native_library.build(native_library.find_compiler(), tmp_path / "empty.so")
    library = native_library.open_library(tmp_path / "empty.so")
    assert not hasattr(library, "run_layers_float32")
    for linear, dtype in ((library.linear_float32, torch.float32), (library.linear_bfloat16, torch.bfloat16)):
        logits = torch.full((2, 100), torch.nan, dtype=dtype)
        linear(None, None, None, logits.data_ptr(), 2, 4, 100, 1)
        assert logits.argmax(-1).tolist() == [TOKEN, TOKEN] and logits.sum() == 2


@pytest.mark.exhaustive
@WITH_COMPILER
def test_a_side_without_kernels_always_gets_the_same_token():
    case = CASES["m3, Python of a decode step, 16 at once"]
    with SideProcess({"milestone": case.milestone, "settings": case.settings} | case.process) as side:
        run = side({"drawn": work(2, 8)})
    assert run["answers"] == [[TOKEN] * 8] * 2
    assert case.speed(run) > 0


@pytest.mark.exhaustive
def test_beside_a_busy_program_the_answers_are_the_same(tmp_path):
    assert main(["busy", "--quick", "--only", "embedded", "--threads", "1", "--output", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "quick" / "m3_busy.json").read_text("utf-8"))
    assert [row["streams"] for row in results["parts"]["embedded"]["rows"]] == ["1", "16"]
    assert all(row["same_answers"] and row["busy_ratio"] > 0 for row in results["parts"]["embedded"]["rows"])


@pytest.mark.exhaustive
def test_each_kind_of_weights_is_measured(tmp_path):
    only = ["--only", "layers,quality", "--threads", "1"]
    assert main(["quantized", "--quick", *only, "--output", str(tmp_path)]) == 0
    parts = json.loads((tmp_path / "quick" / "m3_quantized.json").read_text("utf-8"))["parts"]
    assert all(min(row["seconds"].values()) > 0 for row in parts["layers"]["rows"])
    assert parts["quality"]["rows"][0]["difference"] == 0 < parts["quality"]["rows"][1]["difference"]


def test_an_unknown_part_of_a_lesson_is_an_error_that_names_the_others(tmp_path, capsys):
    assert main(["m4", "--only", "evictions", "--output", str(tmp_path)]) == 2
    assert "unknown parts evictions; there are reuse_0_6b" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_experts_are_measured_beside_transformers_and_a_dense_model(tmp_path):
    assert main(["experts", "--quick", "--rounds", "1", "--output", str(tmp_path)]) == 0
    parts = json.loads((tmp_path / "quick" / "m3_experts.json").read_text("utf-8"))["parts"]
    assert all(row["times transformers"] > 0 and row["of dense"] > 0 for row in parts["speed"]["rows"])
    assert parts["reads"]["rows"][0]["read"] == 4, "one token reads as many as it uses"
    bytes_of = {(point["model"], point["tokens"]): point["bytes"] for point in parts["roofline"]["points"]}
    assert bytes_of["sparse", 1] < bytes_of["sparse", 16] < bytes_of["sparse", 64]


def test_a_step_reads_the_experts_that_its_tokens_are_expected_to_choose():
    experts = SimpleNamespace(num_experts=48, top_k=4)
    assert [round(experts_read(experts, n), 1) for n in (1, 2, 16, 64)] == [4.0, 7.7, 36.1, 47.8]


@pytest.mark.exhaustive
def test_tiles_are_measured_beside_vectors(tmp_path, capsys):
    if main(["tiles", "--quick", "--output", str(tmp_path)]) == 2:
        assert "has no tiles" in capsys.readouterr().err
        pytest.skip("a processor without tiles")
    parts = json.loads((tmp_path / "quick" / "m3_tiles.json").read_text("utf-8"))["parts"]
    assert all(min(row["seconds"].values()) > 0 for part in parts.values() for row in part["rows"])


@pytest.mark.parametrize("name", [*LESSONS, "busy", "quantized", "kv_types", "experts", "tiles"])
def test_the_tables_of_a_lesson_are_those_of_the_stored_numbers(name, tmp_path, monkeypatch):
    monkeypatch.setattr(lesson, "drawn", lambda *_: None)
    main([name, "--redraw", "--output", str(tmp_path)])
    (drawn,) = tmp_path.glob("*.md")
    assert drawn.read_text("utf-8") == (RESULTS / drawn.name).read_text("utf-8")


def test_quick_numbers_are_not_recorded(capsys):
    assert main(["m6", "--quick", "--record"]) == 2
    assert "--record cannot keep them" in capsys.readouterr().err


def test_a_lesson_measures_one_part_into_the_folder_of_the_caller(tmp_path, capsys):
    before = {path: path.stat().st_mtime for path in RESULTS.iterdir()}
    assert main(["m6", "--quick", "--only", "memory", "--output", str(tmp_path), "--threads", "1"]) == 0
    results = json.loads((tmp_path / "quick" / "m6_multimodal.json").read_text("utf-8"))
    assert results["quick"] and list(results["parts"]) == ["memory"]
    assert "[start:rows]" in capsys.readouterr().out
    assert {path: path.stat().st_mtime for path in RESULTS.iterdir()} == before


def test_a_section_is_left_out_where_its_part_was_not_measured():
    stored = json.loads((RESULTS / "m1_single_request.json").read_text("utf-8"))
    stored["parts"] = {"queue": stored["parts"]["queue"]}
    text = sections(HERE / "benchmarks" / "m1" / "tables.md.jinja", stored)
    assert re.findall(r"start:(\w+)", text) == ["queue", "environment"]


def test_no_file_of_the_program_imports_another_in_a_circle():
    assert not list(files_import_in_one_direction(Source.from_packages(HERE, ["benchmarks"])))
