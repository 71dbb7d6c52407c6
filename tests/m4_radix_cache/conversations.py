"""Conversations that begin alike, for the equivalence tests: first requests, and the next turns of two of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from m4_radix_cache import KVCapacityError
from tests.equivalence.harness import Reference
from tests.equivalence.traffic import Alone, SharingAsk, asks_of, check_ask, serve
from tests.m4_radix_cache.engines import check_drained


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


def check_two_turns(
    engine: Any, asks: Sequence[SharingAsk], alone: Alone, check_step: Callable[[Any], None], *, tokens: int, most: int
) -> tuple[list[Reference], int]:
    """Hold the answers and those to the next turns of at `most` so many tokens to m1's; the engine has memory for
    `tokens`. Returns what they were held to, and how many tokens of the next turns were cached.
    """
    references: list[Reference] = []
    num_cached = 0

    def may_fail(ask: SharingAsk, error: Any, num_tokens: int) -> bool:
        return isinstance(error, KVCapacityError) and len(ask.prompt) + num_tokens > tokens

    for turn in range(2):
        outputs = serve(engine, asks, check_step)
        check_drained(engine)
        for ask, output in zip(asks, outputs, strict=True):
            references.extend(check_ask(ask, output, alone, may_fail))
        num_cached += turn * sum(output.metrics.cached_tokens for output in outputs)
        asks = [ask for ask in next_turns(asks, outputs) if len(ask.prompt) <= most]
        if not asks:
            break
    return references, num_cached
