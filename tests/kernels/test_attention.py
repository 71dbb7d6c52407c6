"""Paged attention: prefills behind the KV of earlier steps, few new tokens with their KV split, and both."""

import pytest
import torch

from m1_single_request.errors import ConfigError
from tests.kernels.conftest import TRITON_KINDS
from tests.kernels.references import attend, check_attention, decode_row, paged_batch

HEADS = [(2, 2, 64), (4, 2, 64), (3, 1, 64), (10, 2, 64), (6, 1, 64), (4, 1, 128), (8, 1, 128), (4, 4, 128)]
FP32 = torch.float32
of_triton = pytest.mark.parametrize("kind", TRITON_KINDS, indirect=True)
"""Other backends compute everything in one kernel."""
STEPS = {
    "decodes": {"decodes": [1, 17, 64, 33]},
    "prefills": {"prefills": [(0, 5), (13, 20), (30, 2)]},
    "both": {"prefills": [(0, 7), (18, 3)], "decodes": [40, 0, 1]},
    "drafts": {"prefills": [(60, 5), (100, 16), (3, 2), (40, 1), (0, 0)]},
    "all": {"prefills": [(64, 3), (30, 17), (0, 21)], "decodes": [70]},
}


@pytest.fixture(params=STEPS)
def rows(request: pytest.FixtureRequest) -> dict:
    """The prefills and decodes of a step."""
    return STEPS[request.param]


def check_same(backend, found: torch.Tensor, expected: torch.Tensor, *, same_bucket: bool = True) -> None:
    """Bit for bit. Torch sums in another order beside other rows, and a GPU where the bucket is another one."""
    if backend.name == "torch" or (found.is_cuda and not same_bucket):
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
    padded = paged_batch((4, 2, 64), decodes=[1, 50, 19, 0], dtype=dtype, device=device)
    result = check_attention(backend, padded)
    unpadded = paged_batch((4, 2, 64), decodes=[1, 50, 19], dtype=dtype, device=device)
    check_same(backend, result[:3], attend(backend, unpadded))
    assert not result[3:].any()
    assert not attend(backend, paged_batch((4, 2, 64), decodes=[0, 0], dtype=dtype, device=device)).any()


def test_a_row_is_the_same_alone_and_in_a_batch(backend, device, dtype) -> None:
    batch = paged_batch((4, 2, 64), decodes=[100, 3, 33], dtype=dtype, device=device)
    together = attend(backend, batch)
    for row in range(3):
        check_same(backend, attend(backend, decode_row(batch, row))[0], together[row], same_bucket=False)
    beside_others = paged_batch((4, 2, 64), decodes=[100, 3, 70, 9], dtype=dtype, device=device)  # the same bucket
    check_same(backend, attend(backend, beside_others)[:2], together[:2])
    alone = paged_batch((4, 2, 64), prefills=[(9, 21)], dtype=dtype, device=device)
    batch = paged_batch((4, 2, 64), prefills=[(9, 21), (0, 50)], dtype=dtype, device=device)
    assert torch.equal(alone.query, batch.query[:21])
    check_same(backend, attend(backend, alone), attend(backend, batch)[:21])


@pytest.mark.exhaustive
def test_few_new_tokens_are_the_same_alone_and_in_a_batch(backend, device, dtype) -> None:
    """Beside a long row, which another kernel computes, and whatever the others' numbers of new tokens are."""
    alone = paged_batch((6, 1, 64), prefills=[(61, 4)], dtype=dtype, device=device)
    expected = attend(backend, alone)
    for others in ([(9, 16), (0, 20)], [(0, 40)]):
        batch = paged_batch((6, 1, 64), prefills=[(61, 4), *others], dtype=dtype, device=device)
        check_same(backend, attend(backend, batch)[:4], expected, same_bucket=False)
    batches = [paged_batch((6, 1, 64), prefills=[(61, 4), (n, 2)], dtype=dtype, device=device) for n in (5, 90)]
    one, other = (attend(backend, batch)[:4] for batch in batches)  # two rows of up to four tokens: one bucket
    check_same(backend, one, other)


@pytest.mark.parametrize("context", [0, 14, 15, 31, 47, 62, 63])
def test_a_split_may_begin_behind_some_of_the_new_tokens(backend, device, context) -> None:
    """They have no position in it: nothing may be divided by nothing."""
    check_attention(backend, paged_batch((2, 1, 64), prefills=[(context, 5)], dtype=FP32, device=device))


@pytest.mark.parametrize("group", [1, 3, 5, 16, 20])
def test_the_new_tokens_may_need_several_tiles(backend, device, group) -> None:
    check_attention(backend, paged_batch((group, 1, 64), prefills=[(30, 16)], dtype=FP32, device=device))


@of_triton
def test_drafts_are_split_and_prompts_are_not(backend, device, monkeypatch) -> None:
    """The host chooses the kernels by numbers of new tokens."""
    from m3_paged_attention.attention import triton_backend

    launched = []
    for name in ("paged_decode_kernel", "paged_prefill_kernel"):
        kernel = getattr(triton_backend, name)

        class Noted:
            def __getitem__(self, grid, kernel=kernel, name=name):
                launched.append(name)
                return kernel[grid]

        monkeypatch.setattr(triton_backend, name, Noted())
    for rows, kernels in (
        ({"prefills": [(40, 16), (3, 2)]}, ["paged_decode_kernel"]),
        ({"prefills": [(40, 17)]}, ["paged_prefill_kernel"]),
        ({"prefills": [(40, 17), (3, 2)]}, ["paged_prefill_kernel", "paged_decode_kernel"]),
        ({"decodes": [9]}, ["paged_decode_kernel"]),
    ):
        launched.clear()
        check_attention(backend, paged_batch((2, 1, 64), **rows, dtype=FP32, device=device))
        assert launched == kernels


@of_triton
def test_the_prefill_kernel_passes_few_new_tokens_over(backend, device, monkeypatch) -> None:
    """What no kernel has written is NaN here."""
    from m3_paged_attention.attention import triton_backend

    class Nothing:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: None

    batch = paged_batch((2, 1, 64), prefills=[(40, 17), (3, 2)], dtype=FP32, device=device)
    for name in ("paged_decode_kernel", "join_splits_kernel"):
        monkeypatch.setattr(triton_backend, name, Nothing())
    result = attend(backend, batch)
    assert result[:17].isfinite().all() and result[17:].isnan().all()


@pytest.mark.interpreter
def test_the_number_of_splits_follows_from_the_bucket_and_the_device() -> None:
    pytest.importorskip("triton")
    from m3_paged_attention.attention.triton_tiles import MOST_SPLITS, num_splits

    assert [num_splits(rows, 8, 132) for rows in (1, 2, 4, 8, 16, 64, 256, 512)] == [32, 32, 32, 16, 8, 2, 1, 1]
    assert num_splits(1, 8, 16) == 8 and num_splits(1, 1, 4) == 16
    assert {num_splits(rows, heads, 0) for rows in (1, 7, 300) for heads in (1, 8)} == {4}, "in the interpreter"
    for rows in range(1, 600):
        splits = num_splits(rows, 8, 132)
        assert splits == num_splits(1 << (rows - 1).bit_length(), 8, 132), "a power of two of rows is one bucket"
        assert 1 <= splits <= MOST_SPLITS and splits & (splits - 1) == 0
        assert rows * 8 * splits >= 132 / 2, "half of the GPU is full at least"
