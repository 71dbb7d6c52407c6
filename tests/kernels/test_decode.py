"""Paged decode: one new token per sequence, its KV split into pieces and joined again."""

import pytest
import torch

from m1_single_request.errors import ConfigError
from tests.kernels.references import ATTENTION, PagedBatch, assert_close, decode_row, paged_batch

pytestmark = pytest.mark.sample(2)

HEADS = [(2, 2, 64), (4, 2, 64), (3, 1, 64), (10, 2, 64), (6, 1, 64), (4, 1, 128), (8, 1, 128), (4, 4, 128)]
FP32 = torch.float32


def attend(backend, batch: PagedBatch) -> torch.Tensor:
    return backend.attention(batch.query, batch.layer, batch.metadata, batch.scale)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_equals_the_reference(backend, device, dtype, heads) -> None:
    batch = paged_batch(heads, decodes=[1, 17, 64, 33], dtype=dtype, device=device)
    assert_close(attend(backend, batch), batch.expected, ATTENTION)


@pytest.mark.parametrize("page", [1, 3, 4, 16, 128])
def test_pages_may_have_any_size(backend, device, page) -> None:
    batch = paged_batch((4, 2, 64), decodes=[5, 40, 129], dtype=FP32, device=device, page=page)
    assert_close(attend(backend, batch), batch.expected, ATTENTION)


@pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 256])
def test_head_dims_need_not_be_powers_of_two(backend, device, dtype, head_dim) -> None:
    batch = paged_batch((2, 1, head_dim), decodes=[7, 40], dtype=dtype, device=device)
    assert_close(attend(backend, batch), batch.expected, ATTENTION)


def test_a_head_dim_that_fills_no_tile_is_refused_by_triton_alone(backend, device) -> None:
    batch = paged_batch((2, 1, 320), decodes=[7, 40], dtype=FP32, device=device)
    if backend.name == "triton":
        with pytest.raises(ConfigError, match="head_dim of at most 256, and this model's is 320"):
            attend(backend, batch)
    else:
        assert_close(attend(backend, batch), batch.expected, ATTENTION)


def test_a_piece_may_be_many_tiles(backend, device, dtype) -> None:
    length = 299 if device.type == "cpu" else 9001
    batch = paged_batch((2, 1, 64), decodes=[length], dtype=dtype, device=device)
    assert_close(attend(backend, batch), batch.expected, ATTENTION)


def test_scores_may_be_huge(backend, device) -> None:
    """The running maximum keeps exp2 in range, and what was summed under an older one shrinks away."""
    batch = paged_batch((2, 1, 64), decodes=[130], dtype=FP32, device=device, sharpness=300.0)
    assert_close(attend(backend, batch), batch.expected, {FP32: 1e-4})


def test_padding_rows_become_zeros_and_change_nothing(backend, device, dtype) -> None:
    """Rows of length 0 fill the batch of a CUDA graph. Their queries are NaN and their tables point nowhere."""
    padded = paged_batch((4, 2, 64), decodes=[1, 50, 19, 0, 0], dtype=dtype, device=device)
    unpadded = paged_batch((4, 2, 64), decodes=[1, 50, 19], dtype=dtype, device=device)
    result = attend(backend, padded)
    assert torch.equal(result[:3], attend(backend, unpadded))
    assert torch.equal(result[3:], torch.zeros_like(result[3:]))


def test_a_row_is_the_same_alone_and_in_a_batch(backend, device, dtype) -> None:
    batch = paged_batch((4, 2, 64), decodes=[100, 3, 33], dtype=dtype, device=device)
    together = attend(backend, batch)
    for row in range(3):
        assert torch.equal(attend(backend, decode_row(batch, row))[0], together[row])


def test_nothing_is_done_for_no_rows(backend, device) -> None:
    batch = paged_batch((4, 2, 64), dtype=FP32, device=device)
    assert attend(backend, batch).shape == (0, 4, 64)
