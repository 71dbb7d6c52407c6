"""What the vision tower has made is kept by content, counted to the byte, and never thrown out while it is used."""

import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from m1_single_request.tracer import Tracer
from m6_multimodal_pd.multimodal.embedding_cache import EmbeddingCache
from tests.support.amounts import examples

WIDTH = 4
ROW_BYTES = WIDTH * 4


def rows(count: int) -> torch.Tensor:
    return torch.zeros(count, WIDTH)


def make_cache(num_rows: int, tracer: Tracer | None = None) -> EmbeddingCache:
    return EmbeddingCache(capacity_bytes=num_rows * ROW_BYTES, tracer=tracer or Tracer())


class AgainstAList(RuleBasedStateMachine):
    """Any sequence of uses, against a list that is searched from its old end."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(8)
        self.entries: list[tuple[str, int]] = []  # the least recently used first

    @rule(content=st.sampled_from("abcdef"))
    def get(self, content: str) -> None:
        known, found = dict(self.entries), self.cache.get(content)
        assert (None if found is None else len(found)) == known.get(content)
        if content in known:
            self.entries = [e for e in self.entries if e[0] != content] + [(content, known[content])]

    @rule(content=st.sampled_from("abcdef"), size=st.integers(1, 9), in_use=st.sets(st.sampled_from("abcdef")))
    def put(self, content: str, size: int, in_use: set[str]) -> None:
        if content in dict(self.entries):
            assert self.cache.put(content, rows(size), in_use)
            return
        kept, leaving = list(self.entries), []
        for entry in self.entries:
            if sum(n for _, n in kept) + size > 8 and entry[0] not in in_use:
                kept.remove(entry)
                leaving.append(entry)
        fits = sum(n for _, n in kept) + size <= 8
        assert self.cache.put(content, rows(size), in_use) == fits
        if fits:
            self.entries = [*kept, (content, size)]

    @invariant()
    def the_same_is_there(self) -> None:
        self.cache.check_invariants()
        assert self.cache.used_bytes == sum(n for _, n in self.entries) * ROW_BYTES
        assert all(content in self.cache for content, _ in self.entries) and len(self.cache) == len(self.entries)


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=examples(50), stateful_step_count=30)
