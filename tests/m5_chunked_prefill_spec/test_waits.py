"""On a GPU a step waits once, at its end: whatever the host reads, it reads when all has been launched.

Tensors on a CPU stand for those of a GPU. They note every operation on them, and what makes the host wait.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from m1_single_request import Tracer
from m1_single_request.sampler import Sampler
from m3_paged_attention.row_sampler import RowSampler
from m5_chunked_prefill_spec.speculative.spec_info import Drafts
from tests.m5_chunked_prefill_spec.guesses import VOCAB, info_of, make_sampler, row_of

READS = ("tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__float__", "__int__", "__index__")
KNOWN_ON_THE_HOST = ("__get__", "__len__", "size", "dim", "numel")
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}, {}, {}],
    "drawn": [{"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.7, "top_k": 2}, {"temperature": 1.0, "min_p": 0.1}],
    "mixed": [{}, {"temperature": 1.0}, {"repetition_penalty": 1.5, "frequency_penalty": 0.5}],
    "logprobs of all": [{"logprobs": 2}, {"logprobs": 0}, {"logprobs": 1, "temperature": 1.0}],
    "logprobs of some": [{}, {"logprobs": 2}, {}],
    "bias": [{"logit_bias": {2: 5.0}}, {}, {"min_tokens": 3}],
}


class OnDevice(Tensor):
    """A tensor that notes what is done with it, and with whatever is computed from it."""

    log: ClassVar[list[str]] = []
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in KNOWN_ON_THE_HOST:
            cls.log.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done, in order. The `argmax` is that of a GPU."""
    monkeypatch.setattr("m1_single_request.sampler.best_tokens", lambda logits: logits.argmax(-1))
    monkeypatch.setattr(OnDevice, "log", [])
    return OnDevice.log


def logits_of(num_rows: int, broken: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits, and the same on the device."""
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[list(broken)] = torch.nan
    return logits, logits.clone().as_subclass(OnDevice)


def check_one_wait(log: list[str]) -> None:
    """Nothing is launched behind the first read."""
    first = next(number for number, name in enumerate(log) if name in READS)
    assert first > 3 and all(name in READS for name in log[first:]), log


@pytest.mark.parametrize("broken", [(), (1,)], ids=["sound", "one broken"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_each(kind: str, broken: Sequence[int], log: list[str]) -> None:
    info = info_of(*(row_of(seed, **own) for seed, own in enumerate(KINDS[kind])), stop_ids=[3])
    sampler = RowSampler(sampler=Sampler(), token_text=str, tracer=Tracer())
    logits, on_device = logits_of(3, broken)
    found = sampler(["a", "b", "c"], info, on_device, info.metadata())
    check_one_wait(log)
    expected = sampler(["a", "b", "c"], info, logits, info.metadata())
    assert replace(found, errors={}) == replace(expected, errors={})
    assert list(map(str, found.errors)) == list(map(str, expected.errors))
    assert list(found.errors) == ["abc"[i] for i in broken]


@pytest.mark.parametrize("broken", [(), (2,)], ids=["sound", "one broken"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_behind_drafts(kind: str, broken: Sequence[int], log: list[str]) -> None:
    info = info_of(*(row_of(seed, **own) for seed, own in enumerate(KINDS[kind])), stop_ids=[3])
    logits, on_device = logits_of(6, broken)
    rids, lens, drafts = ["a", "b", "c"], [2, 1, 3], Drafts([[1], [], [0, 2]], None)
    found = make_sampler()(rids, info, on_device, lens, drafts)
    check_one_wait(log)
    expected = make_sampler()(rids, info, logits, lens, drafts)
    assert replace(found, errors={}) == replace(expected, errors={})
    assert list(found.errors) == list(expected.errors) == ["b"] * len(broken)
