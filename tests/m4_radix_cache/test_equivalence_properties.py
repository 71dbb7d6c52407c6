"""Whatever of a prompt was cached, and whoever shares it: everybody gets m1's tokens.

Hypothesis makes the traffic, with the strategies and the comparison of `tests/equivalence/traffic.py`: prompts that
begin alike, conversations that go on, several outputs per prompt, priorities and namespaces, in pools so small that
cached tokens are evicted and requests are retracted. Every step is audited. That tokens were shared, evicted and given
up is counted, because traffic in which nothing of that happens would prove nothing.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from m4_radix_cache import SamplingParams
from tests.equivalence.draws import noting
from tests.equivalence.forced_retraction import ForcedRetraction, InTurn
from tests.equivalence.harness import Reference, check_cuts
from tests.equivalence.traffic import CLEAR_SETTINGS, EOS, Alone, SharingAsk, prompt_of
from tests.m4_radix_cache.conversations import check_two_turns, conversations
from tests.m4_radix_cache.engines import MakeEngine, check_flushed, check_step, setting
from tests.m4_radix_cache.tiers import COPIES, Tiers, count_copies, tiers_of
from tests.support.amounts import examples

ASKS = conversations((1, 7, 8, 16, 20, 33), CLEAR_SETTINGS)
POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "priority")
FORCED = {"scheduler": ForcedRetraction}
PARTS: tuple[dict[str, Any], ...] = (FORCED, {}, FORCED, {"preemption": InTurn}, FORCED)
EVICTIONS = ("lru", "lfu", "fifo", "slru", "priority")
LIMITS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.sampled_from([8, 4, 8, 2, 1]),
        "policy": st.sampled_from(POLICIES),
        "conservativeness": st.sampled_from([0, 0, 0, 1]),
    }
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("cache", "page_size"),
    [("radix", 1), ("radix", 4), ("radix", 16), ("hash", 4), ("chunk", 4), *(("tiers", size) for size in (1, 4, 16))],
    ids=lambda value: str(value),
)
def test_any_traffic_gets_the_tokens_of_m1(
    make_engine: MakeEngine, alone: Alone, tmp_path: Path, cache: str, page_size: int
) -> None:
    references: list[Reference] = []
    seen = Counter[str]()

    @settings(max_examples=10 if cache != "tiers" else examples(60))
    @given(
        asks=st.lists(ASKS, min_size=5, max_size=8),
        limits=LIMITS,
        eviction_policy=st.sampled_from(EVICTIONS if cache in ("radix", "tiers") else EVICTIONS[:1]),
        spare_tokens=st.integers(0, 60),
        spare_budget=st.none() | st.integers(0, 3),
        parts=st.sampled_from(PARTS),
        tiers=tiers_of(cache, tmp_path),
    )
    def holds(
        asks: list[SharingAsk],
        limits: dict[str, Any],
        eviction_policy: str,
        spare_tokens: int,
        spare_budget: int | None,
        parts: dict[str, Any],
        tiers: Tiers | None,
    ) -> None:
        longest = max(ask.prompt_len for ask in asks)
        budget = None if spare_budget is None else max(limits["max_num_seqs"], longest) + spare_budget
        tokens = -(-(longest + 2 + spare_tokens) // page_size) * page_size
        configs = setting(
            tokens=tokens,
            page_size=page_size,
            max_num_batched_tokens=budget,
            eviction_policy=eviction_policy,
            **limits,
            **({"cache": cache} if tiers is None else tiers.settings),
        )
        parts = parts if tiers is None else parts | tiers.parts(page_size)
        with make_engine(parts, eos_token_ids=EOS, **configs) as engine:
            most = min(tokens - 2, budget or tokens)
            found, num_cached = check_two_turns(engine, asks, alone, check_step, tokens=tokens, most=most)
            references.extend(found)
            seen["next turns"] += num_cached
            stats = engine.stats()
            seen["cached"] += stats.num_cached_tokens
            seen["evicted"] += stats.num_evicted_tokens
            seen["retracted"] += stats.num_retractions
            seen.update(count_copies(engine))
            check_flushed(engine)

    holds()
    check_cuts(references)
    assert seen["retracted"] > 4, seen
    if cache == "tiers":
        assert min(seen[name] for name in COPIES[:4]) > 5 and seen["failed"], seen
    if cache == "chunk":
        assert seen["cached"] == seen["evicted"] == seen["next turns"] == 0, seen
    else:
        assert min(seen["cached"], seen["evicted"], seen["next turns"]) > 20, seen


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_logits_behind_a_hit_are_those_of_m1(make_engine: MakeEngine, make_m1: Any, cache: str, page_size: int) -> None:
    """Every row of logits: of a prompt that is new, one that is cached whole, one that parts from it, a next turn."""
    first, params = prompt_of(21), SamplingParams(max_tokens=9, ignore_eos=True)
    prompts = [first, first, [*first[:18], *prompt_of(5)], [*first, *prompt_of(30)], [*first, *prompt_of(30), 7]]
    theirs: list[Tensor] = []
    ours: list[Tensor] = []
    m1 = make_m1({"sampler": noting(theirs)})
    engine = make_engine({"sampler": noting(ours)}, **setting(4, page_size=page_size, cache=cache))
    for prompt in prompts:
        assert engine.generate(prompt, params).token_ids == m1.generate(prompt, params).token_ids
    assert (engine.stats().num_cached_tokens > 60) == (cache != "chunk")
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=0, atol=1e-4)
