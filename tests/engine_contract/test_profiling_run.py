"""The run that measures memory samples as well: a token behind every row that a step can have, with every setting."""

import gc
import importlib
from dataclasses import fields
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from m1_single_request.sampler import Sampler
from m1_single_request.sampling_metadata import SamplingMetadata
from tests.events.milestones import MILESTONES
from tests.support.engines import Recorder

SEATS, DRAFTS = 4, 2


class Noting(Sampler):
    """The sampler, which notes its rows, and the shapes of all tensors that somebody holds when it is called."""

    calls: ClassVar[list[tuple[tuple[int, ...], SamplingMetadata, list[tuple[int, ...]]]]] = []

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> Any:
        shapes = [tuple(value.shape) for value in gc.get_objects() if type(value) is Tensor]
        self.calls.append((tuple(logits.shape), metadata, shapes))
        return super().__call__(logits, metadata)


@pytest.fixture(autouse=True)
def device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would say of a device of 2 GiB, half of which is free."""
    answers: dict[str, Any] = {
        "reset_peak_memory_stats": None,
        "synchronize": None,
        "mem_get_info": (2**30, 2**31),
        "memory_reserved": 2**29,
        "max_memory_allocated": 2**28,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer)
    monkeypatch.setattr(Noting, "calls", [])


def profiled(milestone: str, **limits: Any) -> int:
    """Measure the memory of a step; return the size of the vocabulary."""
    package = importlib.import_module(milestone)
    with package.LLMEngine(
        model_config=package.ModelConfig(device="cpu", dtype="float32"),
        scheduler_config=package.SchedulerConfig(max_num_seqs=SEATS),
        parts={"sampler": Noting},
        **limits,
    ) as engine:
        recorder = Recorder(engine.tracer)
        worker = engine.engine_core.executor.worker
        profile = worker.measure_memory(64)
        assert (profile.total_bytes, profile.other_bytes) == (2**31, 2**29) and 0 < profile.peak_bytes < 2**28
        assert not recorder.events("sampled"), "a dummy token is no event"
        return int(worker.model_runner.model.config.vocab_size)


@pytest.mark.parametrize("milestone", MILESTONES[2:])
def test_a_full_batch_is_sampled_with_every_setting(milestone: str) -> None:
    vocab_size = profiled(milestone)
    [(shape, metadata, _)] = Noting.calls
    assert shape == (SEATS, vocab_size)
    for field in fields(SamplingMetadata):
        value = getattr(metadata, field.name)
        assert value is not None, f"no row uses {field.name}"
        for each in value if isinstance(value, tuple) and isinstance(value[0], Tensor) else [value]:
            assert isinstance(each, bool) or len(each) == SEATS
    assert not metadata.all_greedy


@pytest.mark.parametrize("milestone", MILESTONES[4:])
def test_a_row_is_sampled_behind_each_draft(milestone: str) -> None:
    package = importlib.import_module(milestone)
    ngram = package.SpeculativeConfig(method="ngram", num_speculative_tokens=DRAFTS)
    vocab_size = profiled(milestone, speculative_config=ngram)
    [(shape, _, _)] = Noting.calls
    assert shape == (SEATS * (1 + DRAFTS), vocab_size)


@pytest.mark.parametrize("milestone", MILESTONES[4:5])
def test_what_the_drafts_were_drawn_from_is_held_beside_it(milestone: str) -> None:
    package = importlib.import_module(milestone)
    drawn = package.SpeculativeConfig(method="draft_model", num_speculative_tokens=DRAFTS)
    vocab_size = profiled(milestone, speculative_config=drawn)
    [(_, _, shapes)] = Noting.calls
    assert (SEATS * DRAFTS, vocab_size) in shapes, "the distributions"
    assert (SEATS, vocab_size, 4 + 1 + 4) in shapes, "bias and history of the requests"
