"""Devices of a group: named one by one, or shared; engines on one device divide its memory, whichever starts first."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from m1_single_request.model_loader import LoadedModel
from m1_single_request.tracer import Tracer
from m6_multimodal_pd import (
    CacheConfig,
    ConfigError,
    DisaggregationConfig,
    LLMEngine,
    ModelConfig,
    SamplingParams,
    TraceConfig,
    pd,
)
from m6_multimodal_pd.config import EngineConfig
from m6_multimodal_pd.disaggregation.runtime import processes
from m6_multimodal_pd.graph_runner import GraphCapture, GraphLimits
from tests.m6_multimodal_pd.pd_engines import Listener
from tests.m6_multimodal_pd.recorded_graphs import StaticBackend, recorded_graphs as recorded_graphs
from tests.support.devices import GPUMemory
from tests.support.engines import ids

MIB = 2**20
TOTAL, PEAK = 96 * MIB, 8 * MIB
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


# --- the setting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"devices": "cuda:0"}, r"names 1, and the group has 2 engines \(prefill=1, decode=1\): name one for each"),
        ({"devices": "cuda:0,cuda:1", "decode": 2}, "names 2, and the group has 3"),
        ({"devices": "cuda:0,cpu"}, "must be a list of GPUs, or of CPUs, such as cuda:0,cuda:1"),
        ({"devices": "cuda:0,"}, "must be a list of GPUs, or of CPUs"),
        ({"devices": "cuda:0,meta"}, "must be a list of GPUs, or of CPUs"),
        ({"devices": "cuda:0,cuda:256"}, "must be a list of GPUs, or of CPUs"),
        ({"devices": "cuda:0,cuda:01"}, "must be a list of GPUs, or of CPUs"),
        ({"devices": 2}, "must be a list of GPUs, or of CPUs"),
        (
            {"devices": "cpu,cpu", "address": "tcp://127.0.0.1:*", "key_file": "keys"},
            "no effect on a router .*: give it to",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_devices_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DisaggregationConfig(**values)


def test_each_engine_has_its_device_also_after_a_restart() -> None:
    group = DisaggregationConfig(prefill=2, decode=2, devices="cuda:3, cuda:0,cuda ,cuda:1")
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1", "prefill-1_2", "decode-1_1"]
    assert [group.device_of(name) for name in names] == ["cuda:3", "cuda:0", "cuda", "cuda:1", "cuda:0", "cuda:1"]
    shares = [group.num_engines_on(torch.device(name)) for name in ("cuda:3", "cuda:0", "cuda", "cuda:1")]
    assert shares == [1, 2, 2, 1]
    with pytest.raises(ConfigError, match="device=cuda:2 is not one of devices='cuda:3"):
        group.num_engines_on(torch.device("cuda:2"))


def test_without_names_all_engines_are_on_the_device_of_the_model() -> None:
    group = DisaggregationConfig(prefill=2, decode=3)
    assert group.device_of("decode-2") is None and group.num_engines_on(torch.device("cuda:1")) == 5


@pytest.mark.parametrize(
    ("device", "devices", "message"),
    [
        ("cpu", "cpu,cpu", "device='cpu' and devices='cpu,cpu': leave out one of them"),
        ("auto", "cuda:98,cuda:99", "device='cuda:98': torch finds [0-9]+ CUDA devices here"),
    ],
)
@pytest.mark.parametrize("transport", ["in_process", "shared_memory"])
def test_devices_that_do_not_fit_the_model_or_the_machine(
    device: str, devices: str, message: str, transport: Any
) -> None:
    group = DisaggregationConfig(devices=devices, transport=transport)
    with pytest.raises(ConfigError, match=message):
        LLMEngine(model_config=ModelConfig(device=device), disaggregation_config=group)


class Ordered:
    """In place of the process of an engine: its order."""

    def __init__(self, order: Any, group: object, folder: str) -> None:
        self.order = order


def test_processes_are_ordered_onto_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "Child", Ordered)
    group = DisaggregationConfig(decode=2, devices="cpu:1,cpu:0,cpu:2")
    links = processes.ProcessLinks(EngineConfig(disaggregation=group), is_traced=False)
    found = {}
    for name, role in (
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
        ("decode-1_1", "decode"),
    ):
        links.start(name, role)  # type: ignore[arg-type]
        found[name] = json.loads(links.children.pop(name).order.config)["model"]["device"]
    links.close()
    assert found == {"prefill-0": "cpu:1", "decode-0": "cpu:0", "decode-1": "cpu:2", "decode-1_1": "cpu:2"}


def test_an_engine_that_is_started_by_hand_is_told_of_the_group(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []

    class Started:
        error = None

        def __init__(self, order: Any) -> None:
            orders.append(json.loads(order.config))

        def run(self, *signals: object) -> None: ...

    monkeypatch.setattr(pd, "Process", Started)
    flags = ["--join", "tcp://127.0.0.1:1", "--keys", str(keys), "--decode", "2", "--devices", "cpu,cpu,cpu"]
    assert pd.main(["decode", *flags]) == 0
    (order,) = orders
    assert (order["disaggregation"]["decode"], order["disaggregation"]["devices"]) == (2, "cpu,cpu,cpu")


# --- memory -----------------------------------------------------------------------------------------------------------


def sizes_of(directory: Path, **group: Any) -> dict[str, dict[str, Any]]:
    """The sizes of all engines of a group, by name, which has answered."""
    listener = Listener()
    with LLMEngine(
        model_config=ModelConfig(model=directory, dtype="float32"),
        cache_config=CacheConfig(page_size=4),
        disaggregation_config=DisaggregationConfig(transport="in_process", **group),
        trace_config=TraceConfig(readers=(listener,)),
    ) as engine:
        assert len(engine.generate(ids(9), PARAMS).token_ids) == 3
    return {event.engine: dict(event.facts) for event in listener.told("kv_sized")}


@pytest.mark.parametrize("others", [(0, 30 * MIB, 80 * MIB), (80 * MIB, 30 * MIB, 0)])
def test_engines_on_one_device_have_equal_parts_whatever_the_others_use_already(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch, others: tuple[int, ...]
) -> None:
    """`others`: what each of them finds used, in the order of their start."""
    GPUMemory(monkeypatch, total=TOTAL, peak=PEAK, others=others)
    sizes = sizes_of(tiny_directory, decode=2)
    assert len(sizes) == 3
    for sized in sizes.values():
        assert sized["total_bytes"] == TOTAL // 3 and sized["peak_bytes"] == PEAK
        assert sized["budget_bytes"] == int(TOTAL // 3 * 0.9) - PEAK
    assert sum(sized["num_bytes"] + PEAK for sized in sizes.values()) <= 0.9 * TOTAL


def test_an_engine_with_a_device_of_its_own_has_all_of_it(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPUMemory(monkeypatch, total=TOTAL, peak=PEAK, others=(2 * MIB,))
    sizes = sizes_of(tiny_directory, decode=2, devices="cpu:1,cpu:0,cpu:1")
    alone = sizes.pop("decode-0")
    assert alone["total_bytes"] == TOTAL and alone["budget_bytes"] == int(TOTAL * 0.9) - PEAK - 2 * MIB
    assert [sized["budget_bytes"] for sized in sizes.values()] == [int(TOTAL // 2 * 0.9) - PEAK] * 2


def test_a_part_that_is_too_small_is_an_error_that_names_what_would_do(
    tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPUMemory(monkeypatch, total=TOTAL, peak=int(TOTAL // 2 * 0.9) - 5000)
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization leaves .* Use .*gpu_memory_utilization of at least 0\.9"
    ):
        sizes_of(tiny_directory)


@pytest.mark.parametrize("is_alone", [True, False])
def test_the_memory_of_graphs_is_not_that_of_an_engine_that_starts_meanwhile(
    loaded: LoadedModel, recorded_graphs: list[Any], monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    """`mem_get_info` is of the device, `memory_reserved` of this process."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30 - 100 * MIB * len(recorded_graphs), 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * MIB * len(recorded_graphs))
    monkeypatch.setattr(loaded.model, "backend", StaticBackend())
    capture = GraphCapture(page_size=4, is_alone=is_alone, tracer=Tracer())
    with torch.inference_mode():
        num_bytes = capture.measure(loaded.model, GraphLimits(max_num_seqs=2, max_model_len=16))
    assert len(recorded_graphs) == 2
    assert num_bytes // MIB == (200 if is_alone else 6)
