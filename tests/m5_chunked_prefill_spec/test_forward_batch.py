"""A step as tensors: positions, tables and slots of rows in any order, and whose logits are asked for.

Every step of the test-bed with `tensors=True` is compared with a layout that is made by loops (`PiecesRunner`). Here
are the cases with numbers, and random ones.
"""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from m5_chunked_prefill_spec.forward_batch import ForwardBatch, SomeTokens, nothing_in_page_0, one_after_another, ranges
from m5_chunked_prefill_spec.req_to_token_pool import ReqToTokenPool
from tests.testbed.fakes import CPU


def laid_out(
    lens: list[tuple[int, int]], sample_lens: list[int], *, page_size: int = 4, seed: int = 0
) -> tuple[ForwardBatch, SomeTokens, ReqToTokenPool]:
    """Requests with so many tokens that have KV, and so many in all after the step; each in pages of its own."""
    rng, width = random.Random(seed), 64
    pool = ReqToTokenPool(size=len(lens) + 1, max_context_len=width)
    pool.alloc(len(lens) + 1)
    pages = rng.sample(range(1, 200), k=sum(-(-seq // page_size) for _, seq in lens))
    rows = rng.sample(range(len(lens) + 1), k=len(lens))
    out = []
    for row, (prefix, seq) in zip(rows, lens, strict=True):
        own = [pages.pop() for _ in range(-(-seq // page_size))]
        slots = np.array([own[i // page_size] * page_size + i % page_size for i in range(seq)])
        pool.write(row, 0, slots)
        out.append(slots[prefix:])
    batch = SomeTokens(
        input_ids=np.arange(100, 100 + sum(seq - prefix for prefix, seq in lens)),
        req_pool_indices=np.array(rows),
        seq_lens=np.array([seq for _, seq in lens]),
        new_lens=np.array([seq - prefix for prefix, seq in lens]),
        out_cache_loc=np.concatenate(out),
        sample_lens=sample_lens,
    )
    runner: Any = SimpleNamespace(device=CPU, page_size=page_size, req_to_token_pool=pool)
    return ForwardBatch.init_new(batch, runner), batch, pool


# --- ranges -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), min_size=1))
def test_ranges_are_what_a_loop_would_count(pairs: list[tuple[int, int]]) -> None:
    """Of length 0 too: a piece of a prompt has no logits that are looked at."""
    starts, lens = (np.array(column) for column in zip(*pairs, strict=True))
    assert ranges(starts, lens).tolist() == [start + i for start, count in pairs for i in range(count)]


# --- positions --------------------------------------------------------------------------------------------------------


@given(
    lens=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 7)), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 4, 16]),
    data=st.data(),
)
def test_rows_in_any_order_are_laid_out_as_by_hand(lens: list[tuple[int, int]], page_size: int, data: Any) -> None:
    """The long rows first: pieces of prompts, whole ones, decodes with guesses; then the decodes of one token."""
    sample_lens = [data.draw(st.integers(0, new)) for _, new in lens]
    layout, batch, pool = laid_out([(prefix, prefix + new) for prefix, new in lens], sample_lens, page_size=page_size)
    tokens, first = [], 0  # by request: (token, position, slot)
    for prefix, new in lens:
        places = range(first, first + new)
        tokens.append([(100 + i, prefix + i - first, int(batch.out_cache_loc[i])) for i in places])
        first += new
    order = sorted(range(len(lens)), key=lambda i: lens[i][1] == 1)
    by_hand = [token for i in order for token in tokens[i]]
    metadata: Any = layout.attn_metadata
    found = zip(layout.input_ids.tolist(), layout.positions.tolist(), metadata.slot_mapping.tolist(), strict=True)
    assert list(found) == by_hand
    wanted = [token for own, count in zip(tokens, sample_lens, strict=True) for token in own[len(own) - count :]]
    index = layout.logits_indices
    assert [by_hand[i] for i in (range(len(by_hand)) if index is None else index.tolist())] == wanted
    assert [by_hand[start] for start in layout.starts] == [own[0] for own in tokens]
    assert metadata.query_lens_host == tuple(lens[i][1] for i in order)
    assert metadata.num_decodes == len(lens) - metadata.num_prefills == sum(new == 1 for _, new in lens)
    for i, table in zip(order, metadata.block_tables.tolist(), strict=True):
        slots = pool.read(int(batch.req_pool_indices[i]), 0, sum(lens[i]))
        pages = (slots[::page_size] // page_size).tolist()
        assert table == pages + [0] * (len(table) - len(pages)), "page 0 behind the last"


@given(
    lens=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 7)), min_size=1, max_size=6),
    page_size=st.sampled_from([1, 4, 16]),
    data=st.data(),
)
def test_tokens_in_turn_are_laid_out_as_each_alone(lens: list[tuple[int, int]], page_size: int, data: Any) -> None:
    """Some rows, each from one of its new tokens on, over some of those behind it; most first."""
    _, batch, pool = laid_out([(before, before + new) for before, new in lens], [0] * len(lens), page_size=page_size)
    runner: Any = SimpleNamespace(device=CPU, page_size=page_size, req_to_token_pool=pool)
    chosen = data.draw(st.lists(st.sampled_from(range(len(lens))), unique=True, max_size=len(lens)))
    offsets = {row: data.draw(st.integers(0, lens[row][1] - 1)) for row in chosen}
    counts = {row: data.draw(st.integers(0, lens[row][1] - offsets[row])) for row in chosen}
    rows = sorted(chosen, key=lambda row: -counts[row])
    begins = np.cumsum(batch.new_lens) - batch.new_lens
    places = np.array([begins[row] + offsets[row] for row in rows], dtype=np.int64)
    as_arrays = np.array(rows, dtype=np.int64), places, np.array([counts[row] for row in rows], dtype=np.int64)
    layouts = one_after_another(batch, *as_arrays, runner)
    assert len(layouts) == max(counts.values(), default=0)
    for step, (positions, found) in enumerate(layouts):
        now = [row for row in rows if counts[row] > step]
        at = [begins[row] + offsets[row] + step for row in now]
        alone = SomeTokens(
            input_ids=batch.input_ids[at],
            req_pool_indices=batch.req_pool_indices[now],
            seq_lens=np.array([lens[row][0] + offsets[row] + step + 1 for row in now]),
            new_lens=np.ones(len(now), dtype=np.int64),
            out_cache_loc=batch.out_cache_loc[at],
            sample_lens=[1] * len(now),
        )
        wanted = ForwardBatch.init_new(alone, runner)
        assert positions.tolist() == wanted.positions.tolist()
        metadata: Any = wanted.attn_metadata
        for name in ("query_start_loc", "seq_lens", "slot_mapping"):
            assert getattr(found, name).tolist() == getattr(metadata, name).tolist(), name
        width = metadata.block_tables.shape[1]
        assert found.block_tables[:, :width].tolist() == metadata.block_tables.tolist(), "wider, for what comes"


def test_tokens_that_only_show_what_they_cost_lie_in_page_0() -> None:
    tokens = nothing_in_page_0(2, 3, 10, 4)
    runner: Any = SimpleNamespace(device=CPU, page_size=4, req_to_token_pool=None)
    layout = ForwardBatch.init_new(tokens, runner)
    metadata: Any = layout.attn_metadata
    assert layout.positions.tolist() == [10, 11, 12] * 2
    assert not metadata.block_tables.any() and set(metadata.slot_mapping.tolist()) <= set(range(4))
