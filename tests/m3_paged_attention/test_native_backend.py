"""The C++ kernels compute what float64 computes, alone and in company alike, and hide nothing.

What they have in common with the other kernels is tested in `tests/kernels`. Here are linear layers, which only this
backend has of its own, its promise that a row never depends on the rows beside it, and what may go wrong in vectors:
ends that fill none, rounding, infinities, NaN. Everything runs twice: compiled for this processor, and for the oldest
that the compiler knows, where there are no fused products and no products of bfloat16.
"""

import errno
import mmap
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from m3_paged_attention import ModelConfig, ModelLoadError
from m3_paged_attention.attention import native_backend, native_library
from m3_paged_attention.attention.native_backend import NativeBackend
from m3_paged_attention.attention.native_linear import NativeLinear
from m3_paged_attention.attention.torch_backend import TorchBackend
from m3_paged_attention.int8_weight import Int8Weight
from m3_paged_attention.kv_storage import KVLayer
from m3_paged_attention.linear import PlainLinear, QuantizedLinear
from m3_paged_attention.model_loader import load_model
from tests.kernels import references
from tests.kernels.numbers import same_numbers_and_no_luck as same_numbers_and_no_luck
from tests.kernels.references import PagedBatch, assert_close, causal_attention, decode_row, in_kv_dtype, paged_batch
from tests.support.amounts import examples

if OBSTACLE := native_library.obstacle():
    pytest.skip(OBSTACLE, allow_module_level=True)

CPU, FP32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")
ATTENTION = references.ATTENTION | {FP32: 2e-6}  # sums of up to 320 products, one after the other
LINEAR = {FP32: 2e-6, BF16: 4e-3}  # of up to 1030
QUANTIZED = LINEAR | {FP32: 5e-5}  # of inputs with 16 bits: an error of 3e-5 of their deviation
EVERY_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(BF16)


@pytest.fixture(scope="session")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> NativeBackend:
    """The same kernels for any processor of this kind; and not for the last bit of speed, which takes 10 seconds."""
    flags = tuple(flag for flag in native_library.FLAGS if flag not in ("-march=native", "-O3"))
    assert len(flags) == len(native_library.FLAGS) - 2
    target = tmp_path_factory.mktemp("oldest") / "kernels.so"
    native_library.build(native_library.find_compiler(), target, (*flags, "-O1"))
    library = native_library.open_library(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_backend, "load", lambda: library)
        return NativeBackend()


@pytest.fixture(scope="module", params=["this processor", pytest.param("the oldest", marks=pytest.mark.exhaustive)])
def backend(request: pytest.FixtureRequest) -> NativeBackend:
    return NativeBackend() if request.param == "this processor" else request.getfixturevalue("oldest")


@pytest.fixture(params=[FP32, BF16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Every number is the same one, and NaN is where NaN is."""
    return a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def attend(backend: NativeBackend, batch: PagedBatch) -> Tensor:
    return backend.attention(batch.query, batch.layer, batch.metadata, batch.scale)


def product(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result = hidden.double() @ weight.double().T
    return result if bias is None else result + bias.double()


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype)


# --- linear layers ----------------------------------------------------------------------------------------------------


def test_linear_takes_any_number_of_rows_and_none_changes_another(backend, dtype) -> None:
    """Groups of up to six rows, tiles of 16, blocks of 96 or 256, one or several threads: each row keeps its bits."""
    weight, bias, hidden = numbers(dtype, 130, 1030), numbers(dtype, 130), numbers(dtype, 264, 1030)
    layer, exact = backend.linear(weight, bias), product(hidden, weight, bias)
    assert isinstance(layer, NativeLinear)
    alone = torch.cat([layer(row) for row in hidden.split(1)])
    assert_close(alone, exact, LINEAR)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (*range(1, 20), 31, 32, 33, 48, 49, 96, 97, 193, 240, 250, 256, 257, 264):
            assert torch.equal(layer(hidden[:rows]), alone[:rows])
            assert torch.equal(layer(hidden[-rows:]), alone[-rows:])


@pytest.mark.sample(2)
@pytest.mark.parametrize("in_features", [2, 128, 1030])
def test_quantized_linear_takes_any_number_of_rows_and_none_changes_another(backend, dtype, in_features) -> None:
    """Groups of inputs with a scale each, the last of them shorter."""
    weight, bias, hidden = numbers(dtype, 130, in_features), numbers(dtype, 130), numbers(dtype, 200, in_features)
    weight *= torch.logspace(-3, 3, 130)[:, None].to(dtype)
    quantized = Int8Weight.of(weight)
    layer, exact = backend.linear(quantized, bias), product(hidden, quantized.dequantized(slice(None)), bias)
    assert isinstance(layer, NativeLinear)
    alone = torch.cat([layer(row) for row in hidden.split(1)])
    for feature in range(0, 130, 13):
        assert_close(alone[:, feature], exact[:, feature], QUANTIZED)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (*range(1, 15), 96, 97, 193, 200):
            assert torch.equal(layer(hidden[:rows]), alone[:rows])
            assert torch.equal(layer(hidden[-rows:]), alone[-rows:])


def test_a_quantized_weight_is_replaced_by_another_one(backend, dtype) -> None:
    first, second, hidden = numbers(dtype, 70, 48), numbers(dtype, 70, 48), numbers(dtype, 3, 48)
    layer, expected = backend.linear(Int8Weight.of(first)), backend.linear(Int8Weight.of(second))
    address = layer.packed.data_ptr()
    layer.pack(Int8Weight.of(second))
    assert torch.equal(layer(hidden), expected(hidden)) and layer.packed.data_ptr() == address


def test_quantized_linear_hides_no_nan_and_spreads_none(backend, dtype) -> None:
    weight, hidden = numbers(dtype, 70, 256), numbers(dtype, 7, 256)
    weight[5, 47] = weight[69, 200] = NAN
    hidden[2, 0] = hidden[6, 255] = NAN
    result = backend.linear(Int8Weight.of(weight))(hidden)
    expected = product(hidden, weight)
    assert torch.equal(result.isnan(), expected.isnan()) and expected.isnan().sum() == 2 * 70 + 5 * 2


@pytest.mark.parametrize("quantized", [False, True])
def test_the_best_token_of_a_row_is_that_of_its_logits(backend, dtype, quantized) -> None:
    """Of two equal logits the first; -1 in a row with a logit that is not finite."""
    weight, hidden = numbers(dtype, 130, 128), numbers(dtype, 20, 128)
    weight[100:] = weight[:30]
    layer = backend.linear(Int8Weight.of(weight) if quantized else weight)
    assert isinstance(layer, NativeLinear)
    expected = layer(hidden).float().numpy().argmax(-1).tolist()
    assert layer.best_tokens(hidden) == expected and max(expected) < 100
    assert [layer.best_tokens(row) for row in hidden.split(1)] == [[token] for token in expected]
    for row, bad in ((0, NAN), (3, INF), (19, -INF)):
        hidden[row, 5] = bad
        expected[row] = -1
    assert layer.best_tokens(hidden) == expected


def test_linear_takes_views(backend, dtype) -> None:
    weight, wide = numbers(dtype, 70, 48), numbers(dtype, 6, 100)
    layer = backend.linear(weight)
    turned = backend.linear(weight.T.contiguous().T, wide[:, ::2].flatten()[::2][:70])
    for view in (wide[:, 3:51], wide[::2, :48], wide[:, :96:2], wide[:, :6].T.expand(6, 6).repeat(1, 8)):
        assert torch.equal(layer(view), layer(view.clone(memory_format=torch.contiguous_format)))
        assert_close(turned(view), product(view, weight, wide[:, ::2].flatten()[::2][:70]), LINEAR)


def test_linear_keeps_nothing_of_the_weight(backend, dtype) -> None:
    weight, hidden = numbers(dtype, 70, 48), numbers(dtype, 3, 48)
    expected = product(hidden, weight)
    layer, alive = backend.linear(weight), weakref.ref(weight)
    weight.fill_(NAN)
    del weight
    assert alive() is None
    assert_close(layer(hidden), expected, LINEAR)


@pytest.mark.parametrize(("dtype", "in_features"), [(FP32, 49), (BF16, 49), (torch.float16, 48), (torch.float64, 48)])
def test_a_weight_without_kernels_stays_as_it_is(backend, dtype, in_features) -> None:
    weight, bias, hidden = numbers(dtype, 70, in_features), numbers(dtype, 70), numbers(dtype, 3, in_features)
    layer = backend.linear(weight, bias)
    assert isinstance(layer, PlainLinear)
    assert_close(layer(hidden), product(hidden, weight, bias), LINEAR | {torch.float16: 1e-3, torch.float64: 1e-12})
    if dtype != torch.float64:
        assert isinstance(backend.linear(Int8Weight.of(weight), bias), QuantizedLinear)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages on this system")
def test_weights_are_on_huge_pages() -> None:
    """The kernel may refuse them, so the request is tested: the flag `hg` of the memory in /proc/self/smaps."""
    packed = NativeBackend().linear(torch.ones(4096, 1024)).packed
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    for each in maps:
        first, last = (int(address, 16) for address in each.split()[0].split("-"))
        if first <= packed.data_ptr() < last and "VmFlags" in each:
            assert " hg" in each.split("VmFlags:")[1]
            return
    raise AssertionError("the memory is in no mapping")


def test_too_little_memory_for_weights_is_an_error_of_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **keywords: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(ModelLoadError, match=r"its weights cannot be loaded: .* Cannot allocate memory"):
        load_model(ModelConfig(device="cpu", attention_backend="native"))


def test_linear_refuses_other_widths_and_precisions(backend) -> None:
    layer = backend.linear(numbers(FP32, 8, 16))
    for wrong in (numbers(FP32, 2, 14), numbers(BF16, 2, 16)):
        with pytest.raises(AssertionError):
            layer(wrong)


@pytest.mark.parametrize("out_features", [64, 70])
def test_linear_hides_no_nan_and_spreads_none(backend, dtype, out_features) -> None:
    weight, hidden = numbers(dtype, out_features, 48), numbers(dtype, 7, 48)
    weight[5, 47] = weight[out_features - 1, 0] = NAN
    hidden[2, 0] = hidden[6, 47] = NAN
    hidden[4, 3] = INF
    result = backend.linear(weight)(hidden)
    expected = product(hidden, weight)
    assert torch.equal(result.isnan(), expected.isnan()) and expected.isnan().sum() == 2 * out_features + 5 * 2
    assert torch.equal(result.isposinf(), expected.isposinf()) and expected.isposinf().any()
    assert torch.equal(result.isneginf(), expected.isneginf()) and expected.isneginf().any()


# --- rounding and the edges of numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.0, 2**-8, 2**-9, -(2**-9), 1.5 * 2**-9, 1.0, 3.0, INF, NAN])
def test_sums_are_rounded_as_torch_rounds_them(backend, factor) -> None:
    """To the nearest bfloat16, ties to even, for each that exists; 2^-9 of a number is the tie above it.

    Where a processor has an instruction for it, a denormal sum counts as zero.
    """
    x = EVERY_BF16.view(-1, 256)
    other = (x.float() * factor).bfloat16()
    expected = x + other
    _, total = backend.add_rms_norm(other, x.clone(), torch.ones(256, dtype=BF16), 1e-6)
    is_denormal = (expected != 0) & (expected.abs() < 2.0**-126)
    assert same_bits(total[~is_denormal], expected[~is_denormal])
    of_denormals = total[is_denormal]
    assert torch.equal(of_denormals, expected[is_denormal]) or not of_denormals.any()


@pytest.mark.parametrize("out_features", [64, 3])
def test_products_are_rounded_as_torch_rounds_them(backend, out_features) -> None:
    """A full panel is stored in vectors, the rest of one number by number. Denormal numbers may count as zero."""
    first = EVERY_BF16[(EVERY_BF16.abs() >= 2.0**-100) | EVERY_BF16.isnan()]
    second = (first.float() * 2**-9).bfloat16()
    for other in (second, -second, first, second * 1.5):
        result = backend.linear(torch.ones(out_features, 2, dtype=BF16))(torch.stack((first, other), 1))
        expected = (first.float() + other.float()).bfloat16()
        assert same_bits(result, expected[:, None].expand(-1, out_features))


def test_exponentials_are_right_over_their_whole_range(backend) -> None:
    """silu(x) = x / (1 + e^-x): for x far below 0 its relative error is that of e^-x."""
    gate = torch.cat((torch.linspace(-87.9, 200, 2**16 - 16), torch.linspace(-1e-3, 1e-3, 16))).view(64, -1)
    up = torch.ones_like(gate)
    result = backend.silu_mul(torch.cat((gate, up), 1)).double()
    exact = references.silu_mul(torch.cat((gate, up), 1))
    assert ((result - exact).abs() <= 5e-7 * exact.abs()).all()
    beyond = torch.linspace(-200, -87, 1024).view(16, -1)  # nothing is left of e^x in float32
    result = backend.silu_mul(torch.cat((beyond, torch.ones_like(beyond)), 1)).double()
    assert (result - references.silu_mul(torch.cat((beyond, torch.ones_like(beyond)), 1))).abs().max() < 2e-36


def test_silu_hides_neither_nan_nor_infinity(backend, dtype) -> None:
    edges = [NAN, INF, -INF, 0.0, -0.0, 3e38, -3e38, 88.0, 89.0, -87.0, 1e-40, 1.0]
    pairs = torch.cartesian_prod(torch.tensor(edges), torch.tensor(edges))
    pairs = torch.cat((pairs, pairs[: -len(pairs) % 16])).to(dtype)
    gate_up = torch.cat((pairs[:, 0], pairs[:, 1]))[None]
    result, expected = backend.silu_mul(gate_up), references.silu_mul(gate_up).to(dtype)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf()) and torch.equal(
        result[result.isinf()], expected[expected.isinf()]
    )
    finite = expected.isfinite()
    torch.testing.assert_close(result[finite], expected[finite], rtol=1e-2 if dtype == BF16 else 1e-6, atol=1e-35)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("at", [0, 15, 63])
def test_norms_hide_no_nan_and_spread_none(backend, dtype, bad, at) -> None:
    x, weight = numbers(dtype, 3, 64), torch.ones(64, dtype=dtype)
    x[1, at] = bad
    expected = references.rms_norm(x, weight, 1e-6)
    for result in (backend.rms_norm(x, weight, 1e-6), backend.add_rms_norm(x, torch.zeros_like(x), weight, 1e-6)[0]):
        assert torch.equal(result.isnan(), expected.isnan()) and expected[1].isnan().any()


def test_rotary_hides_no_nan_and_spreads_none(backend, dtype) -> None:
    x, angles = numbers(dtype, 3, 2, 64), torch.rand(3, 32)
    x[1, 1, 7] = x[2, 0, 40] = NAN
    result = backend.rotary(x, angles.cos(), angles.sin())
    assert set(map(tuple, result.isnan().nonzero().tolist())) == {(1, 1, 7), (1, 1, 39), (2, 0, 8), (2, 0, 40)}


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -0x7FFFFF])
def test_a_nan_of_any_bits_stays_one(backend, dtype, bits) -> None:
    """Rounding to bfloat16 adds to the bits, and a carry out of the largest NaN would make it zero."""
    nan = torch.tensor([bits], dtype=torch.int32).view(FP32)
    assert nan.isnan()
    result = backend.rotary(torch.ones(3, 1, 32, dtype=dtype), nan.expand(3, 16), torch.ones(3, 16))
    assert result.isnan().all()


# --- attention --------------------------------------------------------------------------------------------------------


def last_block(batch: PagedBatch) -> int:
    """The block of row 0 that its last token is in, of 16 tokens each."""
    return int(batch.metadata.block_tables[0, (batch.metadata.seq_lens_host[0] - 1) // 16])


def share(batch: PagedBatch, rows: range, tokens: int, *, copied: bool = False) -> None:
    """Let decodes begin with the tokens of the first of them: in its blocks, or in copies of these."""
    tables, blocks = batch.metadata.block_tables, slice(tokens // batch.layer.key_cache.shape[1])
    for row in rows[1:]:
        if copied:
            for cache in batch.layer[:2]:
                cache[tables[row, blocks].long()] = cache[tables[rows[0], blocks].long()]
        else:
            tables[row, blocks] = tables[rows[0], blocks]


@pytest.mark.sample(8)
@pytest.mark.parametrize("heads", [(6, 2, 64), (16, 1, 64), (5, 1, 96), (8, 1, 128)], ids=str)
@pytest.mark.parametrize("page", [1, 16, 24])
@pytest.mark.parametrize("kv_dtype", [None, BF16, torch.int8, torch.float8_e4m3fn], ids=["own", "bf16", "int8", "fp8"])
def test_a_shared_prefix_is_read_once_for_all(backend, dtype, heads, page, kv_dtype) -> None:
    """Two prefixes, of 9 rows and of 40, and a row with its own; the others end in it, or go on behind it."""
    batch = paged_batch(heads, decodes=[144 + row % 37 for row in range(50)], dtype=dtype, device=CPU, page=page)
    for rows in (range(9), range(10, 50)):
        share(batch, rows, 144)
    batch = in_kv_dtype(batch, kv_dtype or dtype)
    bounds = {BF16: 8e-3} | ({FP32: 1e-4} if kv_dtype == torch.int8 else {})  # queries of 16 bits
    together = attend(backend, batch)
    for row in range(50):
        assert_close(together[row], batch.expected[row], ATTENTION | bounds)
    torch.set_num_threads(2)
    assert torch.equal(attend(backend, batch), together)
    assert torch.equal(attend(backend, decode_row(batch, 9))[0], together[9]), "it shares nothing: no other bits"


SHARED: dict[str, tuple[tuple[int, int, int], list[tuple[range, int, bool]]]] = {
    "two documents behind a block of all": (
        (4, 2, 64),
        [(range(20), 16, False), (range(0, 20, 2), 208, True), (range(1, 20, 2), 208, True)],
    ),
    "one of many leaves early": ((4, 2, 64), [(range(17), 16, False), (range(16), 208, True)]),
    "two documents behind a shorter prompt": (
        (4, 2, 64),
        [(range(20), 128, False), (range(10), 320, True), (range(10, 20), 320, True)],
    ),
    "a prompt, and half go on for a short while": ((4, 2, 64), [(range(18), 256, True), (range(9), 320, False)]),
    "queries of eight rows": ((4, 2, 64), [(range(8), 208, True)]),
    "too few queries": ((4, 2, 64), [(range(7), 208, False)]),
    "too few tokens": ((4, 2, 64), [(range(20), 112, False)]),
    "enough queries of each row": ((16, 1, 64), [(range(2), 208, True)]),
}
"""Heads, and what rows share: so many tokens, and whether these are computed for all of them at once."""


@pytest.mark.parametrize("name", SHARED)
def test_rows_are_grouped_so_that_the_most_reads_are_saved(backend, name) -> None:
    """A row has the bits that it has if it shares its group's tokens and no others. Those behind a group's tokens, and
    rows that are in no group, have the bits that they have alone."""
    heads, shared = SHARED[name]
    results = []
    for copied in ([False] * len(shared), [not is_group for *_, is_group in shared], [True] * len(shared)):
        batch = paged_batch(heads, decodes=[330 + row for row in range(21)], dtype=FP32, device=CPU)
        for (rows, tokens, _), is_copied in zip(shared, copied, strict=True):
            share(batch, rows, tokens, copied=is_copied)
        results.append(attend(backend, batch))
    together, in_groups, alone = results
    assert torch.equal(together, in_groups)
    grouped = {row for rows, _, is_group in shared if is_group for row in rows}
    assert {row for row in range(21) if not torch.equal(together[row], alone[row])} == grouped


@pytest.mark.sample(8)
@pytest.mark.parametrize("offset", [0, 1, 15])
@pytest.mark.parametrize("cache", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_wrong_in_a_token_that_is_seen_comes_out(backend, dtype, offset, cache, bad) -> None:
    batch = paged_batch((6, 2, 64), decodes=[48, 20], dtype=dtype, device=CPU)
    clean = attend(backend, batch)
    batch.layer[cache][last_block(batch), offset, 1, 5] = bad
    result = attend(backend, batch)
    assert torch.equal(result[1], clean[1]) and torch.equal(result[0, :3], clean[0, :3]), "others do not see it"
    blocks = batch.metadata.block_tables[0, :3].long()  # of 16 tokens each
    key, value = (kv[blocks].flatten(0, 1) for kv in batch.layer[:2])
    expected = causal_attention(batch.query[:1], key, value, batch.scale)[0]
    assert torch.equal(result[0].isnan(), expected.isnan())
    assert torch.equal(result[0].isinf(), expected.isinf())
    assert not expected[3:].isfinite().all() or bad == -INF or cache == 0


@pytest.mark.sample(6)
@pytest.mark.parametrize("heads", [(1, 1, 32), (2, 2, 64), (3, 1, 96), (4, 1, 320), (10, 2, 64), (16, 2, 128)], ids=str)
@pytest.mark.parametrize("page", [1, 16])
def test_attention_never_depends_on_company_or_threads(backend, dtype, heads, page) -> None:
    """Few sequences are shared between threads head by head, and many are not: the same bits."""
    lengths = [1, 15, 16, 17, 31, 32, 33, 0, 130]
    batch = paged_batch(heads, decodes=lengths, dtype=dtype, device=CPU, page=page)
    together = attend(backend, batch)
    assert_close(together, batch.expected, ATTENTION)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(attend(backend, batch), together)
        for row in range(len(lengths)):
            assert torch.equal(attend(backend, decode_row(batch, row))[0], together[row])


def fill(batch: PagedBatch, *tensors: Tensor) -> None:
    """Store keys and values `[length, kv_heads, head_dim]` in the blocks of row 0, of 16 tokens each."""
    for cache, new in zip(batch.layer[:2], tensors, strict=True):
        for position, vector in enumerate(new):
            cache[batch.metadata.block_tables[0, position // 16], position % 16] = vector


@pytest.mark.parametrize("rising", [True, False])
@pytest.mark.parametrize("steepness", [1.0, 30.0, 1e6, 1e30])
def test_the_largest_score_may_come_at_any_time(backend, rising, steepness) -> None:
    """What was summed before a larger score shrinks, to nothing if need be; what comes after it is small."""
    for rows in ({"decodes": [200]}, {"prefills": [(0, 200)]}):
        batch = paged_batch((1, 1, 64), **rows, dtype=FP32, device=CPU)
        query, key, value = (numbers(FP32, length, 1, 64) for length in (len(batch.query), 200, 200))
        query[:, 0, 0] = 1.0
        key[:, 0, 0] = torch.linspace(-1, 1, 200) * steepness * (1 if rising else -1)
        fill(batch, key, value)
        result = backend.attention(query, batch.layer, batch.metadata, 0.1)
        assert_close(result, causal_attention(query, key, value, 0.1), {FP32: 5e-6 if steepness > 100 else 2e-6})


# --- attention, many queries ------------------------------------------------------------------------------------------


def last_queries(batch: PagedBatch, count: int) -> PagedBatch:
    """The only prompt of a batch, of which all but so many tokens have had their turn."""
    (before,) = batch.metadata.query_lens_host
    metadata = replace(
        batch.metadata,
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        num_prefill_tokens=count,
        max_query_len=count,
        query_lens_host=(count,),
    )
    first = before - count
    return replace(batch, query=batch.query[first:], metadata=metadata, expected=batch.expected[first:])


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "heads", [(1, 1, 32), (3, 1, 96), (4, 1, 320), (10, 2, 64), (16, 2, 128), (97, 1, 32)], ids=str
)
@pytest.mark.parametrize("page", [1, 16])
def test_a_prompt_in_pieces_is_the_prompt_in_one(backend, dtype, heads, page) -> None:
    """The same bits, whatever tiles its tokens are cut into and whatever threads compute them."""
    batch = paged_batch(heads, prefills=[(3, 127)], dtype=dtype, device=CPU, page=page)
    whole = attend(backend, batch)
    assert_close(whole, batch.expected, ATTENTION)
    for threads, counts in ((1, (97, 64, 25, 1)), (2, (127, 24))):
        torch.set_num_threads(threads)
        for count in counts:
            assert torch.equal(attend(backend, last_queries(batch, count)), whole[-count:])


@pytest.mark.sample(6)
@pytest.mark.parametrize("at", [0, 63, 64, 100, 129])
@pytest.mark.parametrize("cache", [0, 1], ids=["key", "value"])
def test_a_nan_in_a_prompt_comes_out_from_there_on(backend, dtype, at, cache) -> None:
    batch = paged_batch((6, 2, 64), prefills=[(0, 130), (10, 20)], decodes=[20], dtype=dtype, device=CPU)
    clean = attend(backend, batch)
    batch.layer[cache][batch.metadata.block_tables[0, at // 16], at % 16, 1, 5] = NAN
    result = attend(backend, batch)
    assert result[at:130, 3:, 5].isnan().all()
    assert torch.equal(result[:, :3], clean[:, :3]) and torch.equal(result[130:], clean[130:]), "others do not see it"
    assert cache == 1 or torch.equal(result[:at], clean[:at]), "and a key is not seen by tokens before it"


# --- rows, views, threads ---------------------------------------------------------------------------------------------

Call = Callable[[NativeBackend, Tensor], Tensor]
ANGLES = torch.linspace(0, 600, 700 * 32).view(700, 32)
CALLS: dict[str, Call] = {
    "rms_norm": lambda backend, x: backend.rms_norm(x[:, 0], x[0, 1], 1e-6),
    "rms_norm of heads": lambda backend, x: backend.rms_norm(x, x[0], 1e-6),
    "add_rms_norm": lambda backend, x: torch.stack(backend.add_rms_norm(x[:, 0], x[:, 1].clone(), x[0, 1], 1e-6)),
    "rotary": lambda backend, x: backend.rotary(x.clone(), ANGLES[: len(x)].cos(), ANGLES[: len(x)].sin()),
    "silu_mul": lambda backend, x: backend.silu_mul(x[:, 1:].flatten(1)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CALLS)
def test_rows_never_depend_on_company_or_threads(backend, dtype, name) -> None:
    """700 rows are enough for threads, and 3 are not."""
    call, x = CALLS[name], numbers(dtype, 700, 5, 64)
    whole = call(backend, x)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(call(backend, x), whole)
        few = call(backend, x[:3])
        assert torch.equal(few, whole[:, :3] if name == "add_rms_norm" else whole[:3])


@pytest.mark.parametrize("name", CALLS)
def test_what_fits_vectors_is_never_left_to_torch(backend, dtype, name, monkeypatch) -> None:
    for function in ("rms_norm", "add_rms_norm", "rotary", "silu_mul", "attention", "store_kv"):
        monkeypatch.setattr(TorchBackend, function, lambda *_: pytest.fail("torch was asked"))
    CALLS[name](backend, numbers(dtype, 3, 5, 64))
    batch = paged_batch((4, 2, 64), prefills=[(0, 7), (20, 3)], decodes=[40, 0, 1], dtype=dtype, device=CPU)
    assert_close(attend(backend, batch), batch.expected, ATTENTION)
    backend.store_kv(batch.query[:, :2], batch.query[:, 2:], batch.layer, torch.arange(len(batch.query)))


def layouts(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    """The same numbers in one piece, as a part of wider rows, and in an order of memory that is no row's."""
    plain = numbers(dtype, *shape)
    wide = torch.full((shape[0], *(size + 3 for size in shape[1:])), NAN, dtype=dtype)
    inner = wide[(slice(None), *(slice(1, size + 1) for size in shape[1:]))]
    inner.copy_(plain)
    apart = torch.full((shape[0], shape[1] + 3, *shape[2:]), NAN, dtype=dtype)[:, 1:-2]
    apart.copy_(plain)
    return [
        plain,
        inner,
        apart,
        plain.transpose(0, -1).contiguous().transpose(0, -1),
        plain.repeat(2, *[1] * (len(shape) - 1))[: shape[0]],
    ]


def test_tensors_may_be_views_of_any_kind(backend, dtype) -> None:
    heads, weight = layouts(dtype, 4, 6, 64), numbers(dtype, 64)
    cos, sin = ANGLES[:4].cos(), ANGLES[:4].sin()
    turned = cos.T.contiguous().T, sin.T.contiguous().T
    calls: list[Call] = [
        lambda backend, x: backend.rms_norm(x, weight, 1e-6),
        lambda backend, x: backend.rms_norm(x[:, 2], weight, 1e-6),
        lambda backend, x: backend.rotary(x.clone(), cos, sin),
        lambda backend, x: backend.rotary(x[:, 1:], *turned),
    ]
    for call in calls:
        expected = call(backend, heads[0].clone())
        for x in heads:
            keep = x.clone(), x.stride()
            view = torch.empty_strided(x.shape, x.stride(), dtype=dtype).copy_(x)
            assert torch.equal(call(backend, view), expected)
            assert torch.equal(x, keep[0])
    rows = layouts(dtype, 4, 128)
    for x in rows:
        assert torch.equal(backend.silu_mul(x), backend.silu_mul(rows[0]))
        for residual in rows:
            ours = backend.add_rms_norm(x, residual.clone(), numbers(dtype, 128) * 0 + 1, 1e-6)
            theirs = backend.add_rms_norm(rows[0], rows[0].clone(), torch.ones(128, dtype=dtype), 1e-6)
            assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_queries_keys_and_values_may_be_views_of_any_kind(backend, dtype) -> None:
    batch = paged_batch((6, 2, 64), decodes=[3, 40, 17, 5], dtype=dtype, device=CPU)
    expected = attend(backend, batch)
    prompt = paged_batch((6, 2, 64), prefills=[(2, 4)], dtype=dtype, device=CPU)
    for query in layouts(dtype, 4, 6, 64):
        for one, wanted in ((batch, expected), (prompt, attend(backend, prompt))):
            query.copy_(one.query)
            assert torch.equal(backend.attention(query, one.layer, one.metadata, one.scale), wanted)
    slots = torch.tensor([9, 2, 14, 7])
    for key in layouts(dtype, 4, 2, 64):
        layer = KVLayer(*torch.full((2, 4, 4, 2, 64), NAN, dtype=dtype))
        backend.store_kv(key, key.flip(0), layer, slots)
        for cache, written in zip(layer[:2], (key, key.flip(0)), strict=True):
            assert torch.equal(cache.view(16, 2, 64)[slots], written)
            assert cache.isnan().sum() == 12 * 2 * 64


# --- any shape --------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@settings(max_examples=examples(25))
@given(data=st.data())
def test_any_batch_equals_float64(oldest: NativeBackend, data: st.DataObject) -> None:
    backend = data.draw(st.sampled_from([NativeBackend(), oldest]))
    dtype = data.draw(st.sampled_from([FP32, BF16]))
    kv_heads, group = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    head_dim = 32 * data.draw(st.integers(1, 8))
    prefills = data.draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 100)), max_size=3))
    decodes = data.draw(st.lists(st.integers(0, 70), max_size=5))
    page = data.draw(st.sampled_from([1, 2, 3, 7, 16, 20]))
    torch.set_num_threads(data.draw(st.integers(1, 2)))
    heads = kv_heads * group, kv_heads, head_dim
    batch = paged_batch(heads, prefills=prefills, decodes=decodes, dtype=dtype, device=CPU, page=page)
    result = attend(backend, batch)
    assert result.shape == batch.expected.shape
    if batch.expected.any():
        assert_close(result, batch.expected, ATTENTION)
    else:
        assert not result.any()


@pytest.mark.exhaustive
@settings(max_examples=examples(25))
@given(
    rows=st.integers(0, 110),
    in_features=st.integers(1, 700),
    out_features=st.integers(1, 140),
    has_bias=st.booleans(),
    dtype=st.sampled_from([FP32, BF16]),
    threads=st.integers(1, 2),
)
def test_any_linear_layer_equals_float64(
    oldest: NativeBackend,
    rows: int,
    in_features: int,
    out_features: int,
    has_bias: bool,
    dtype: torch.dtype,
    threads: int,
) -> None:
    torch.manual_seed(rows)
    torch.set_num_threads(threads)
    hidden, weight = numbers(dtype, rows, in_features), numbers(dtype, out_features, in_features)
    bias = numbers(dtype, out_features) * has_bias
    exact, most = product(hidden, weight, bias), product(hidden.abs(), weight.abs(), bias.abs())
    rounding = 2e-6 * most + (exact.abs() / 2**8 if dtype == BF16 else 0)
    for backend in (NativeBackend(), oldest):
        result = backend.linear(weight, bias if has_bias else None)(hidden)
        assert result.dtype == dtype and ((result.double() - exact).abs() <= rounding).all()
