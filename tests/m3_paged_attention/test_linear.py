"""A packed weight computes what the weight computes, takes its place, and is there only where it pays."""

import gc
import weakref

import pytest
import torch
from torch.nn import functional

from m2_continuous_batching.packed_linear import can_pack
from m3_paged_attention import linear
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


@needs_onednn
def test_the_weight_can_go() -> None:
    weight = torch.randn(520, 300)
    alive = weakref.ref(weight)
    packed = pack(weight)
    expected = packed(torch.ones(1, 300)) if packed else None
    del weight
    gc.collect()
    assert alive() is None, "the packed form keeps nothing of it"
    assert packed is not None and expected is not None
    assert torch.equal(packed(torch.ones(1, 300)), expected)


def test_a_small_weight_stays_as_it_is() -> None:
    assert pack(torch.randn(MIN_WEIGHTS // 64 - 1, 64)) is None


@needs_onednn
def test_the_smallest_that_pays_is_packed() -> None:
    assert isinstance(pack(torch.randn(MIN_WEIGHTS // 64, 64)), PackedLinear)


def test_precisions_that_onednn_lacks_stay_as_they_are() -> None:
    assert pack(torch.randn(520, 300, dtype=torch.float64)) is None
    assert (pack(torch.randn(520, 300).half()) is not None) == (torch.float16 in PACKABLE)


def test_a_weight_on_another_device_stays_as_it_is() -> None:
    assert pack(torch.empty(520, 300, device="meta")) is None


def test_a_torch_without_the_operations_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda dtype, device: False)
    assert pack(torch.randn(520, 300)) is None


@needs_onednn
def test_the_torch_backend_packs_what_pays() -> None:
    large, small = torch.randn(520, 300), torch.randn(5, 300)
    offset, hidden = torch.randn(520), torch.randn(3, 300)
    layers = [TorchBackend().linear(large, offset), TorchBackend().linear(small)]
    assert [type(layer) for layer in layers] == [PackedLinear, PlainLinear]
    torch.testing.assert_close(layers[0](hidden), functional.linear(hidden, large, offset), rtol=0, atol=1e-3)
    assert torch.equal(layers[1](hidden), functional.linear(hidden, small))


def test_a_plain_layer_is_the_weight_itself() -> None:
    weight, bias, hidden = torch.randn(5, 7), torch.randn(5), torch.randn(3, 7)
    assert PlainLinear(weight).weight is weight
    assert torch.equal(PlainLinear(weight)(hidden), functional.linear(hidden, weight))
    assert torch.equal(PlainLinear(weight, bias)(hidden), functional.linear(hidden, weight, bias))
