"""One copy to the device per decode step: overlapped, captured, with drafts, and behind images.

The same for the steps of m3 to m6 that are run one by one: `tests/engine_contract/test_copies_to_the_device.py`.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import m6_multimodal_pd
from m6_multimodal_pd import ModelConfig, SamplingParams
from m6_multimodal_pd.model_loader import load_model
from m6_multimodal_pd.overlap import engine_core
from tests.m6_multimodal_pd.engines import MakeEngine, setting
from tests.m6_multimodal_pd.late_launcher import LateLauncher
from tests.m6_multimodal_pd.recorded_graphs import (
    RecordedGraph,
    graphs_of_engines as graphs_of_engines,
    recorded_graphs as recorded_graphs,
    wanted_graphs as wanted_graphs,
)
from tests.m6_multimodal_pd.seeing import asking
from tests.m6_multimodal_pd.test_speculation import make_drafting as make_drafting
from tests.support.engines import EngineMaker
from tests.support.fake_device import FakeDevice, fake_device as fake_device

DRAWN: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 5}
PENALISED: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
KINDS: dict[str, list[dict[str, Any]]] = {"greedy": [{}, {}, {}], "drawn": [DRAWN, {}, DRAWN]}
KINDS["penalised"] = [PENALISED | DRAWN, DRAWN, {}]
TEXTS = [asking(1), asking(2, 3), asking(4, 5, 6)]
SEEN = [asking("a", 1), asking(2, "v"), asking(3)]


def steps_of(engine: Any, asked: list[Any], kind: str) -> Iterator[tuple[dict[str, Any], int]]:
    """The outputs of each step, and a number that rises when the rows of a step are not those of the one before."""
    for number, (conversation, own) in enumerate(zip(asked, KINDS[kind], strict=True)):
        params = SamplingParams(max_tokens=12 - 3 * (number == 1), ignore_eos=True, **own)
        engine.add_request(conversation, params, request_id=f"r{number}")
    rows: Any = None
    turn = 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        running = {rid for rid, output in outputs.items() if not output.finished}
        turn += running != rows
        rows = running
        yield outputs, turn


def tokens_of(engine: Any, asked: list[Any], kind: str) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for outputs, _ in steps_of(engine, asked, kind):
        last |= outputs
    return {rid: output.error or output.token_ids for rid, output in last.items()}


def check(
    make: MakeEngine, device: FakeDevice, expected: dict[str, Any], asked: list[Any], kind: str, **limits: Any
) -> list[int]:
    """The tokens are `expected`; returns the copies of each step whose rows were those of the two steps before."""
    engine: Any = make(**setting(8, **limits))
    last: dict[str, Any] = {}
    turns, copies, before = [0, 0], [], device.num_copies
    for outputs, turn in steps_of(engine, asked, kind):
        last |= outputs
        if turns[-2:] == [turn, turn]:
            copies.append(device.num_copies - before)
        turns.append(turn)
        before = device.num_copies
    assert {rid: output.error or output.token_ids for rid, output in last.items()} == expected
    assert len(copies) >= 3
    return copies


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that computes a step when its result is asked for, so behind the copy of the next one."""
    monkeypatch.setattr(engine_core.OverlapEngineCore, "launcher_class", LateLauncher)
    monkeypatch.setattr(LateLauncher, "on_thread", 0.0)
    monkeypatch.setattr(LateLauncher, "rng", Random(1))


@pytest.mark.parametrize("asked", [TEXTS, SEEN], ids=["texts", "images"])
@pytest.mark.parametrize(("kind", "most"), [("greedy", 1), ("drawn", 1), ("penalised", 3)])
@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlapped"])
def test_a_decode_is_one_copy(
    make_engine: MakeEngine,
    late: None,
    overlap: bool,
    kind: str,
    most: int,
    asked: list[Any],
    request: pytest.FixtureRequest,
) -> None:
    """Penalties count the newest tokens, by one copy more, and overlapped, where only the device has them, by two."""
    expected = tokens_of(make_engine(**setting(8)), asked, kind)
    device: FakeDevice = request.getfixturevalue("fake_device")
    copies = check(make_engine, device, expected, asked, kind, enable_overlap=overlap)
    assert set(copies) == {most if overlap or kind != "penalised" else 2}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["greedy", "drawn"])
@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlapped"])
def test_so_is_one_that_is_replayed(
    seeing_directory: Path,
    late: None,
    graphs_of_engines: list[RecordedGraph],
    overlap: bool,
    kind: str,
    request: pytest.FixtureRequest,
) -> None:
    make = EngineMaker(m6_multimodal_pd, load_model(ModelConfig(model=seeing_directory, device="cpu", dtype="float32")))
    expected = tokens_of(make(**setting(8)), TEXTS, kind)
    device: FakeDevice = request.getfixturevalue("fake_device")
    num_replays = sum(graph.num_replays for graph in graphs_of_engines)
    assert set(check(make, device, expected, TEXTS, kind, enable_overlap=overlap)) == {1}
    assert sum(graph.num_replays for graph in graphs_of_engines) > num_replays + 6


@pytest.mark.parametrize(("kind", "least", "most"), [("greedy", 2, 3), ("drawn", 4, 5)])
@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlapped"])
def test_a_draft_model_has_one_of_its_own_for_all_drafts_of_a_step(
    make_drafting: MakeEngine,
    late: None,
    overlap: bool,
    kind: str,
    least: int,
    most: int,
    request: pytest.FixtureRequest,
) -> None:
    """And one for the forward behind a step whose drafts were all accepted; to accept drawn drafts takes two more."""
    limits: dict[str, Any] = {"method": "draft_model", "drafts": 3}
    limits["enable_overlap"] = overlap
    expected = tokens_of(make_drafting(**setting(8, **limits)), TEXTS, kind)
    device: FakeDevice = request.getfixturevalue("fake_device")
    copies = check(make_drafting, device, expected, TEXTS, kind, **limits)
    assert least <= min(copies) and max(copies) <= most, copies
