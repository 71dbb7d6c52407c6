"""Paged attention: prefills behind the KV of earlier steps, decodes with their KV split into pieces, and both."""

import pytest
import torch

from m1_single_request.errors import ConfigError
from tests.kernels.references import attend, check_attention, decode_row, paged_batch

HEADS = [(2, 2, 64), (4, 2, 64), (3, 1, 64), (10, 2, 64), (6, 1, 64), (4, 1, 128), (8, 1, 128), (4, 4, 128)]
FP32 = torch.float32
STEPS = {
    "decodes": {"decodes": [1, 17, 64, 33]},
    "prefills": {"prefills": [(0, 5), (13, 20), (30, 2)]},
    "both": {"prefills": [(0, 7), (18, 3)], "decodes": [40, 0, 1]},
}


@pytest.fixture(params=STEPS)
def rows(request: pytest.FixtureRequest) -> dict:
    """The prefills and decodes of a step."""
    return STEPS[request.param]


def check_same(backend, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit; torch sums in another order beside other rows."""
    if backend.name == "torch":
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_equals_the_reference(backend, device, dtype, heads, rows) -> None:
    check_attention(backend, paged_batch(heads, **rows, dtype=dtype, device=device))


@pytest.mark.parametrize("page", [1, 3, 4, 16, 128])
def test_pages_may_have_any_size(backend, device, page) -> None:
    rows = {"prefills": [(0, 40), (100, 9)], "decodes": [5, 40, 129]}
    check_attention(backend, paged_batch((4, 2, 64), **rows, dtype=FP32, device=device, page=page))


@pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 256])
def test_head_dims_need_not_be_powers_of_two(backend, device, dtype, head_dim) -> None:
    rows = {"prefills": [(3, 20)], "decodes": [7, 40]}
    check_attention(backend, paged_batch((2, 1, head_dim), **rows, dtype=dtype, device=device))


def test_a_head_dim_that_fills_no_tile_is_refused_by_triton_alone(backend, device) -> None:
    batch = paged_batch((2, 1, 320), decodes=[7, 40], dtype=FP32, device=device)
    if backend.name == "triton":
        with pytest.raises(ConfigError, match="head_dim of at most 256, and this model's is 320"):
            attend(backend, batch)
    else:
        check_attention(backend, batch)


@pytest.mark.parametrize("context", [0, 1, 31, 32, 33])
@pytest.mark.parametrize("new", [15, 16, 17])
def test_tiles_may_end_anywhere(backend, device, context, new) -> None:
    """Around the edges of the interpreter's tiles, 16 queries by 32 positions; four times that on a GPU, and eight."""
    for factor in (1,) if device.type == "cpu" else (1, 4, 8):
        shape = [(context * factor, new * factor), (context * factor + 1, new * factor + 1)]
        check_attention(backend, paged_batch((2, 1, 64), prefills=shape, dtype=FP32, device=device))


def test_a_piece_may_be_many_tiles(backend, device, dtype) -> None:
    length = 299 if device.type == "cpu" else 9001
    check_attention(backend, paged_batch((2, 1, 64), decodes=[length], dtype=dtype, device=device))


@pytest.mark.parametrize("rows", [{"decodes": [130]}, {"prefills": [(60, 20)]}], ids=str)
def test_scores_may_be_huge(backend, device, rows) -> None:
    """The running maximum keeps exp2 in range, and what was summed under an older one shrinks away."""
    batch = paged_batch((2, 1, 64), **rows, dtype=FP32, device=device, sharpness=300.0)
    check_attention(backend, batch, {FP32: 1e-4})


def test_padding_rows_become_zeros_and_change_nothing(backend, device, dtype) -> None:
    """Rows of length 0 fill the batch of a CUDA graph. Their queries are NaN and their tables point nowhere."""
    padded = paged_batch((4, 2, 64), decodes=[1, 50, 19, 0, 0], dtype=dtype, device=device)
    result = check_attention(backend, padded)
    unpadded = paged_batch((4, 2, 64), decodes=[1, 50, 19], dtype=dtype, device=device)
    check_same(backend, result[:3], attend(backend, unpadded))
    assert not result[3:].any()
    assert not attend(backend, paged_batch((4, 2, 64), decodes=[0, 0], dtype=dtype, device=device)).any()


def test_an_empty_prefill_is_passed_over(backend, device) -> None:
    rows = {"prefills": [(0, 3), (0, 0), (5, 0), (2, 4)]}
    check_attention(backend, paged_batch((2, 1, 64), **rows, dtype=FP32, device=device))


def test_a_row_is_the_same_alone_and_in_a_batch(backend, device, dtype) -> None:
    batch = paged_batch((4, 2, 64), decodes=[100, 3, 33], dtype=dtype, device=device)
    together = attend(backend, batch)
    for row in range(3):
        check_same(backend, attend(backend, decode_row(batch, row))[0], together[row])
    alone = paged_batch((4, 2, 64), prefills=[(9, 21)], dtype=dtype, device=device)
    batch = paged_batch((4, 2, 64), prefills=[(9, 21), (0, 50)], dtype=dtype, device=device)
    assert torch.equal(alone.query, batch.query[:21])
    check_same(backend, attend(backend, alone), attend(backend, batch)[:21])


def test_nothing_is_done_for_no_rows(backend, device) -> None:
    batch = paged_batch((4, 2, 64), dtype=FP32, device=device)
    assert attend(backend, batch).shape == (0, 4, 64)
