"""Paged prefill: many new tokens per sequence, behind what earlier steps left; and steps of both kinds."""

import pytest
import torch

from tests.kernels.references import ATTENTION, PagedBatch, assert_close, paged_batch

pytestmark = pytest.mark.sample(2)

HEADS = [(2, 2, 64), (4, 2, 64), (6, 1, 64), (4, 1, 128), (2, 2, 128)]
FP32 = torch.float32


def attend(backend, batch: PagedBatch) -> torch.Tensor:
    return backend.attention(batch.query, batch.layer, batch.metadata, batch.scale)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_equals_the_reference(backend, device, dtype, heads) -> None:
    batch = paged_batch(heads, prefills=[(0, 5), (13, 20), (30, 2)], dtype=dtype, device=device)
    assert_close(attend(backend, batch), batch.expected, ATTENTION)


@pytest.mark.parametrize("page", [1, 3, 4, 16, 128])
def test_pages_may_have_any_size(backend, device, page) -> None:
    batch = paged_batch((2, 1, 64), prefills=[(0, 40), (100, 9)], dtype=FP32, device=device, page=page)
    assert_close(attend(backend, batch), batch.expected, ATTENTION)


@pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 256])
def test_head_dims_need_not_be_powers_of_two(backend, device, dtype, head_dim) -> None:
    batch = paged_batch((2, 1, head_dim), prefills=[(3, 20)], dtype=dtype, device=device)
    assert_close(attend(backend, batch), batch.expected, ATTENTION)


@pytest.mark.parametrize("context", [0, 1, 31, 32, 33])
@pytest.mark.parametrize("new", [15, 16, 17])
def test_tiles_may_end_anywhere(backend, device, context, new) -> None:
    """Around the edges of the interpreter's tiles, 16 queries by 32 positions; four times that on a GPU, and eight."""
    for factor in (1,) if device.type == "cpu" else (1, 4, 8):
        shape = [(context * factor, new * factor), (context * factor + 1, new * factor + 1)]
        batch = paged_batch((2, 1, 64), prefills=shape, dtype=FP32, device=device)
        assert_close(attend(backend, batch), batch.expected, ATTENTION)


def test_scores_may_be_huge(backend, device) -> None:
    batch = paged_batch((2, 1, 64), prefills=[(60, 20)], dtype=FP32, device=device, sharpness=300.0)
    assert_close(attend(backend, batch), batch.expected, {FP32: 1e-4})


def test_an_empty_row_is_passed_over(backend, device) -> None:
    batch = paged_batch((2, 1, 64), prefills=[(0, 3), (0, 0), (5, 0), (2, 4)], dtype=FP32, device=device)
    assert_close(attend(backend, batch), batch.expected, ATTENTION)


def test_a_sequence_is_the_same_alone_and_in_a_batch(backend, device, dtype) -> None:
    alone = paged_batch((4, 2, 64), prefills=[(9, 21)], dtype=dtype, device=device)
    batch = paged_batch((4, 2, 64), prefills=[(9, 21), (0, 50)], dtype=dtype, device=device)
    assert torch.equal(alone.query, batch.query[:21])
    assert torch.equal(attend(backend, alone), attend(backend, batch)[:21])


def test_prefills_and_decodes_share_a_step(backend, device, dtype) -> None:
    batch = paged_batch((4, 2, 64), prefills=[(0, 7), (18, 3)], decodes=[40, 0, 1], dtype=dtype, device=device, page=4)
    result = attend(backend, batch)
    assert_close(result, batch.expected, ATTENTION)
    assert not result[11].any()
