"""What stands in the tree: every path from the root, as tokens and slots, read without touching it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import decode
from tests.m5_chunked_prefill_spec.engines import scheduler_of


def cached_paths(engine: Any) -> list[tuple[list[int], list[int]]]:
    """The tokens of each path to a leaf, and their slots."""
    tree = scheduler_of(engine).tree_cache
    assert isinstance(tree, RadixCache)
    found = []
    for leaf in (node for node in tree.nodes() if not node.children):
        tokens: list[int] = []
        slots: list[int] = []
        node: Any = leaf
        while node.parent is not None:
            tokens, slots = decode(node.key) + tokens, np.asarray(node.value).tolist() + slots
            node = node.parent
        assert len(tokens) == len(slots)
        found.append((tokens, slots))
    return found


def check_keys(engine: Any, texts: Iterable[Sequence[int]]) -> None:
    """The tree holds the beginnings of these sequences, all but their last tokens, and nothing else.

    `texts`: prompt and output of every request that ended.
    """
    page_size = scheduler_of(engine).pools.token_to_kv_pool_allocator.page_size
    computed = [list(text)[: (len(text) - 1) // page_size * page_size] for text in texts]
    paths = [tokens for tokens, _ in cached_paths(engine)]
    for tokens in paths:
        assert any(known[: len(tokens)] == tokens for known in computed), f"{tokens} is the beginning of no text"
    for known in computed:
        assert any(tokens[: len(known)] == known for tokens in paths) or not known, f"{known} is not there"
