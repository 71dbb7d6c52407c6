"""The tensors of a step go to the device together, by one copy, and are there what they were on the host."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from m3_paged_attention.attention.host_to_device import ALIGNMENT, to_device
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.model_input import ModelInput
from tests.support.fake_device import DEVICE, FakeDevice, OnDevice, fake_device as fake_device

CPU = torch.device("cpu")
DTYPES = [torch.int64, torch.int32, torch.float32, torch.float64, torch.bool, torch.uint8]


@dataclass(frozen=True)
class Batch:
    """Tensors among other values."""

    first: Tensor
    none: Tensor | None
    lens: tuple[int, ...]
    more: tuple[Any, ...]
    array: np.ndarray


tensors = st.builds(
    lambda dtype, shape, turned: torch.arange(int(np.prod(shape))).to(dtype).reshape(shape).mT[: None if turned else 1],
    st.sampled_from(DTYPES),
    st.tuples(st.integers(0, 5), st.integers(0, 7)),
    st.booleans(),
) | st.builds(lambda size: torch.arange(size), st.integers(0, 9))
several = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@several
@given(tensors, st.lists(tensors))
def test_one_copy_moves_all_tensors_of_a_batch_and_nothing_else(
    fake_device: FakeDevice, first: Tensor, more: list[Tensor]
) -> None:
    """Of any type and shape, empty ones and transposed ones too. They are aligned for kernels."""
    expected = [tensor.clone() for tensor in (first, *more)]
    there = torch.arange(4).as_subclass(OnDevice)
    batch = Batch(first, None, (3, 4), ((first, "text"), there, *more), np.arange(3))
    before = fake_device.num_copies
    moved = to_device(batch, DEVICE)
    assert fake_device.num_copies == before + 1
    assert moved.none is None and moved.lens == (3, 4) and moved.more[0][1] == "text" and moved.array is batch.array
    assert moved.more[1] is there, "what is on the device already stays where it is"
    found = [moved.first, *moved.more[2:]]
    for tensor, wanted in zip(found, expected, strict=True):
        assert isinstance(tensor, OnDevice) and tensor.is_contiguous()
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape)
        assert tensor.storage_offset() * tensor.itemsize % ALIGNMENT == 0
        assert torch.equal(tensor, wanted)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found if tensor.numel()}) <= 1
    for tensor, wanted in zip((first, *more), expected, strict=True):
        assert torch.equal(tensor, wanted), "those on the host are not changed"


def test_what_changes_on_the_host_afterwards_does_not_arrive(fake_device: FakeDevice) -> None:
    array = np.arange(5)
    moved = to_device(torch.from_numpy(array), DEVICE)
    array[:] = 7
    assert moved.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("batch", [torch.arange(3), (torch.arange(3), ()), ModelInput])
def test_on_a_cpu_a_batch_is_what_it_was(batch: Any) -> None:
    if batch is ModelInput:
        layout = AttentionMetadata.build([1], [0], np.zeros((1, 1), np.int32), np.zeros(1, np.int64))
        batch = ModelInput(torch.arange(1), torch.arange(1), layout, None)
    assert to_device(batch, CPU) is batch
