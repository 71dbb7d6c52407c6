"""A packed weight computes what the weight computes, and is made only where it pays."""

import pytest
import torch
from torch.nn import functional

from m2_continuous_batching.packed_linear import can_pack
from m3_paged_attention.attention.torch_backend import TorchBackend
from m3_paged_attention.linear import MIN_WEIGHTS, PackedLinear, PlainLinear, pack

CPU = torch.device("cpu")
PACKABLE = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if can_pack(dtype, CPU)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}

needs_onednn = pytest.mark.skipif(not PACKABLE, reason="this build of torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_every_number_of_rows_equals_float64(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(1)
    weight = torch.randn(520, 300).to(dtype)
    offset = torch.randn(520).to(dtype) if bias else None
    packed = pack(weight, offset)
    assert packed is not None
    for rows in (1, 2, 16, 64, 129):
        hidden = torch.randn(rows, 300).to(dtype)
        expected = functional.linear(hidden.double(), weight.double(), None if offset is None else offset.double())
        actual = packed(hidden)
        assert actual.dtype == dtype and actual.shape == expected.shape
        assert (actual.double() - expected).abs().max() / expected.abs().max() < TOLERANCE[dtype]


@needs_onednn
@pytest.mark.parametrize("dtype", PACKABLE, ids=str)
def test_rows_that_do_not_lie_together_and_more_dimensions_work(dtype: torch.dtype) -> None:
    """A packed product is handed views: the last rows of prompts, halves of a fused projection."""
    torch.manual_seed(1)
    weight = torch.randn(520, 300).to(dtype)
    packed = pack(weight)
    assert packed is not None
    wide = torch.randn(6, 700).to(dtype)
    for view in (wide[:, 100:400], wide[::2, :300], wide[:, :300].view(2, 3, 300)):
        assert torch.allclose(
            packed(view), functional.linear(view, weight), rtol=2e-2, atol=0.3 * (dtype != torch.float32) + 1e-4
        )


@pytest.mark.parametrize(
    ("weight", "pays"),
    [
        (torch.ones(MIN_WEIGHTS // 64 - 1, 64), False),
        (torch.ones(MIN_WEIGHTS // 64, 64), torch.float32 in PACKABLE),
        (torch.ones(520, 300).half(), torch.float16 in PACKABLE),
        (torch.ones(520, 300).double(), False),
        (torch.empty(520, 300, device="meta"), False),
    ],
    ids=["too small", "the smallest", "float16", "float64", "another device"],
)
def test_a_weight_is_packed_where_that_pays(weight: torch.Tensor, pays: bool) -> None:
    assert (pack(weight) is not None) == pays


@needs_onednn
def test_the_torch_backend_packs_what_pays() -> None:
    large, small = torch.randn(520, 300), torch.randn(5, 300)
    offset, hidden = torch.randn(520), torch.randn(3, 300)
    layers = [TorchBackend().linear(large, offset), TorchBackend().linear(small)]
    assert [type(layer) for layer in layers] == [PackedLinear, PlainLinear]
    torch.testing.assert_close(layers[0](hidden), functional.linear(hidden, large, offset), rtol=0, atol=1e-3)
    assert torch.equal(layers[1](hidden), functional.linear(hidden, small))
