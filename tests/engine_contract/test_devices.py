"""Engines on a device that is not the first one: all of their work runs with their own device as the current one.

Without a GPU, with the guards of `tests/support/devices.py`. Natively: `test_gpu.py` of m5 and m6.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import m3_paged_attention
import m4_radix_cache
import m5_chunked_prefill_spec
import m6_multimodal_pd
from m3_paged_attention.worker import current_device
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from tests.m3_paged_attention.engines import InTurn, setting as m3_setting
from tests.m5_chunked_prefill_spec.conftest import draft_directory as draft_directory
from tests.m5_chunked_prefill_spec.engines import setting as m5_setting
from tests.m6_multimodal_pd.conftest import seeing_directory as seeing_directory
from tests.m6_multimodal_pd.engines import setting as m6_setting
from tests.m6_multimodal_pd.recorded_graphs import (
    graphs_of_engines as graphs_of_engines,
    recorded_graphs as recorded_graphs,
    wanted_graphs as wanted_graphs,
)
from tests.m6_multimodal_pd.seeing import asking
from tests.support.devices import Devices, GPUMemory
from tests.support.engines import greedy, ids

PROMPTS = [ids(9), ids(30, 100), ids(5, 300)]
RUNS = ("Decoder.forward", "Decoder.compute_logits", "KVStorage.__init__")


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    return Devices(monkeypatch)


def built(package: Any, directory: Path, device: str = "cpu:1", **configs: Any) -> Any:
    model = package.ModelConfig(model=directory, device=device, dtype="float32", attention_backend="torch")
    return package.LLMEngine(model_config=model, **configs)


def answer(engine: Any, prompts: Any = PROMPTS) -> None:
    outputs = engine.generate_batch(prompts, greedy(8))
    assert all(output.error is None for output in outputs.values())


def test_a_guard_makes_a_gpu_the_current_device_and_leaves_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: ("guard of", device))
    assert current_device(torch.device("cuda:1")) == ("guard of", torch.device("cuda:1"))
    with current_device(torch.device("cpu")) as entered:
        assert entered is None


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_steps_and_swapped_blocks_of_m3(tiny_directory: Path, devices: Devices, mode: str) -> None:
    limits = m3_setting(4, blocks=9, mode=mode)
    with built(m3_paged_attention, tiny_directory, parts={"preemption": InTurn}, **limits) as engine:
        answer(engine, [ids(length, 10 * length) for length in (4, 2, 3, 1)])
        devices.check("cpu:1", *RUNS, *(["KVStorage.swap_in", "KVStorage.swap_out"] if mode == "swap" else []))
    devices.check("cpu:1")


def test_copied_blocks_of_m3(tiny_directory: Path, devices: Devices) -> None:
    with built(m3_paged_attention, tiny_directory, **m3_setting(4)) as engine:
        params = m3_paged_attention.SamplingParams(n=3, max_tokens=4, temperature=1.0, ignore_eos=True)
        engine.generate(ids(10), params)
        devices.check("cpu:1", *RUNS, "KVStorage.copy_blocks")


def test_steps_of_m4(tiny_directory: Path, devices: Devices) -> None:
    with built(m4_radix_cache, tiny_directory) as engine:
        answer(engine)
        assert engine.flush_cache()
        answer(engine)
        devices.check("cpu:1", *RUNS)


@pytest.mark.parametrize("package", [m5_chunked_prefill_spec, m6_multimodal_pd])
def test_measured_costs_and_drafts(package: Any, tiny_directory: Path, draft_directory: Path, devices: Devices) -> None:
    make = m5_setting if package is m5_chunked_prefill_spec else m6_setting
    limits = make(4, 32, method="draft_model", draft_model=draft_directory, target_gap_ms=50.0, cost_table=None)
    with built(package, tiny_directory, **limits) as engine:
        assert engine.engine_core.scheduler.composer.cost_table is not None
        devices.check("cpu:1", *RUNS)
        answer(engine)
        runner = engine.engine_core.executor.worker.model_runner
        assert devices.of(runner.model) == devices.of(runner.draft_runner.model) == {"cpu:1"}
        devices.check("cpu:1", "Decoder.forward")


def test_pictures_and_other_weights(seeing_directory: Path, devices: Devices) -> None:
    with built(m6_multimodal_pd, seeing_directory, **m6_setting()) as engine:
        for _ in range(2):
            answer(engine, [engine.chat_prompt(asking("c", 1)), PROMPTS[1]])
            devices.check("cpu:1", "Qwen3VLDecoder.forward", "VisionTower.encode")
            engine.update_weights(seeing_directory)
    devices.check("cpu:1")


def test_the_profiling_run_captures_and_replays(
    tiny_directory: Path, graphs_of_engines: list[Any], devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPUMemory(monkeypatch, total=64 * 2**20)
    limits = m6_setting(3, method="ngram", drafts=2) | {"cache_config": m6_multimodal_pd.CacheConfig(page_size=4)}
    with built(m6_multimodal_pd, tiny_directory, **limits) as engine:
        devices.check("cpu:1", *RUNS, "GraphRunner.__init__")
        assert len(graphs_of_engines) == 2 * len(
            engine.engine_core.executor.worker.model_runner.kv.step.limits.buckets()
        )
        answer(engine)
        devices.check("cpu:1", "GraphRunner.__call__")
        engine.update_weights(tiny_directory)
        answer(engine)
        devices.check("cpu:1", "GraphRunner.__call__")


def test_overlapped_steps_and_their_events(
    tiny_directory: Path, devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m6_multimodal_pd.overlap.engine_core.Launcher.obstacle", lambda launcher: None)
    with built(m6_multimodal_pd, tiny_directory, **m6_setting(4, enable_overlap=True)) as engine:
        monkeypatch.setattr(engine.engine_core.launcher, "is_cuda", True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        answer(engine)
        devices.check("cpu:1", *RUNS, "Event.__init__", "Event.record")


@pytest.mark.parametrize("names", ["cpu:0,cpu:1,cpu:1", "cpu:2, cpu:1, cpu:0", None])
def test_each_engine_of_a_group_has_its_own_device(seeing_directory: Path, devices: Devices, names: str | None) -> None:
    group = DisaggregationConfig(prefill=1, decode=2, devices=names, transport="in_process")
    device = "auto" if names else "cpu:1"
    limits = m6_setting(tokens=512)
    with built(m6_multimodal_pd, seeing_directory, device, disaggregation_config=group, **limits) as engine:
        answer(engine, [*PROMPTS, engine.chat_prompt(asking("c", 1)), ids(12, 900)])
        members = engine.engine_core.router.links.engines
        kvs = {name: each.core.executor.worker.model_runner.kv for name, each in members.items()}
        found = [devices.of(kvs[name]) for name in ("prefill-0", "decode-0", "decode-1")]
        assert found == [{name.strip()} for name in (names or "cpu:1,cpu:1,cpu:1").split(",")]
        towers = {where for owner, name, where in devices.work if name == "VisionTower.encode"}
        assert len(towers) == 1 and "none" not in {where for _, _, where in devices.work}
