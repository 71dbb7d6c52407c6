"""A decode step sends all that it needs to the device by one copy, and computes there what it computes on a CPU.

The device is a fake one (`tests/support/fake_device.py`), or a GPU, whose copies torch's profiler counts. m6's own
steps: `tests/m6_multimodal_pd`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from m1_single_request import SamplingParams
from tests.engine_contract.crowd import MakeEngine
from tests.engine_contract.variants import M3, M4_RADIX, M5_GUESSING, M5_MIXED, M6, Variant, each_of
from tests.support.fake_device import FakeDevice, fake_device as fake_device
from tests.support.profiled import step_with_copies

variant = each_of([M3, M4_RADIX, M5_MIXED, M5_GUESSING, M6])

PROMPTS = {"a": [31, 32, 33], "b": [41, 42, 43, 44, 45], "c": [51]}
NUM_TOKENS = {"a": 9, "b": 9, "c": 5}
DRAWN: Mapping[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 3}
PENALISED: Mapping[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {7: 2.0}}
KINDS: dict[str, list[Mapping[str, Any]]] = {
    "greedy": [{}, {}, {}],
    "drawn": [DRAWN, {}, DRAWN],
    "penalised": [{**PENALISED, **DRAWN}, DRAWN, {}],
}


Step = Callable[[Any], tuple[dict[str, Any], int]]
"""Runs a step of an engine; returns its outputs, and how many copies it has made."""


def on_cpu(engine: Any) -> tuple[dict[str, Any], int]:
    """A step without copies."""
    return engine.step(), 0


def serve(engine: Any, kind: str, step: Step = on_cpu) -> tuple[dict[str, Any], list[int]]:
    """The outputs, and how many copies each step needed that the same requests ran as in the step before it."""
    for (rid, prompt), own in zip(PROMPTS.items(), KINDS[kind], strict=True):
        params = SamplingParams(max_tokens=NUM_TOKENS[rid], ignore_eos=True, **own)
        engine.add_request(prompt, params, request_id=rid)
    last: dict[str, Any] = {}
    copies, before = [], None
    while engine.has_unfinished_requests():
        outputs, num_copies = step(engine)
        last |= outputs
        if before == outputs.keys():
            copies.append(num_copies)
        before = None if any(output.finished for output in outputs.values()) else outputs.keys()
    return last, copies


def check_tokens(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """All requests have ended with the same tokens."""
    assert found.keys() == expected.keys()
    for rid, output in found.items():
        assert (output.error, output.token_ids) == (None, expected[rid].token_ids)


DRAFTING = (M5_GUESSING, M6)


def most_copies(variant: Variant, kind: str) -> int:
    """How many copies a decode step may need: one, and more only for what is named here."""
    if kind == "greedy" or variant is M3:  # m3 sends all parameters, and the history of penalties, in every step
        return 1
    if kind == "drawn":  # with drafts, rows change in every step: the parameters of rows of one token come later
        return 2 if variant in DRAFTING else 1
    return 3 if variant in DRAFTING else 2  # tokens to count for penalties, and history behind drafts


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_is_one_copy_and_its_tokens_are_those_of_a_cpu(
    variant: Variant, make_engine: MakeEngine, kind: str, request: pytest.FixtureRequest
) -> None:
    expected, _ = serve(make_engine(seats=4), kind)
    device: FakeDevice = request.getfixturevalue("fake_device")

    def step(engine: Any) -> tuple[dict[str, Any], int]:
        before = device.num_copies
        return engine.step(), device.num_copies - before

    found, copies = serve(make_engine(seats=4), kind, step)
    check_tokens(found, expected)
    assert len(copies) > 3 and max(copies) == most_copies(variant, kind), copies
    assert kind != "drawn" or copies.count(1) >= len(copies) - 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["greedy", "drawn"])
def test_so_it_is_on_a_gpu(variant: Variant, make_engine: MakeEngine, tiny_directory: Path, kind: str) -> None:
    expected, _ = serve(make_engine(seats=4), kind)
    config = variant.package.ModelConfig(model=tiny_directory, device="cuda", dtype="float32")
    limits = variant.limits(4, None, None)
    with variant.package.LLMEngine(model_config=config, parts=variant.parts(), **limits) as engine:
        found, copies = serve(engine, kind, step_with_copies)
    check_tokens(found, expected)
    assert len(copies) > 3 and max(copies) <= most_copies(variant, kind), copies
    assert copies.count(1) >= len(copies) - 1
