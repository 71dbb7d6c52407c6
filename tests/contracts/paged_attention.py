"""Contract of attention over block tables: m3's torch backend, against float64 and one token at a time."""

from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.kv_storage import KVLayer
from tests.contracts.part import Part, close, same

PART = Part(
    name="paged_attention",
    target="m3_paged_attention.attention.torch_backend:TorchBackend",
    lesson="docs/m3_model.md#the-torch-backend-gather-then-multiply",
    starter="MyTorchBackend",
    variant="m3_paged_attention-block-4",
)

PADDING = (-1, 1)
"""A row without a token: its length is 0."""


class Step(NamedTuple):
    """What `attention` is called with, and what it should return."""

    query: Tensor
    layer: KVLayer
    metadata: AttentionMetadata
    scale: float
    expected: Tensor
    text: str


def step(
    *rows: tuple[int, int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    block_size: int = 4,
    scale: float | None = None,
    behind: float = 9.0,
    large: float = 1.0,
    seed: int = 0,
    index: int = 0,
) -> Step:
    """A step of `rows`, each (tokens with KV before, new tokens), those with several new tokens first.

    `heads`: of queries and of KV. `behind`: values where no token is. `large`: a factor of the queries.
    `seed` decides where the blocks are, and with `index`, of the layer, the numbers.
    """
    lengths, new = [before + new for before, new in rows], [new for _, new in rows]
    tables, num_blocks = tables_of([-(-length // block_size) for length in lengths], seed)
    generator = torch.Generator().manual_seed(100 * seed + index)
    memory = torch.full((2, num_blocks, block_size, heads[1], head_dim), behind)
    memory[0] *= 0  # a key of 0 has some weight
    fused = large * torch.randn(sum(new), sum(heads) + heads[1], head_dim, generator=generator)
    query, scale = fused[:, : heads[0]], head_dim**-0.5 if scale is None else scale
    expected = torch.zeros(query.shape, dtype=torch.float64)
    start = 0
    for row, (length, (before, num_new)) in enumerate(zip(lengths, rows, strict=True)):
        positions = np.arange(length)
        keys_values = torch.randn(2, length, heads[1], head_dim, generator=generator)
        memory[:, tables[row, positions // block_size], positions % block_size] = keys_values
        for token in range(num_new if length else 0):
            expected[start + token] = attended(query[start + token], *keys_values[:, : before + token + 1], scale)
        start += num_new
    metadata = AttentionMetadata.build(new, [before for before, _ in rows], tables, np.zeros(sum(new), dtype=np.int64))
    text = f"blocks of {block_size}; heads of {head_dim} numbers, {heads[0]} of queries and {heads[1]} of KV"
    for row, (length, (before, num_new)) in enumerate(zip(lengths, rows, strict=True)):
        kind = f"{before} tokens before, {num_new} new, table {tables[row].tolist()}" if length else "padding, length 0"
        text += f"; row {row}: {kind}"
    return Step(query, KVLayer(*memory), metadata, scale, expected, text)


def tables_of(counts: list[int], seed: int) -> tuple[np.ndarray, int]:
    """Block tables with so many blocks in each row, and the number of blocks in memory: block 0, these and two more."""
    num_blocks = sum(counts) + 3
    ids = iter((1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed))).tolist())
    tables = np.zeros((len(counts), max(counts) + 1), dtype=np.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = [next(ids) for _ in range(count)]
    return tables, num_blocks


def attended(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention of one token `[heads, head_dim]` over keys and values `[length, kv_heads, head_dim]`, in float64."""
    kv_heads = [head // (len(query) // keys.shape[1]) for head in range(len(query))]
    keys, values = keys[:, kv_heads].double(), values[:, kv_heads].double()
    weights = ((keys * query.double()).sum(-1) * scale).softmax(0)
    return (weights[..., None] * values).sum(0)


def check(backend: Any, step: Step, hint: str = "", tolerance: float = 1e-5) -> None:
    """Compare what a backend computes."""
    got = backend.attention(*step[:4])
    close(got, step.expected, on=step.text, hint=hint, tolerance=tolerance)
    same(got.dtype, step.query.dtype, on=f"{step.text}; the type of the result")
    hint = "The next layer views it as [tokens, heads * head_dim], without a copy: return a contiguous tensor."
    same(got.is_contiguous(), True, on=f"{step.text}; is_contiguous() of the result", hint=hint)


def test_one_block_is_read(part: Any) -> None:
    """One new token attends to the tokens of one full block: softmax of the scores, times the values."""
    hint = "A score is the product of the query and a key, times `scale`; the softmax goes over the tokens."
    check(part(), step((3, 1), heads=(1, 1)), hint)
    hint = "Multiply the scores by the argument `scale`, whatever head_dim is."
    one = step((3, 1), heads=(1, 1), scale=2.0)
    check(part(), one._replace(text=f"{one.text}; scale 2"), hint)


def test_blocks_may_be_anywhere(part: Any) -> None:
    """The KV of a request is in the blocks that its table names, wherever they are in memory."""
    hint = "Block number i of the request is block table[i] of the memory: look up each of them."
    for seed in range(3):
        check(part(), step((11, 1), heads=(1, 1), seed=seed), hint)


def test_the_last_block_may_be_partly_filled(part: Any) -> None:
    """A request ends after its length, which may be inside a block: the slots behind it do not count."""
    hint = "The memory behind the last token has KV of others. Cut it off, or give it the score -inf."
    for length in (9, 10, 11, 1):
        check(part(), step((length - 1, 1), heads=(1, 1)), hint)


def test_nothing_behind_the_end_is_seen(part: Any) -> None:
    """What is behind the last token has no effect, whatever it is: NaN, too."""
    hint = "A weight of 0 times NaN is NaN. So a mask of the scores is not enough: the values must not be there either."
    for before in (9, 0, 14):
        check(part(), step((before, 1), heads=(1, 1), behind=torch.nan), hint)


def test_every_head_reads_its_kv_head(part: Any) -> None:
    """Query head h reads KV head h // (heads / kv_heads): adjacent query heads share one."""
    check(part(), step((6, 1), heads=(3, 3)), "Each head has scores and a softmax of its own.")
    hint = "With 4 heads and 2 KV heads, heads 0 and 1 read KV head 0, and heads 2 and 3 read KV head 1."
    for heads in ((4, 2), (6, 2), (4, 1)):
        check(part(), step((6, 1), heads=heads), hint)


def test_requests_do_not_see_each_other(part: Any) -> None:
    """Each row of a step attends to its own blocks up to its own length, in the order of the rows."""
    hint = "Row r of the tables and of the lengths belongs to the tokens query_start_loc[r] to query_start_loc[r + 1]."
    check(part(), step((6, 1), (2, 1), (12, 1), (0, 1), (12, 1)), hint)


def test_padding_rows_are_zero(part: Any) -> None:
    """The result of a row of length 0 is zeros, and the other rows are as without it."""
    hint = "A softmax over nothing is NaN, and memory that was not written has anything: set these rows to zero."
    check(part(), step((6, 1), PADDING, PADDING, behind=torch.nan), hint)
    check(part(), step(PADDING, (6, 1), PADDING, (3, 1)), hint)
    check(part(), step(PADDING), hint)


def test_a_new_token_does_not_see_later_ones(part: Any) -> None:
    """Of several new tokens, each attends to those before it and to itself, not to those behind it."""
    hint = "KV of all new tokens is in memory already. So the scores of later tokens have to be -inf (causal)."
    for new in (2, 4, 11):
        check(part(), step((0, new), heads=(1, 1)), hint)
    check(part(), step((0, 7)), hint)


def test_new_tokens_see_all_that_was_before(part: Any) -> None:
    """New tokens behind earlier ones attend to all earlier ones, too."""
    hint = "The first new token has the position length - num_new, and sees one token more than that number."
    for row in ((5, 3), (4, 4), (1, 2), (20, 9)):
        check(part(), step(row), hint)


def test_a_step_may_have_prompts_and_decodes(part: Any) -> None:
    """Rows with several new tokens come first; the result has all tokens in the order of the query."""
    hint = "Row r has query_lens_host[r] new tokens. They are adjacent in `query`, and those of the next row come next."
    check(part(), step((0, 5), (7, 3), (8, 1), (0, 1), PADDING, (3, 1), behind=torch.nan), hint)


def test_scores_may_be_large(part: Any) -> None:
    """Scores of some hundreds are no problem."""
    hint = "e^100 is infinite in float32. Subtract the largest score first, as torch.softmax does."
    for before in (3, 10):
        check(part(), step((before, 1), heads=(1, 1), large=150.0), hint, tolerance=1e-3)


def test_every_layer_has_its_own_kv(part: Any) -> None:
    """All layers of a step are called with the same `metadata`, and each with its own memory."""
    backend, rows = part(), ((0, 3), (6, 1))
    first, second = step(*rows), step(*rows, index=1)
    hint = "What you keep from one call to the next may depend on `metadata`, but keys and values are of one layer."
    check(backend, first)
    check(backend, second._replace(metadata=first.metadata, text=f"{first.text}; second layer of the step"), hint)


def test_memory_is_only_read(part: Any) -> None:
    """Queries, KV memory and block tables are not changed."""
    one = step((0, 5), (7, 3), (8, 1), PADDING, (3, 1))
    before = [tensor.clone() for tensor in (one.query, *one.layer[:2], one.metadata.block_tables)]
    part().attention(*one[:4])
    hint = "Blocks may be shared: another request may have tokens where yours has none. Change a copy only."
    after = [one.query, *one.layer[:2], one.metadata.block_tables]
    for name, old, new in zip(("query", "key_cache", "value_cache", "block_tables"), before, after, strict=True):
        same(torch.equal(new, old), True, on=f"{one.text}; is `{name}` the same after the call", hint=hint)


def test_steps_of_all_kinds(part: Any) -> None:
    """Any steps, one after the other, with blocks and heads of any size."""
    rng, backends = Random(5), dict[Any, Any]()
    for seed in range(40):
        shape = rng.choice([((4, 2), 8, 4), ((4, 4), 16, 1), ((6, 2), 4, 16), ((2, 1), 6, 3)])
        heads, head_dim, block_size = shape
        prompts = [(rng.choice([0, rng.randrange(20)]), rng.randint(2, 12)) for _ in range(rng.randrange(3))]
        decodes = [PADDING if rng.random() < 0.2 else (rng.randrange(30), 1) for _ in range(rng.randint(1, 5))]
        behind = rng.choice([9.0, torch.nan])
        one = step(*prompts, *decodes, heads=heads, head_dim=head_dim, block_size=block_size, behind=behind, seed=seed)
        new = [count for _, count in (*prompts, *decodes)]
        ends = accumulate(new)
        places = ", ".join(f"{end - count} to {end - 1}" for count, end in zip(new, ends, strict=True))
        hint = f"The first index is a token of the step; those of the rows are {places}."
        check(backends.setdefault(shape, part()), one, hint)
