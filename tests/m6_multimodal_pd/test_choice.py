"""Tokens that the device chooses: to queue the choice asks for no value, and what is read is what the sampler gives.

Tensors on a CPU stand for those of a GPU (`tests/m5_chunked_prefill_spec/test_waits.py`). The same choice in C++, on
the thread of the native backend, is held to NumPy.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from m1_single_request import Tracer
from m1_single_request.sampler import Sampler
from m3_paged_attention.attention import native_library
from m3_paged_attention.attention.native_backend import NativeBackend
from m3_paged_attention.attention.native_step import CLinear, CStep
from m3_paged_attention.row_sampler import RowSampler
from m6_multimodal_pd.overlap.choice import Choice
from m6_multimodal_pd.overlap.future_map import FutureMap
from m6_multimodal_pd.overlap.whole_step import CWholeStep
from tests.m5_chunked_prefill_spec.guesses import VOCAB, info_of, row_of
from tests.m5_chunked_prefill_spec.test_waits import KINDS, READS, OnDevice, log as log, logits_of

RIDS = ["a", "b", "c"]


def info_of_kind(kind: str) -> Any:
    return info_of(*(row_of(seed, **own) for seed, own in enumerate(KINDS[kind])), stop_ids=[3])


@pytest.mark.parametrize("broken", [(), (1,)], ids=["sound", "one broken"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_is_queued_without_a_wait_and_is_that_of_the_sampler(
    kind: str, broken: Sequence[int], log: list[str]
) -> None:
    logits, on_device = logits_of(3, broken)
    sampler = RowSampler(sampler=Sampler(), token_text=str, tracer=Tracer())
    info = info_of_kind(kind)
    metadata = info.metadata()
    choice, tokens = Choice.queued(sampler.sampler, on_device, metadata)
    assert log and not set(log) & set(READS), log
    found, expected = choice.read(sampler, RIDS, info), sampler(RIDS, info, logits, metadata)
    assert replace(found, errors={}) == replace(expected, errors={})
    assert list(map(str, found.errors)) == list(map(str, expected.errors))
    assert list(found.errors) == ["abc"[i] for i in broken]
    assert [[token] for i, token in enumerate(tokens.tolist()) if i not in broken] == found.sampled_token_ids


def test_a_token_that_is_impossible_is_an_input_nevertheless() -> None:
    """Its request has an error, but the step behind it runs."""
    info = info_of(row_of(min_tokens=3), row_of(1), stop_ids=range(VOCAB))
    choice, tokens = Choice.queued(Sampler(), torch.zeros(2, VOCAB), info.metadata())
    assert tokens.tolist()[0] in range(VOCAB)
    sampler = RowSampler(sampler=Sampler(), token_text=str, tracer=Tracer())
    assert choice.read(sampler, ["a", "b"], info).errors.keys() == {"a"}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_counted_that_only_the_device_knows(kind: str, log: list[str]) -> None:
    """Also if only some rows have one. No tensor of theirs is read."""
    infos = [info_of_kind(kind) for _ in range(2)]
    for counts in ([1, 1, 1], [0, 1, 1], [1, 0, 0], [1, 1, 1]):
        tokens = torch.tensor([2, 0, 1])[torch.tensor(counts) == 1]
        log.clear()
        infos[0].advance(tokens.as_subclass(OnDevice), np.array(counts))
        assert not set(log) & set(READS), log
        infos[1].advance(tokens.tolist(), np.array(counts))
        assert infos[0].positions.tolist() == infos[1].positions.tolist()
        for name in ("bias", "seen", "output_counts"):
            ours, theirs = (getattr(info, name) for info in infos)
            assert (ours is None) == (theirs is None) and (ours is None or torch.equal(ours, theirs)), name


def test_the_host_resolves_what_it_knows_and_the_device_the_rest() -> None:
    futures = FutureMap(6, torch.device("cpu"))
    futures.store(np.array([1, 4]), np.array([11, 44]))
    futures.on_device[:] = torch.tensor([90, 91, 92, 93, 94, 95])
    ids = np.array([7, *FutureMap.placeholders(np.array([4, 1, 5]))])
    assert futures.resolve(ids, None).tolist() == [7, 44, 11, 0]
    known = futures.resolve(ids, np.array([4, 5]))
    assert known.tolist() == [7, -5, 11, -6] and ids.tolist() == [7, -5, -2, -6]
    on_device = torch.from_numpy(known)
    futures.resolve_on_device(on_device)
    assert on_device.tolist() == [7, 94, 11, 95]


# --- in C++ -----------------------------------------------------------------------------------------------------------

WIDTH = 16


def step_without_layers(logits: Tensor, bias: Tensor, ids: list[int], newest: list[int]) -> tuple[list[int], list[int]]:
    """Run a step in C++ in which token `i` has the logits `logits[i]` `[vocab]` and `bias`. Returns the tokens that are
    chosen, and the newest ones after it: the row of the i-th token is `len(newest) - 1 - i`."""
    dtype, count = logits.dtype, len(ids)
    name = str(dtype).removeprefix("torch.")
    embedding = torch.eye(WIDTH, dtype=dtype)  # the norm makes 4 of 1
    head: Any = NativeBackend().linear((logits / 4).T.contiguous(), bias)
    kept = [torch.zeros(count * WIDTH * 8, dtype=dtype), torch.ones(WIDTH, dtype=dtype), torch.zeros(count, WIDTH)]
    work, norm, angles = kept
    input_ids, positions = torch.tensor(ids), torch.zeros(count, dtype=torch.int64)
    of_rows, tokens = torch.tensor(newest), torch.zeros(count, dtype=torch.int64)
    rows = torch.tensor([len(newest) - 1 - i for i in range(count)])
    output, chosen = torch.zeros(count, WIDTH, dtype=dtype), torch.zeros(count, head.out_features, dtype=dtype)
    whole = CWholeStep(
        step=CStep(
            hidden_size=WIDTH,
            embedding=embedding.data_ptr(),
            norm=norm.data_ptr(),
            cos=angles.data_ptr(),
            sin=angles.data_ptr(),
            num_tokens=count,
            threads=2,
            input_ids=input_ids.data_ptr(),
            positions=positions.data_ptr(),
            output=output.data_ptr(),
            work=work.data_ptr(),
            angles=angles.data_ptr(),
            layer=-1,
        ),
        input_ids=input_ids.data_ptr(),
        newest=of_rows.data_ptr(),
        head=CLinear(head.packed.data_ptr(), head.bias.data_ptr()),
        vocab_size=head.out_features,
        rows=rows.data_ptr(),
        tokens=tokens.data_ptr(),
        logits=chosen.data_ptr(),
    )
    getattr(native_library.load(), f"run_step_{name}")(ctypes.addressof(whole))
    return tokens.tolist(), of_rows.tolist()


native = pytest.mark.skipif(native_library.obstacle() is not None, reason=str(native_library.obstacle()))
PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@native
@PRECISIONS
@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 1000])
def test_in_cpp_the_best_token_is_that_of_numpy(size: int, dtype: torch.dtype) -> None:
    """The first of equal ones, wherever it is; placeholders have the newest tokens, and these are replaced."""
    generator = torch.Generator().manual_seed(size)
    for _ in range(10):
        logits = torch.randint(-3, 4, (WIDTH, size), generator=generator).to(dtype)
        best = logits.float().numpy().argmax(axis=-1).tolist()
        ids = [3, -1, 9, -3, -1]
        tokens, newest = step_without_layers(logits, torch.zeros(size, dtype=dtype), ids, [5, 0, 7, 0, 0])
        assert tokens == [best[i] for i in (3, 5, 9, 7, 5)]
        assert newest == tokens[::-1]


@native
@PRECISIONS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_in_cpp_logits_that_are_not_finite_give_no_token(value: float, dtype: torch.dtype) -> None:
    """And an input that is valid, for the step behind it."""
    for size in (1, 16, 40):
        for place in {0, size // 2, size - 1}:
            bias = torch.zeros(size, dtype=dtype)
            bias[place] = value
            found = step_without_layers(torch.zeros(WIDTH, size, dtype=dtype), bias, [0, 1], [2, 2, 2])
            assert found == ([-1, -1], [2, 0, 0]), (size, place)
