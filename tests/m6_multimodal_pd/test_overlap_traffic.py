"""Overlapped steps give what the normal loop gives: the same tokens, texts, log-probabilities and ends, in any traffic.

Hypothesis makes the traffic: texts with all sampling settings and conversations with pictures, that come, begin alike,
are given up and are retracted. Both engines get it; the normal one is held to transformers and m1 elsewhere. The device
of the overlapped one is late: it computes a forward when its result is asked for, and not before, whenever a seed says
so.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import m6_multimodal_pd
from m6_multimodal_pd import ModelConfig
from m6_multimodal_pd.model_loader import load_model
from m6_multimodal_pd.overlap import engine_core
from tests.equivalence.answers import assert_same_logprobs
from tests.equivalence.forced_retraction import ForcedRetractionInPieces
from tests.equivalence.traffic import CLEAR_SETTINGS, RATED_SETTINGS, WIDE_SETTINGS, Ask, SharingAsk, asks_of, serve
from tests.m4_radix_cache.tiers import Tiers, count_copies, tiers_of
from tests.m6_multimodal_pd.engines import MakeEngine, check_drained, check_flushed, setting
from tests.m6_multimodal_pd.late_launcher import LateLauncher
from tests.m6_multimodal_pd.recorded_graphs import (
    RecordedGraph,
    graphs_of_engines as graphs_of_engines,
    recorded_graphs as recorded_graphs,
    wanted_graphs as wanted_graphs,
)
from tests.m6_multimodal_pd.seeing import EOS
from tests.m6_multimodal_pd.test_equivalence_properties import ASKS, LIMITS, SIGHT
from tests.m6_multimodal_pd.test_speculation import make_drafting as make_drafting
from tests.support.amounts import examples
from tests.support.engines import EngineMaker

TEXTS = asks_of(
    [1, 2, 5, 9, 16, 17, 30, 48],
    [*CLEAR_SETTINGS, *WIDE_SETTINGS, *RATED_SETTINGS],
    n=st.sampled_from([1, 1, 1, 3]),
    arrival=st.integers(0, 6),
    patience=st.none() | st.integers(0, 9),
    kind=SharingAsk,
    which=st.integers(0, 7),
    priority=st.integers(0, 2),
    cache_salt=st.sampled_from([None, None, "tenant"]),
)
LONG = TEXTS.map(lambda ask: replace(ask, max_tokens=12, prompt_len=16, n=1, arrival=0, patience=None))
"""Requests that begin together, and outgrow a small memory together."""


GREEDY = [name for name, values in CLEAR_SETTINGS.items() if "seed" not in values]
GREEDY_TEXTS = TEXTS.filter(lambda ask: ask.setting in GREEDY)
"""Drawn answers keep their distribution only, where a draft model guesses."""


def check_same(ask: Ask, normal: Any, overlapped: Any, tokens: int) -> None:
    """Both engines have answered a request alike; where one of them did not finish, as far as both came."""
    assert normal.finished and overlapped.finished
    for ours, theirs in zip(overlapped.outputs, normal.outputs, strict=True):
        ends = {ours.finish_reason, theirs.finish_reason}
        if "error" in ends:  # which of two requests is alone when memory ends may differ
            assert len(ask.prompt) + max(len(ours.token_ids), len(theirs.token_ids)) >= tokens
        elif "abort" not in ends:
            assert (ours.token_ids, ours.text, ours.finish_reason) == (
                theirs.token_ids,
                theirs.text,
                theirs.finish_reason,
            )
            assert_same_logprobs(ours.logprobs, theirs.logprobs, exact_ranks=False)
        else:
            assert ask.patience is not None
        both = min(len(ours.token_ids), len(theirs.token_ids))
        assert ours.token_ids[:both] == theirs.token_ids[:both]
    if not {"abort", "error"} & {each.finish_reason for each in [*normal.outputs, *overlapped.outputs]}:
        assert_same_logprobs(overlapped.prompt_logprobs, normal.prompt_logprobs, exact_ranks=False)


@pytest.fixture(autouse=True)
def late_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core.OverlapEngineCore, "launcher_class", LateLauncher)


PAGES = [("radix", 1), ("radix", 16), ("hash", 4), ("chunk", 4), ("tiers", 4)]
FORCED = {False: "", True: "retracted every three steps"}
NEEDS = st.fixed_dictionaries(
    {
        "spare_tokens": st.integers(0, 50),
        "max_num_batched_tokens": st.sampled_from([16, 17, 23, 64]),
        "multimodal": SIGHT,
    }
)


@pytest.mark.hypothesis
@pytest.mark.sample(1)
@pytest.mark.parametrize("is_forced", FORCED, ids=FORCED.values())
@pytest.mark.parametrize(("cache", "page_size"), PAGES)
def test_overlapped_steps_answer_any_traffic_as_the_normal_loop_does(
    make_engine: MakeEngine, book: None, cache: str, page_size: int, is_forced: bool
) -> None:
    check_seen(check_any_traffic(make_engine, cache, page_size, is_forced), is_forced, "held", "aborted")


@pytest.mark.hypothesis
@pytest.mark.exhaustive
@pytest.mark.parametrize("is_forced", FORCED, ids=FORCED.values())
@pytest.mark.parametrize(("cache", "page_size"), PAGES)
def test_and_so_they_do_where_steps_are_graphs(
    graphs_of_engines: list[RecordedGraph],
    seeing_directory: Path,
    book: None,
    cache: str,
    page_size: int,
    is_forced: bool,
) -> None:
    """A step is replayed when a result is asked for, with what stood in its inputs when it was launched."""
    loaded = load_model(ModelConfig(model=seeing_directory, device="cpu", dtype="float32"))
    seen = check_any_traffic(EngineMaker(m6_multimodal_pd, loaded), cache, page_size, is_forced, 8)
    assert seen["held"] >= 1 and sum(graph.num_replays for graph in graphs_of_engines) > 20


ANYTHING = st.lists(ASKS | TEXTS | TEXTS, min_size=4, max_size=8) | st.lists(LONG, min_size=5, max_size=8)
"""Texts and pictures."""
NO_GUESSES: st.SearchStrategy[dict[str, Any]] = st.just({})


def check_any_traffic(
    make: MakeEngine,
    cache: str,
    page_size: int,
    is_forced: bool,
    most: int = 60,
    anything: Any = ANYTHING,
    guesses: Any = NO_GUESSES,
) -> "Seen":
    """Both engines serve `most` lists of requests; returns what has happened in the overlapped ones."""
    seen, folder = Seen(), TemporaryDirectory()

    @settings(max_examples=examples(most))
    @given(
        traffic=anything,
        limits=LIMITS,
        needs=NEEDS,
        guesses=guesses,
        seed=st.integers(0, 1000),
        tiers=tiers_of(cache, Path(folder.name)),
    )
    def holds(
        traffic: list[Ask],
        limits: dict[str, Any],
        needs: dict[str, Any],
        guesses: dict[str, Any],
        seed: int,
        tiers: Tiers | None,
    ) -> None:
        LateLauncher.rng = Random(seed)
        own_cache = {"cache": cache} if tiers is None else tiers.settings
        settings = {**own_cache, **limits, **needs, **guesses}
        compare(make, traffic, seen, is_forced, tiers=tiers, page_size=page_size, **settings)

    with folder:
        holds()
    return seen


def check_seen(seen: "Seen", is_forced: bool, *wanted: str) -> None:
    """All of it has happened often enough, and retractions where they were forced."""
    assert min(seen[name] for name in (*wanted, *(("retracted", "in flight") if is_forced else ()))) >= 3, seen


@pytest.mark.hypothesis
@pytest.mark.exhaustive
@pytest.mark.parametrize("is_forced", FORCED, ids=FORCED.values())
@pytest.mark.parametrize(("cache", "page_size"), PAGES)
def test_drafts_that_are_scheduled_behind_drafts_change_no_token(
    make_drafting: Any, cache: str, page_size: int, is_forced: bool
) -> None:
    """Of a draft model. The number of tokens that a step gives is not known when the next one is scheduled."""
    traffic = st.lists(GREEDY_TEXTS, min_size=4, max_size=8)
    guesses = st.fixed_dictionaries({"method": st.just("draft_model"), "drafts": st.integers(1, 4)})
    seen = check_any_traffic(make_drafting, cache, page_size, is_forced, anything=traffic, guesses=guesses)
    check_seen(seen, is_forced, "held", "aborted", "accepted", "rejected")


PREEMPTING = {"policy": "priority", "priority_preemption": True, "preemption_threshold": 0}


@pytest.mark.hypothesis
@pytest.mark.sample(1)
@pytest.mark.parametrize("method", [None, "draft_model"])
@pytest.mark.parametrize(("cache", "page_size"), PAGES[1::2] + PAGES[4:])
def test_requests_that_are_preempted_with_a_token_in_flight_answer_alike(
    make_engine: MakeEngine, make_drafting: Any, book: None, cache: str, page_size: int, method: str | None
) -> None:
    texts = st.lists(GREEDY_TEXTS if method else TEXTS, min_size=5, max_size=9)
    guesses = st.fixed_dictionaries(
        {key: st.just(value) for key, value in PREEMPTING.items()} | {"method": st.just(method)}
    )
    make = make_drafting if method else make_engine
    seen = check_any_traffic(make, cache, page_size, False, anything=texts, guesses=guesses)
    if cache != "tiers":  # what waits for the disk preempts nobody
        check_seen(seen, False, "preempted", "preempted in flight")


Seen = Counter[str]
"""What has happened in overlapped engines."""


def compare(
    make: Any,
    traffic: list[Ask],
    seen: Seen,
    is_forced: bool,
    *,
    tiers: Tiers | None,
    spare_tokens: int,
    page_size: int,
    **limits: Any,
) -> None:
    """Let both engines serve this traffic; `seen` counts what happened."""
    longest = max(len(ask.prompt) for ask in traffic)
    tokens = -(-(longest + 2 + spare_tokens) // page_size) * page_size
    found = []
    for overlap in (False, True):
        configs = setting(tokens=tokens, page_size=page_size, enable_overlap=overlap, **limits)
        parts: dict[str, Any] = {"scheduler": ForcedRetractionInPieces} if is_forced else {}
        parts |= {} if tiers is None else tiers.parts(page_size)
        with make(parts, eos_token_ids=EOS, **configs) as engine:
            if overlap:
                watch(engine, seen)
            found.append(serve(engine, traffic, lambda engine: engine.engine_core.check_invariants()))
            check_drained(engine)
            if overlap:
                stats = engine.stats()
                seen["retracted"] += stats.num_retractions
                seen["preempted"] += stats.num_preemptions
                seen["aborted"] += stats.num_finished.get("abort", 0)
                seen["accepted"] += stats.num_accepted_tokens
                seen.update(count_copies(engine))
                seen["rejected"] += stats.num_draft_tokens - stats.num_accepted_tokens
            check_flushed(engine)
    for ask, normal, overlapped in zip(traffic, *found, strict=True):
        check_same(ask, normal, overlapped, tokens)


def watch(engine: Any, seen: Seen) -> None:
    """Count the requests that end while a step with them is in flight, and those retracted then."""
    core = engine.engine_core
    release, send_back, take_out = core.scheduler.release, core.scheduler.send_back, core.scheduler.take_out

    def released(req: Any) -> None:
        seen["held"] += req in core.late.ended
        release(req)

    def sent_back(reqs: Any) -> None:
        reqs = list(reqs)
        flying = [] if core.in_flight is None else core.in_flight.step.batch.rids
        seen["in flight"] += sum(req.rid in flying for req in reqs)
        send_back(reqs)

    def taken_out(reqs: Any) -> None:
        flying = [] if core.in_flight is None else core.in_flight.step.batch.rids
        seen["preempted in flight"] += sum(req.rid in flying for req in reqs)
        take_out(reqs)

    core.scheduler.release, core.scheduler.send_back = released, sent_back
    core.scheduler.take_out = taken_out
