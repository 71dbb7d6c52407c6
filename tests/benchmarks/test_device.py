"""`python -m benchmarks.device`: it needs a GPU, so here its parts run small and on the CPU, without graphs."""

import json
from pathlib import Path

import pytest

from benchmarks import RESULTS, device
from benchmarks.__main__ import main
from benchmarks.device import wheels
from benchmarks.device.measures import Bench
from benchmarks.lesson import Size
from benchmarks.report import sections

pytestmark = pytest.mark.exhaustive  # whole runs of a benchmark

SMALL = device.SHAPE | {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 4096,
}
GPU = {"name": "GPU", "memory": 2**36, "cuda": "13.0", "triton": "3.7"}


@pytest.fixture(scope="module")
def bench():
    return Bench("cpu", SMALL, Size(rounds=1, quick=True))


@pytest.fixture(scope="module")
def two(bench):
    return bench.decode(2)


def test_without_a_gpu_there_are_no_numbers(tmp_path, capsys):
    assert main(["device", "--output", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err and not list(tmp_path.glob("*.json"))


def test_stored_numbers_are_of_a_gpu():
    for path in RESULTS.glob("device*.json"):
        assert json.loads(path.read_text("utf-8"))["environment"]["gpu"]["name"]


@pytest.mark.exhaustive
def test_a_decode_step_has_a_share_of_the_bandwidth_and_the_same_tokens_in_every_way(bench, two):
    assert list(two["ways"]) == ["eager", "eager, overlapped"] and two["same_tokens"]
    for way in two["ways"].values():
        assert way["share"] == pytest.approx(two["bytes"] / way["step"] / bench.machine()["bandwidth"])
        assert way["tokens_per_second"] == pytest.approx(2 / way["step"])


def test_prompts_have_a_share_of_the_arithmetic(bench):
    (row,) = bench.prefill()["rows"]
    assert row["share"] == pytest.approx(row["flop"] / row["seconds"] / bench.machine()["flops"])


@pytest.mark.exhaustive
def test_the_same_requests_are_answered_by_the_engine_and_by_transformers(bench):
    many, other = bench.many(), bench.transformers()
    assert many["num_requests"] == other["num_requests"] == 8
    assert many["num_output_tokens"] == other["num_output_tokens"]
    assert many["max_num_seqs"] == 16 and many["tokens_per_second"] > 0 < other["tokens_per_second"]


@pytest.mark.exhaustive
def test_tables_show_what_was_measured_so_far(bench, two):
    env = {"gpu": GPU, "machine": {"cpu": "CPU", "torch_threads": 1, "cores": 2}, "seed": 1}
    env |= {"versions": {"python": "3", "torch": "2", "transformers": "5"}, "model": {"name": "8B"}}
    results = {"environment": env, "parts": {"machine": bench.machine(), "decode_1": two}}
    text = sections(Path(device.__file__).with_name("tables.md.jinja"), results)
    assert "GB/s" in text and "| eager, overlapped |" in text and "transformers`" not in text


def test_wheels_name_what_the_engine_needs_with_versions(capsys):
    assert wheels.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"torch", "transformers", "safetensors", "tokenizers", "msgspec"} <= {
        line.partition("==")[0] for line in lines
    }
    assert not any(line.startswith(("nvidia-", "pytest")) or "+cpu" in line for line in lines)
