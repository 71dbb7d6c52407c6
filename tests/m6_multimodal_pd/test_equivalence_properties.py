"""However prompts with pictures are cut, shared, guessed for, retracted, encoded: everybody gets transformers' tokens.

Hypothesis makes the traffic: conversations with images and clips among texts, that begin alike and differ in a picture,
in pools so small that requests are retracted. On top come budgets that cut inside pictures, budgets that let the tower
encode next to nothing in a step, and caches of embeddings that hold next to nothing.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from m6_multimodal_pd import KVCapacityError
from tests.equivalence.forced_retraction import ForcedRetractionInPieces, InTurn
from tests.equivalence.harness import Reference, check_cuts
from tests.equivalence.traffic import check_ask, serve
from tests.m4_radix_cache.tiers import COPIES, Tiers, count_copies, tiers_of
from tests.m6_multimodal_pd.engines import Guessing, MakeEngine, check_drained, check_flushed, check_step, setting
from tests.m6_multimodal_pd.recorded_graphs import (
    graphs_of_engines as graphs_of_engines,
    recorded_graphs as recorded_graphs,
    wanted_graphs as wanted_graphs,
)
from tests.m6_multimodal_pd.seeing import EOS, MOST_TOKENS, AloneInTheirs, SeeingAsk

TURNS: tuple[tuple[str | int, ...], ...] = (
    (1, "a", 2),
    (1, "b", 2),
    ("a", "c", 1),
    ("a", "b", 1),
    ("v", 3),
    ("d", 1, "w"),
    (1, 2, 3, 4),
    (1, 2, 5),
)
CONVERSATIONS = st.builds(
    lambda first, more: (first, *more), st.sampled_from(TURNS), st.lists(st.sampled_from(TURNS), max_size=1)
)
ASKS = st.builds(
    SeeingAsk,
    prompt_len=st.just(0),
    which=st.just(0),
    setting=st.sampled_from(["greedy", "greedy, on past eos"]),
    n=st.sampled_from([1, 1, 1, 2]),
    max_tokens=st.integers(1, MOST_TOKENS),
    arrival=st.integers(0, 4),
    patience=st.none() | st.none() | st.none() | st.integers(0, 9),
    conversation=CONVERSATIONS,
    cache_salt=st.sampled_from([None, None, None, "tenant"]),
)
FORCED = {"scheduler": ForcedRetractionInPieces}
PARTS: tuple[dict[str, Any], ...] = (FORCED, {}, FORCED, {"preemption": InTurn})
LIMITS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.sampled_from([8, 4, 8, 2, 1]),
        "policy": st.sampled_from(["fcfs", "lpm", "lpm", "lof"]),
        "conservativeness": st.sampled_from([0, 0, 0, 1]),
        "schedule": st.sampled_from(["decode_first", "decode_first", "prefill_first"]),
        "chunked_prefill_size": st.none() | st.none() | st.sampled_from([16, 17, 19]),
    }
)
SIGHT = st.fixed_dictionaries(
    {
        "encoder_budget": st.sampled_from([1, 10, 15, 1000]),
        "embedding_cache_bytes": st.sampled_from([20, 25, 40, 1000]).map(lambda tokens: tokens * 3 * 64 * 4),
    }
)
"""Embeddings of the tiny model: the token's own and two of DeepStack, of 64 numbers each. The largest item has 20."""

SPECULATORS: dict[str, dict[str, Any]] = {
    "none": {"method": None},
    "ngram": {"method": "ngram"},
    "random": {"method": "ngram", "proposer": Guessing},
}


TOTALS = {
    "cached": "num_cached_tokens",
    "retracted": "num_retractions",
    "guessed": "num_draft_tokens",
    "runs": "num_encoder_runs",
    "hits": "num_encoder_hits",
    "evicted": "num_evicted_items",
}
"""Of `stats()`."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("speculator", SPECULATORS)
@pytest.mark.parametrize(("cache", "page_size"), [("radix", 1), ("radix", 16), ("hash", 4), ("chunk", 4), ("tiers", 4)])
def test_any_traffic_gets_the_tokens_of_transformers(
    make_engine: MakeEngine, alone: AloneInTheirs, tmp_path: Path, cache: str, page_size: int, speculator: str
) -> None:
    check_any_traffic(make_engine, alone, tmp_path, cache, page_size, speculator)


def check_any_traffic(
    make_engine: MakeEngine, alone: AloneInTheirs, tmp_path: Path, cache: str, page_size: int, speculator: str
) -> None:
    """Serve traffic that hypothesis makes."""
    references: list[Reference] = []
    seen = Counter[str]()
    own = dict(SPECULATORS[speculator])
    parts_of = {"proposer": own.pop("proposer")} if "proposer" in own else {}

    @settings(max_examples=30 if cache == "tiers" else 10)
    @given(
        traffic=st.lists(ASKS, min_size=4, max_size=7),
        limits=LIMITS,
        sight=SIGHT,
        spare_tokens=st.integers(0, 90),
        budget=st.sampled_from([16, 17, 23, 64]),
        parts=st.sampled_from(PARTS),
        tiers=tiers_of(cache, tmp_path),
    )
    def holds(
        traffic: list[SeeingAsk],
        limits: dict[str, Any],
        sight: dict[str, int],
        spare_tokens: int,
        budget: int,
        parts: dict[str, Any],
        tiers: Tiers | None,
    ) -> None:
        longest = max(len(ask.prompt) for ask in traffic)
        tokens = -(-(longest + 2 + spare_tokens) // page_size) * page_size

        def may_fail(ask: Any, error: Any, num_tokens: int) -> bool:
            return isinstance(error, KVCapacityError) and len(ask.prompt) + num_tokens > tokens

        own_cache: Any = {"cache": cache} if tiers is None else tiers.settings
        parts = parts if tiers is None else parts | tiers.parts(page_size)
        configs = setting(
            tokens=tokens,
            page_size=page_size,
            max_num_batched_tokens=budget,
            multimodal=sight,
            **own_cache,
            **own | limits,
        )
        with make_engine(parts | parts_of, eos_token_ids=EOS, **configs) as engine:
            watch(engine, seen)
            outputs = serve(engine, traffic, check_step)
            check_drained(engine)
            for ask, output in zip(traffic, outputs, strict=True):
                references.extend(check_ask(ask, output, alone, may_fail))  # type: ignore[arg-type]
            for name, total in TOTALS.items():
                seen[name] += getattr(engine.stats(), total)
            seen.update(count_copies(engine))
            check_flushed(engine)

    holds()
    check_cuts(references)
    wanted = {"retracted", "cut inside", "mixed", "runs", "hits", "evicted", *(COPIES[:4] if cache == "tiers" else ())}
    assert min(seen[name] for name in wanted) >= 3, seen
    assert (seen["guessed"] >= 10) == (speculator != "none"), seen
    assert (seen["cached"] > 0) == (cache != "chunk"), seen


def watch(engine: Any, seen: dict[str, int]) -> None:
    """Count steps that mix, and pieces that end inside a picture; and hold every step to its budget."""
    scheduler, cache = engine.engine_core.scheduler, engine.engine_core.encoder.cache
    budget, schedule = engine.config.multimodal.encoder_budget, scheduler.schedule

    def noted() -> Any:
        batch = schedule()
        if batch is None:
            return batch
        seen["mixed"] += batch.forward_mode.name == "MIXED"
        new: dict[str, int] = {}
        for req, length in zip(batch.reqs[: batch.num_prompts], batch.new_lens.tolist(), strict=False):
            if req.multimodal_inputs is not None:
                start = len(req.prefix_indices)
                end = start + length
                items = req.multimodal_inputs.within(start, end)
                new |= {item.hash: item.num_tokens for item in items if item.hash not in cache}
                seen["cut inside"] += any(low < end < high for item in items for low, high in item.offsets)
        assert sum(new.values()) <= budget or len(new) == 1, f"{new} are more than {budget}"
        return batch

    scheduler.schedule = noted
