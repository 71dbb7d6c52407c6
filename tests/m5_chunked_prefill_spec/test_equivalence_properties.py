"""However a prompt is cut, whatever is guessed and by whom: everybody gets m1's tokens.

Hypothesis makes the traffic as for m4: prompts that begin alike, conversations that go on, several outputs per prompt,
in pools so small that requests are retracted. On top come both schedules, budgets that cut prompts anywhere, and every
way of guessing, random guesses included. Drawn answers are compared, too, wherever guesses are certain; guesses that a
draft model draws keep the distribution only, which `test_rejection_sampler.py` holds to it.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.equivalence.forced_retraction import ForcedRetractionInPieces, InTurn
from tests.equivalence.harness import Reference, check_cuts
from tests.equivalence.traffic import CLEAR_SETTINGS, EOS, Alone, SharingAsk
from tests.m4_radix_cache.conversations import check_two_turns, conversations
from tests.m4_radix_cache.tiers import COPIES, Tiers, count_copies, tiers_of
from tests.m5_chunked_prefill_spec.engines import Guessing, MakeEngine, check_flushed, check_step, setting

LENGTHS = (1, 7, 16, 20, 33, 50)
GREEDY = [name for name in CLEAR_SETTINGS if "drawn" not in name]


FORCED = {"scheduler": ForcedRetractionInPieces}
PARTS: tuple[dict[str, Any], ...] = (FORCED, {}, FORCED, {"preemption": InTurn})
LIMITS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.sampled_from([8, 4, 8, 2, 1]),
        "policy": st.sampled_from(["fcfs", "lpm", "lpm", "lof", "priority"]),
        "conservativeness": st.sampled_from([0, 0, 0, 1]),
        "schedule": st.sampled_from(["decode_first", "decode_first", "prefill_first"]),
        "chunked_prefill_size": st.none() | st.none() | st.sampled_from([16, 17, 19]),
        "drafts": st.sampled_from([1, 2, 4, 7]),
    }
)
SPECULATORS: dict[str, dict[str, Any]] = {
    "none": {"method": None},
    "ngram": {"method": "ngram"},
    "random": {"method": "ngram", "proposer": Guessing},
    "draft_model": {"method": "draft_model"},
}


TOTALS = {
    "cached": "num_cached_tokens",
    "retracted": "num_retractions",
    "guessed": "num_draft_tokens",
    "accepted": "num_accepted_tokens",
}
"""Of `stats()`."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("speculator", SPECULATORS)
@pytest.mark.parametrize(
    ("cache", "page_size"), [("radix", 1), ("radix", 4), ("radix", 16), ("chunk", 4), ("tiers", 4)]
)
def test_any_traffic_gets_the_tokens_of_m1(
    make_engine: MakeEngine, alone: Alone, tmp_path: Path, cache: str, page_size: int, speculator: str
) -> None:
    references: list[Reference] = []
    seen = Counter[str]()
    own = dict(SPECULATORS[speculator])
    parts_of = {"proposer": own.pop("proposer")} if "proposer" in own else {}

    @settings(max_examples=20 if cache == "tiers" else 15)
    @given(
        traffic=st.lists(
            conversations(LENGTHS, GREEDY if speculator == "draft_model" else list(CLEAR_SETTINGS)),
            min_size=5,
            max_size=8,
        ),
        limits=LIMITS,
        spare_tokens=st.integers(0, 60),
        budget=st.sampled_from([16, 17, 23, 64]),
        parts=st.sampled_from(PARTS),
        tiers=tiers_of(cache, tmp_path),
    )
    def holds(
        traffic: list[SharingAsk],
        limits: dict[str, Any],
        spare_tokens: int,
        budget: int,
        parts: dict[str, Any],
        tiers: Tiers | None,
    ) -> None:
        longest = max(ask.prompt_len for ask in traffic)
        tokens = -(-(longest + 2 + spare_tokens) // page_size) * page_size
        own_cache: Any = {"cache": cache} if tiers is None else tiers.settings
        parts = parts if tiers is None else parts | tiers.parts(page_size)
        configs = setting(
            tokens=tokens, page_size=page_size, max_num_batched_tokens=budget, **own_cache, **own | limits
        )
        with make_engine(parts | parts_of, eos_token_ids=EOS, **configs) as engine:
            modes: list[str] = []
            watch(engine, modes)
            found, _ = check_two_turns(engine, traffic, alone, check_step, tokens=tokens, most=tokens - 2)
            references.extend(found)
            for name, total in TOTALS.items():
                seen[name] += getattr(engine.stats(), total)
            seen["cut"] += modes.count("cut")
            seen["mixed"] += modes.count("mixed")
            seen.update(count_copies(engine))
            check_flushed(engine)

    holds()
    check_cuts(references)
    assert cache != "tiers" or min(seen[name] for name in COPIES[:4]) > 3, seen
    assert min(seen["retracted"], seen["cut"], seen["mixed"]) >= 3, seen
    assert (seen["guessed"] >= 3) == (speculator != "none"), seen
    assert seen["accepted"] > 10 or speculator != "draft_model", seen


def watch(engine: Any, modes: list[str]) -> None:
    """Note what kinds of steps there are."""
    scheduler = engine.engine_core.scheduler
    schedule = scheduler.schedule

    def noted() -> Any:
        batch = schedule()
        if batch is not None:
            modes.append(batch.forward_mode.name.lower())
            modes.extend(["cut"] * (batch.chunked_req is not None))
        return batch

    scheduler.schedule = noted
