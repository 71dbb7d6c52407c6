"""The torch backend gathers blocks in tiles and keeps a plan for a step: neither changes a value, and no NaN is hidden.

What it has in common with the other backends is tested in `tests/kernels`. The memory behind every sequence is NaN
(`paged_batch`), and so is what `torch.empty` returns: a read of memory that was not written shows.
"""

from dataclasses import replace

import pytest
import torch

from m3_paged_attention.attention import tiles, torch_backend
from m3_paged_attention.attention.torch_backend import TorchBackend
from m3_paged_attention.kv_storage import KVLayer
from tests.kernels import references
from tests.kernels.numbers import same_numbers_and_no_luck as same_numbers_and_no_luck
from tests.kernels.references import NORM, assert_close, attend, check_attention, paged_batch

FP32 = torch.float32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def backend() -> TorchBackend:
    return TorchBackend()


@pytest.fixture(params=[torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)], ids=str)
def device(request: pytest.FixtureRequest) -> torch.device:
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decodes", [[1], [7], [15], [16], [40], [7, 7], [5, 16]], ids=str)
def test_a_nan_that_is_seen_comes_out(backend, decodes, dtype) -> None:
    """On a CPU torch's own attention makes zeros of it for short sequences, see `FEW_TOKENS`."""
    for cache in (0, 1):
        batch = paged_batch((4, 2, 64), decodes=decodes, dtype=dtype, device=torch.device("cpu"))
        clean = attend(backend, batch)
        batch.layer[cache][batch.metadata.block_tables[0, 0], 0, 1, 5] = torch.nan
        result = attend(TorchBackend(), batch)
        assert result[0, 2:, 5].isnan().all()
        assert not result[0, :2].isnan().any() and not result[1:].isnan().any()
        assert (result[1:] - clean[1:]).abs().sum() < 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prefill", [(0, 2), (0, 7), (0, 15), (0, 20), (5, 3), (30, 5)], ids=str)
def test_a_nan_in_a_prompt_comes_out(backend, prefill, dtype) -> None:
    batch = paged_batch((4, 2, 64), prefills=[prefill, (0, 3)], dtype=dtype, device=torch.device("cpu"))
    batch.layer.key_cache[batch.metadata.block_tables[0, 0], 0, 1, 5] = torch.nan  # its first token, which all see
    result = attend(backend, batch)
    assert result[: prefill[1], 2:].isnan().all()
    assert not result[: prefill[1], :2].isnan().any() and not result[prefill[1] :].isnan().any()


@pytest.mark.parametrize("decodes", [[1], [16], [131], [40] * 5, [3, 90] * 4, list(range(200, 150, -7))], ids=str)
def test_tiles_of_every_form(backend, device, monkeypatch, decodes) -> None:
    """One sequence; equal ones, which need no mask; a sequence larger than the scratch; several tiles."""
    batch = paged_batch((4, 2, 64), decodes=decodes, dtype=FP32, device=device)
    for tokens in (1, 128, 400, 10**6):
        monkeypatch.setattr(tiles, "TILE_BYTES", tokens * 2 * 2 * 64 * 4)
        check_attention(TorchBackend(), batch)


def test_tiles_stay_small_and_nearly_full(backend, monkeypatch) -> None:
    """A tile of several sequences fits into the scratch, and little of it is padding."""
    lens = [30, 500, 31, 200, 33, 210, 480, 32, 190, 900]
    batch = paged_batch((4, 2, 64), decodes=lens, dtype=FP32, device=torch.device("cpu"))
    token_bytes = 2 * 2 * 64 * 4
    monkeypatch.setattr(tiles, "TILE_BYTES", 500 * token_bytes)
    plan = tiles.Plan(batch.metadata, batch.query, batch.layer, tiles.Scratch())
    shapes = [(len(tile.queries), tile.gather(batch.layer)[0].shape[2]) for tile in plan.decodes]
    assert shapes == [(4, 33), (2, 200), (1, 210), (1, 480), (1, 500), (1, 900)]
    monkeypatch.setattr(tiles, "TILE_BYTES", 10**9)
    plan = tiles.Plan(batch.metadata, batch.query, batch.layer, tiles.Scratch())
    shapes = [(len(tile.queries), tile.gather(batch.layer)[0].shape[2]) for tile in plan.decodes]
    assert shapes == [(4, 33), (3, 210), (2, 500), (1, 900)]


@pytest.mark.parametrize("length", [1, 16, 40, 1100])
@pytest.mark.parametrize("first_block", [1, 3])
@pytest.mark.parametrize("gap", [False, True])
def test_one_sequence_whose_blocks_lie_in_a_row(backend, device, length, first_block, gap) -> None:
    """It may be read in place, if it is short. With a gap in the row it may not."""
    batch = paged_batch((4, 2, 64), decodes=[length], dtype=FP32, device=device)
    blocks = batch.metadata.block_tables[0, : -(-length // 16)].long()
    ids = torch.arange(first_block, first_block + len(blocks), dtype=torch.int32, device=device)
    ids[-1] += gap
    storage = torch.full((3, 2, int(ids[-1]) + 2, 16, 2, 64), torch.nan, device=device)  # the layer is one of three
    layer = KVLayer(*storage[1])
    for cache, source in zip(layer[:2], batch.layer[:2], strict=True):
        cache[ids.long()] = source[blocks]
    metadata = replace(batch.metadata, block_tables=torch.cat((ids, ids.new_full((2,), 10**6)))[None])
    check_attention(backend, replace(batch, layer=layer, metadata=metadata))


def test_layers_of_one_step_share_a_plan_and_no_values(backend, device) -> None:
    """The scratch is one, whatever was attended to before; a result outlives what the next layer does to it."""
    batch = paged_batch((4, 2, 64), prefills=[(5, 12)], decodes=[30, 61, 33], dtype=FP32, device=device)
    # Attention is linear in the values.
    second = KVLayer(batch.layer.key_cache, batch.layer.value_cache * 2)
    first_result = attend(backend, batch)
    second_result = attend(backend, replace(batch, layer=second))
    assert torch.equal(second_result, first_result * 2)
    assert torch.equal(attend(backend, batch), first_result)


def test_steps_and_models_do_not_disturb_each_other(backend, device) -> None:
    """Larger, smaller, other heads, other precision: each in turn on the same scratch, and each again."""
    batches = [
        paged_batch((4, 2, 64), decodes=[30, 61], dtype=FP32, device=device),
        paged_batch((4, 2, 64), decodes=[300, 310, 320, 9], dtype=FP32, device=device),
        paged_batch((4, 2, 64), prefills=[(0, 7)], decodes=[5], dtype=FP32, device=device),
        paged_batch((4, 1, 128), decodes=[30, 61], dtype=FP32, device=device),
        paged_batch((4, 2, 64), decodes=[30, 61], dtype=torch.bfloat16, device=device),
    ]
    for batch in batches * 2:
        check_attention(backend, batch)


def test_a_draft_model_may_attend_in_the_same_step(backend, device) -> None:
    """Its KV lies in a second storage, under the same metadata."""
    target = paged_batch((4, 2, 64), decodes=[30, 61], dtype=FP32, device=device)
    draft = paged_batch((2, 1, 128), decodes=[30, 61], dtype=FP32, device=device)
    draft = replace(draft, metadata=target.metadata)
    for batch in (target, draft, target):
        check_attention(backend, batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("at_once", [1, 300, 1000])
def test_a_large_batch_goes_through_in_parts_and_nothing_changes(backend, device, dtype, at_once, monkeypatch) -> None:
    heads = torch.randn(7, 3, 64, device=device).to(dtype)
    weight, gate_up = torch.rand(3, 64, device=device).to(dtype), torch.randn(7, 128, device=device).to(dtype)
    angles = torch.rand(7, 32, device=device) * 6
    calls = (
        lambda: backend.rms_norm(heads, weight, 1e-6),
        lambda: backend.rotary(heads.clone(), angles.cos(), angles.sin()),
        lambda: backend.silu_mul(gate_up),
    )
    whole = [call() for call in calls]
    monkeypatch.setattr(torch_backend, "AT_ONCE", at_once)
    for call, expected in zip(calls, whole, strict=True):
        assert torch.equal(call(), expected)


def test_rms_norm_of_nearly_nothing_is_ruled_by_eps(backend, device) -> None:
    weight = torch.ones(64, device=device)
    assert not backend.rms_norm(torch.zeros(2, 64, device=device), weight, 1e-6).any()
    tiny = torch.full((1, 64), 1e-4, device=device)
    for eps in (1e-6, 1e-5, 1e-6):
        assert_close(backend.rms_norm(tiny, weight, eps), references.rms_norm(tiny, weight, eps), NORM)


def test_rms_norm_of_16_bits_sums_in_float32(backend, device) -> None:
    """In half precision even the root of the sum would overflow."""
    x = torch.full((1, 128), 10_000.0, dtype=torch.float16, device=device)
    assert_close(backend.rms_norm(x, torch.ones_like(x[0]), 1e-6), torch.ones(1, 128, dtype=torch.float64), NORM)
