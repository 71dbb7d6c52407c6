"""Conversations that begin alike, for the equivalence tests: first requests, and the next turns of two of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.equivalence.traffic import SharingAsk, asks_of


def conversations(lengths: Sequence[int], names: Any) -> Any:
    """Asks with prompts of these lengths and settings of these names: some with several outputs, some given up."""
    return asks_of(
        lengths,
        names,
        n=st.sampled_from([1, 1, 1, 2, 3]),
        arrival=st.integers(0, 4),
        patience=st.none() | st.none() | st.none() | st.integers(0, 9),
        kind=SharingAsk,
        which=st.integers(0, 3),
        priority=st.integers(-1, 1),
        cache_salt=st.sampled_from([None, None, None, "tenant"]),
    )


def next_turns(asks: Sequence[SharingAsk], outputs: Sequence[Any]) -> list[SharingAsk]:
    """Two of the conversations with a next turn: prompt, output and two more tokens."""
    ended = [(a, o) for a, o in zip(asks, outputs, strict=True) if o.finish_reason in ("stop", "length")]
    return [
        replace(ask, before=(*ask.prompt, *output.token_ids), prompt_len=2, arrival=0, patience=None)
        for ask, output in ended[:2]
    ]
