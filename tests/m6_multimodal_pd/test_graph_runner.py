"""The runner of CUDA graphs: which steps it takes, and what they give: what they give eagerly.

With graphs that are recorded and replayed on the CPU, on the Triton kernels in their interpreter, where a row takes a
tenth of a second and has to be enough, and on faster ones that a graph can hold as well.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from m1_single_request.model_loader import LoadedModel
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.linear import PlainLinear
from m6_multimodal_pd.graph_runner import MOST_TOKENS, Bucket, GraphLimits, GraphRunner, StepInputs, sizes_up_to
from tests.equivalence.models import save_random_model
from tests.m3_paged_attention.test_decoder import Paged, load, tokens_of
from tests.m6_multimodal_pd.recorded_graphs import (
    Allocations,
    RecordedGraph,
    StaticBackend,
    recorded_graphs as recorded_graphs,
)
from tests.support.operations import operations

ROWS, WIDTH = 5, 3
LIMITS = GraphLimits(max_num_seqs=ROWS, max_model_len=64, width=WIDTH)
KINDS = [
    pytest.param("triton", marks=pytest.mark.interpreter),
    "static",
]
SLOW_ON_TRITON = [pytest.param("triton", marks=[pytest.mark.interpreter, pytest.mark.exhaustive]), "static"]


# --- buckets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 8, 9, 12, 16, 100, 200, 256, 257])
def test_every_step_has_a_bucket_whatever_the_largest_is(most: int) -> None:
    """An engine whose sizes went up in steps of 16 from 16 on had none for 12, 100 or 200 requests."""
    sizes = sizes_up_to(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for num_tokens in range(1, most + 1):
        size = next(size for size in sizes if size >= num_tokens)
        assert size - num_tokens < 8 and size < 2 * num_tokens


def test_the_largest_bucket_is_captured_first() -> None:
    """So that the others fit into its memory."""
    buckets = LIMITS.buckets()
    assert buckets[0] == Bucket(ROWS * WIDTH, WIDTH) and buckets[-1] == Bucket(1, 1)
    assert [bucket.num_tokens for bucket in buckets] == sorted((b.num_tokens for b in buckets), reverse=True)
    wide = {Bucket(size, WIDTH) for size in (1, 2, 4, 8, 15)}
    assert set(buckets) == wide | {Bucket(size, 1) for size in (1, 2, 4, 5)}
    assert len(GraphLimits(max_num_seqs=ROWS, max_model_len=64).buckets()) == 4


def test_large_verifications_are_not_captured() -> None:
    limits = GraphLimits(max_num_seqs=200, max_model_len=64, width=65)
    assert limits.sizes(65)[-1] == MOST_TOKENS and limits.sizes(1)[-1] == 200


def test_decodes_of_more_requests_than_the_largest_bucket_are_not_captured() -> None:
    limits = GraphLimits(max_num_seqs=MOST_TOKENS + 100, max_model_len=64)
    assert limits.buckets()[0] == Bucket(MOST_TOKENS, 1) and len(limits.buckets()) == 3 + MOST_TOKENS // 8
    assert limits.num_rows(limits.buckets()[0]) == MOST_TOKENS


# --- what is replayed -------------------------------------------------------------------------------------------------


class Pair:
    """One model over two KV memories: steps over the first are replayed, steps over the second run eagerly."""

    def __init__(self, loaded: LoadedModel, graphs: list[RecordedGraph], limits: GraphLimits = LIMITS) -> None:
        self.loaded, self.graphs = loaded, graphs
        self.replayed, self.eager = Paged(loaded), Paged(loaded)
        for paged in (self.replayed, self.eager):
            paged.kv.blocks[:, 1:] = torch.nan  # but for what was written
        with torch.inference_mode():
            self.runner = self.replayed.kv.step = GraphRunner(loaded.model, self.replayed.kv, limits)

    def step(self, new: dict[str, int]) -> int:
        """Run so many new tokens of each request, which gives the same numbers; return how many graphs ran.

        In the interpreter of the Triton kernels the same bits: what they compute for a row depends on that row alone.
        """
        before, is_triton = self.num_replays(), not isinstance(self.loaded.model.backend, StaticBackend)
        tolerance = 0.0 if is_triton else 1e-4
        batch = {rid: tokens_of(count + 10 * len(self.replayed.lengths), count) for rid, count in new.items()}
        logits, expected = (paged.step(batch) for paged in (self.replayed, self.eager))
        for rid in batch:
            torch.testing.assert_close(logits[rid], expected[rid], rtol=0, atol=tolerance)
        kv = [paged.kv.blocks[:, 1:] for paged in (self.replayed, self.eager)]
        torch.testing.assert_close(*kv, rtol=0, atol=tolerance, equal_nan=True)
        return self.num_replays() - before

    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)


def row_by_row(self: PlainLinear, hidden: Tensor) -> Tensor:
    """A product whose rows do not depend on their number, unlike those of a library."""
    return torch.cat([torch.nn.functional.linear(row, self.weight, self.bias) for row in hidden.split(1)])


@pytest.fixture(params=KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """One layer, or two, on one kind of kernels."""
    tiny = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
    num_layers = 1 if request.param == "triton" else 2
    directory = save_random_model(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=num_layers, **tiny)
    return load_on(request.param, directory)


def load_on(kind: str, directory: Path) -> LoadedModel:
    if kind == "triton":
        if importlib.util.find_spec("triton") is None:
            pytest.skip("triton is not installed")
        return load(directory, attention_backend="triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("m3_paged_attention.model_loader.resolve", lambda name, device: StaticBackend())
        return load(directory)


@pytest.fixture
def pair(loaded: LoadedModel, recorded_graphs: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(PlainLinear, "__call__", row_by_row)
    yield Pair(loaded, recorded_graphs)


@pytest.mark.parametrize("loaded", SLOW_ON_TRITON, indirect=True)
def test_every_bucket_gives_the_numbers_of_an_eager_step(pair: Pair) -> None:
    """Full or padded, with rows of one token beside drafts, whatever other graphs have left in the memory that they
    share."""
    assert pair.step({"a": 9, "b": 6, "c": 4, "d": 5, "e": 7}) == 0  # a prompt
    used = set()
    for size, width in ((5, 1), (5, 3), (1, 2), (3, 1), (4, 2), (1, 1), (2, 2), (1, 3), (2, 1)):
        batch = dict.fromkeys("abcde"[:size], width)
        used.add(pair.runner.bucket(metadata_of(batch)))
        assert pair.step(batch) == 1
    assert set(LIMITS.buckets()) - used == {Bucket(1, WIDTH)}, "a row of several tokens has at least two"
    assert pair.step({"a": 3, "b": 2, "c": 1, "d": 1}) == 1
    assert pair.step({"a": 1, "b": 2, "c": 1}) == 1


def metadata_of(batch: dict[str, int], context: int = 0) -> AttentionMetadata:
    """A layout of so many new tokens of each request."""
    rows, total = len(batch), sum(batch.values())
    tables, slots = np.zeros((rows, 1), dtype=np.int32), np.zeros(total, dtype=np.int64)
    return AttentionMetadata.build(list(batch.values()), [context] * rows, tables, slots)


STATIC = ["static"]
static_only = pytest.mark.parametrize("loaded", STATIC, indirect=True)


@static_only
@pytest.mark.parametrize(
    ("new", "num_replays"),
    [
        ({"a": 4, "b": 1}, 0),
        ({"a": WIDTH + 1}, 0),
        ({"a": WIDTH}, 1),
        (dict.fromkeys("abcde", 1), 1),
        (dict.fromkeys("abcdef", 1), 0),
        (dict.fromkeys("abcdef", 2), 0),
        ({"a": WIDTH, "b": 2, "c": 1}, 1),
    ],
    ids=str,
)
def test_longer_rows_and_larger_batches_run_eagerly(pair: Pair, new: dict[str, int], num_replays: int) -> None:
    assert pair.step(new) == num_replays


@static_only
def test_a_layer_that_is_replaced_is_called(pair: Pair) -> None:
    """A hook, for example; where it is removed, the graphs are used again."""
    layers: list[Any] = pair.loaded.model.layers
    original, seen = layers[0], []

    def hook(*inputs: Any) -> Any:
        seen.append(inputs)
        return original(*inputs)

    layers[0] = hook
    assert pair.step({"a": 1}) == 0 and len(seen) == 2
    layers[0] = original
    assert pair.step({"a": 1}) == 1


# --- addresses --------------------------------------------------------------------------------------------------------


def addresses(runner: GraphRunner) -> list[int]:
    return [tensor.data_ptr() for tensor in (*runner.inputs.tensors(), runner.output)]


@static_only
def test_addresses_never_change_and_a_replay_allocates_nothing(pair: Pair) -> None:
    pair.step({"a": 9, "b": 6, "c": 4})
    before = addresses(pair.runner)
    for batch in ({"a": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 3, "b": 2, "c": 1}, {"b": 1, "c": 1}):
        layout = metadata_of(batch, context=20)
        tokens = torch.arange(layout.slot_mapping.shape[0])
        with torch.inference_mode(), Allocations() as allocations:
            hidden = pair.runner(tokens, tokens, layout)
        assert not allocations.names
        assert hidden.data_ptr() == pair.runner.output.data_ptr() and len(hidden) == len(tokens)
    assert addresses(pair.runner) == before


@given(st.lists(st.integers(1, WIDTH), min_size=1, max_size=ROWS))
def test_the_padding_of_any_batch_has_no_length_and_writes_to_page_0(counts: list[int]) -> None:
    inputs = StepInputs(LIMITS, 4, torch.device("cpu"))
    for tensor in inputs.tensors():
        tensor.fill_(77)
    layout = metadata_of({str(i): count for i, count in enumerate(sorted(counts, reverse=True))})
    total, rows, width = sum(counts), len(counts), 1 if max(counts) == 1 else WIDTH
    bucket = Bucket(next(size for size in LIMITS.sizes(width) if size >= total), width)
    tokens = torch.arange(total)
    inputs.pad_batch(tokens, tokens, layout, bucket)
    padded = inputs.metadata(bucket)
    assert padded.slot_mapping[total:].tolist() == [0] * (bucket.num_tokens - total)
    assert not padded.seq_lens[rows:].any() and len(padded.seq_lens) == min(bucket.num_tokens, ROWS)
    if width > 1:
        assert padded.query_start_loc.diff().tolist() == [*layout.query_lens_host, *[0] * (len(padded.seq_lens) - rows)]


@static_only
@pytest.mark.parametrize(
    ("batch", "launches"),
    [
        (dict.fromkeys("abc", 1), {"_foreach_copy_": 2, "copy_": 1}),
        ({"a": 3, "b": 2, "c": 1}, {"_foreach_copy_": 2, "copy_": 1, "fill_": 1}),
    ],
    ids=["decodes", "drafts"],
)
def test_beside_a_replay_there_are_few_launches(pair: Pair, batch: dict[str, int], launches: dict[str, int]) -> None:
    """Whatever the batch has of rows, tokens and padding."""
    layout = metadata_of(batch, context=20)
    tokens = torch.arange(layout.slot_mapping.shape[0])
    with torch.inference_mode(), operations() as seen:
        pair.runner(tokens, tokens, layout)
    views = ("slice", "select", "unbind", "alias", "view", "detach")
    assert {name: count for name, count in seen.items() if name not in views} == launches
