"""Prefill and decode in engines of their own, in one process: nobody who asks can tell.

Tokens, texts, log-probabilities and ends are those of one engine that does everything, whatever the engines share or
lack. The one engine is held to transformers (`test_equivalence_properties.py`) and to m1 (`tests/equivalence`).
"""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from m5_chunked_prefill_spec.scheduler import Scheduler
from m6_multimodal_pd import ConfigError, RequestOutput, SamplingParams
from m6_multimodal_pd.disaggregation.runtime.messages import Chunk, Decode, Preallocated, Prefill
from m6_multimodal_pd.overlap import engine_core
from tests.equivalence.forced_retraction import ForcedRetractionAfterTransfer
from tests.m6_multimodal_pd.engines import Guessing, greedy
from tests.m6_multimodal_pd.late_launcher import LateLauncher
from tests.m6_multimodal_pd.pd_engines import Asked, Group, aggregated, check_alike, setting, tokens_told
from tests.m6_multimodal_pd.seeing import asking, messages

CACHES = ("radix", "hash", "chunk")
SHAPES = ((1, 1), (2, 1), (1, 2), (2, 2))
Questions = dict[str, tuple[Any, SamplingParams]]
Answers = dict[str, RequestOutput]
QUESTIONS: Questions = {
    "text": (asking(1, 2), greedy(12)),
    "image": (asking("a", 1), greedy(8, logprobs=2)),
    "several": (asking(3, "c", "b"), greedy(6, logprobs=0, prompt_logprobs=1)),
    "clip": (asking("v", 2), greedy(9, temperature=0.9, seed=3)),
    "family": (asking("b", 4), greedy(5, temperature=1.0, top_p=0.9, top_k=50, n=3, seed=5)),
    "unseeded": (asking("d", 7), greedy(6, temperature=1.0, logprobs=1)),
    "penalties": (
        asking(5, 6),
        greedy(14, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.4, temperature=0.8, seed=11),
    ),
    "biased": (asking(8), greedy(8, logit_bias={500: 100.0, 501: 100.0}, frequency_penalty=1.5)),
    "one": (asking("w", 3), greedy(1, logprobs=1, prompt_logprobs=0)),
    "eos": (asking(2, 3), SamplingParams(max_tokens=20)),
    "words": ("What is a KV cache?", greedy(10, logprobs=1, prompt_logprobs=2)),
    "token": ([9], SamplingParams(max_tokens=1)),
}


def crowd(more: Questions | None = None) -> Asked:
    """Everybody at once."""
    return {rid: (prompt, params, {}) for rid, (prompt, params) in (QUESTIONS | dict(more or {})).items()}


@pytest.fixture(scope="module")
def stops(seeing_directory: Path) -> Questions:
    """Requests that end at something that they say: what that is, is known when it was said once."""
    plain: Asked = {rid: (asking(*parts), greedy(12), {}) for rid, parts in {"s": ("a", 9), "t": (4, 4)}.items()}
    said = aggregated(seeing_directory, plain)
    seen, read = said["s"], said["t"]
    middle = len(seen.text) // 2
    assert len(seen.text) > 12
    return {
        "string": (asking("a", 9), greedy(12, stop=["never said", seen.text[middle : middle + 3]])),
        "string kept": (
            asking("a", 9),
            greedy(12, stop=seen.text[middle : middle + 3], include_stop_str_in_output=True, logprobs=1),
        ),
        "id": (asking(4, 4), greedy(12, stop_token_ids=[read.token_ids[5]])),
        "first id": (asking(4, 4), greedy(12, stop_token_ids=[read.token_ids[0]])),
        "not yet": (asking(4, 4), greedy(12, min_tokens=7, stop_token_ids=[read.token_ids[0], read.token_ids[2]])),
    }


@pytest.fixture(scope="module")
def wanted(seeing_directory: Path, stops: Questions) -> Answers:
    """What one engine says to all of them."""
    found = aggregated(seeing_directory, crowd(stops))
    reasons = {rid: output.finish_reason for rid, output in found.items()}
    assert all(reasons[rid] == "stop" for rid in ("string", "string kept", "id", "first id")), reasons
    assert len(found["not yet"].outputs[0].token_ids) >= 7
    return found


# --- the same answers -------------------------------------------------------------------------------------------------

GRID = [
    (page_size, budget, CACHES[(row + column) % 3], SHAPES[(row + 2 * column) % 4])
    for row, page_size in enumerate((1, 4, 16))
    for column, budget in enumerate((8, 32, 128))
] + [(4, 16, "radix", shape) for shape in SHAPES]
"""A budget of 8 cuts inside pictures."""
IN_TURN = [pytest.param(*case, False, id=f"{case}") for case in GRID]
OVERLAPPED = [pytest.param(*case, True, id=f"{case}, overlapped") for case in GRID[::3]]


@pytest.fixture
def late_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps overlap, the device is late by a seed."""
    monkeypatch.setattr(engine_core.OverlapEngineCore, "launcher_class", LateLauncher)
    monkeypatch.setattr(LateLauncher, "rng", Random(0))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("page_size", "budget", "cache", "shape", "overlap"), [*IN_TURN, *OVERLAPPED])
def test_everybody_gets_the_answer_of_one_engine_that_does_everything(
    seeing_directory: Path,
    wanted: Answers,
    stops: Questions,
    late_device: None,
    page_size: int,
    budget: int,
    cache: str,
    shape: Any,
    overlap: bool,
) -> None:
    limits = setting(8, budget, page_size=page_size, cache=cache, enable_overlap=overlap)
    with Group(seeing_directory, *shape, **limits) as group:
        assert not overlap or not any(engine.core.obstacle for engine in group.engines.values())
        group.check_all(wanted, crowd(stops))
        tokens_told(group)


# --- guesses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("proposer", ["its own", "random"])
def test_guesses_change_no_answer(seeing_directory: Path, wanted: Answers, stops: Questions, proposer: str) -> None:
    parts = {"proposer": Guessing} if proposer == "random" else {}
    with Group(seeing_directory, 1, 2, parts=parts, **setting(8, 32, method="ngram", drafts=3)) as group:
        group.check_all(wanted, crowd(stops))
        stats = group.engine.stats()
        assert stats.num_draft_tokens > 5 and (stats.num_accepted_tokens > 3 or proposer == "random")
        assert not any(engine.core.stats().num_draft_tokens for engine in group.of_role("prefill"))
        told = sum(output.metrics.num_draft_tokens for output in group.last.values())
        assert told == stats.num_draft_tokens


@pytest.mark.sample(1)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_draft_models_kv_comes_along(seeing_directory: Path, loaded_reader: Any, page_size: int) -> None:
    """Without it the tokens would be the same, and hardly any guess right."""
    asked: Asked = {
        **{f"t{number}": (asking(number, 8, 9, 3), greedy(14), {}) for number in range(3)},
        "s": (asking("a", 1), greedy(8), {"speculate": False}),
        "u": (asking(1, 2), greedy(8), {"speculate": False}),
    }
    limits = setting(8, 96, page_size=page_size, method="draft_model", drafts=3, draft_model=loaded_reader.name)
    wanted = aggregated(seeing_directory, asked, **limits)
    with Group(seeing_directory, 2, 2, **limits) as group:
        found = group.run(asked)
        check_alike(found, wanted)
        for rid in ("t0", "t1", "t2"):
            own, other = found[rid].metrics, wanted[rid].metrics
            assert own.num_draft_tokens == other.num_draft_tokens
            assert own.num_accepted_tokens == other.num_accepted_tokens > 3
        assert not found["s"].metrics.num_draft_tokens and not found["u"].metrics.num_draft_tokens
        assert not any(engine.core.stats().num_draft_tokens for engine in group.of_role("prefill"))


# --- overlapped steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", range(2, 14, 3))
def test_whoever_leaves_while_a_step_is_in_flight_disturbs_nobody(
    seeing_directory: Path, wanted: Answers, late_device: None, num_steps: int
) -> None:
    """Also between the launch and the end of the step that begins a request on the decode side."""
    asked = {rid: (*QUESTIONS[rid], {}) for rid in ("text", "image", "token", "words")}
    with Group(seeing_directory, **setting(8, 32, enable_overlap=True)) as group:
        group.add(asked)
        late = {"late": (asking(2, 4), greedy(6), {})}
        group.add(late, num_steps)
        assert group.engine.abort_request("late") or group.last["late"].finished
        group.run()
        check_alike({rid: group.last[rid] for rid in asked}, {rid: wanted[rid] for rid in asked})
        group.check_flushed()


# --- little memory ----------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("shape", "cache"), [((1, 1), "radix"), ((2, 2), "chunk")], ids=str)
def test_answers_survive_retraction_every_three_steps(
    seeing_directory: Path, wanted: Answers, stops: Questions, shape: Any, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("m6_multimodal_pd.disaggregation.engine.DecodeScheduler", ForcedRetractionAfterTransfer)
    with Group(seeing_directory, *shape, **setting(8, 16, cache=cache)) as group:
        group.check_all(wanted, crowd(stops))
        decodes = [engine.core for engine in group.of_role("decode")]
        assert group.engine.stats().num_retractions == sum(core.stats().num_retractions for core in decodes) > 5
        assert len(group.wire.commands(Prefill)) == len(group.wire.commands(Decode)), "no prompt is computed twice"
        assert not group.num_retries
        was_seen_again = any(core.stats().num_encoder_runs for core in decodes)
        assert was_seen_again == (cache == "chunk"), "only what is not cached must be seen again"


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("limits", [{"tokens": 160}, {"max_num_seqs": 3}], ids=["memory", "rows"])
def test_an_urgent_request_takes_places_on_the_decode_side(
    seeing_directory: Path, late_device: None, limits: dict[str, Any], overlap: bool
) -> None:
    asked: Asked = {f"r{number}": (asking(number, 3), greedy(30), {"priority": number % 3}) for number in range(6)}
    urgent: Asked = {f"u{number}": (asking("a", number), greedy(4), {"priority": 20}) for number in (1, 2, 4)}
    more = {"policy": "priority", "priority_preemption": True, "enable_overlap": overlap}
    wanted = aggregated(seeing_directory, {**asked, **urgent})
    with Group(
        seeing_directory, **setting(**{"max_num_seqs": 8, "max_num_batched_tokens": 32} | limits | more)
    ) as group:
        group.add(asked, 14)
        for rid, own in urgent.items():
            group.add({rid: own}, 3)
        group.check_all(wanted)
        (prefill,), (decode,) = ([each.core.stats() for each in group.of_role(role)] for role in ("prefill", "decode"))
        assert not prefill.num_preemptions and decode.num_preemptions and not group.num_retries
        assert group.engine.stats().num_preemptions == decode.num_preemptions


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_a_preempted_request_does_not_resume_in_the_same_step(
    seeing_directory: Path, late_device: None, overlap: bool
) -> None:
    """Beside the newcomer, whose long answer alone was in the way, there is room for it; but its token is in flight."""
    asked: Asked = {"low": (asking(1, 3), greedy(40), {})}
    more = {"policy": "priority", "priority_preemption": True, "enable_overlap": overlap, "tokens": 340}
    with Group(seeing_directory, **setting(4, 32, **more)) as group:
        group.add(asked, 8)
        group.add({"high": (asking("a", 2), greedy(300), {"priority": 20})})
        (decode,) = (engine.core for engine in group.of_role("decode"))
        group.until(lambda: bool(decode.stats().num_preemptions))
        low = decode.scheduler.requests["low"]
        assert low in decode.scheduler.waiting_queue and "transfer queue" in group.states("high")
        group.until(lambda: low in decode.scheduler.running)
        group.engine.abort_request("high")
        group.run()
        check_alike({"low": group.last["low"]}, aggregated(seeing_directory, asked))


def test_a_scheduler_of_ones_own_is_refused(seeing_directory: Path) -> None:
    """Its engines have schedulers of their roles."""
    with pytest.raises(ConfigError, match="'scheduler' has no effect in a group"):
        Group(seeing_directory, parts={"scheduler": type("Mine", (Scheduler,), {})})


# --- caches -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("page_size", "cache"), [(1, "radix"), (4, "hash"), (16, "radix"), (4, "chunk")])
def test_pages_that_the_decode_side_has_are_not_sent_again(seeing_directory: Path, page_size: int, cache: str) -> None:
    first, second = messages((("a", 1),)), messages((("a", 1), ("b", 2)))
    asked: dict[str, Any] = {rid: (prompt, greedy(6), {}) for rid, prompt in (("one", first), ("two", second))}
    with Group(seeing_directory, **setting(8, 32, page_size=page_size, cache=cache), is_traced=True) as group:
        for rid in asked:
            group.run({rid: asked[rid]})
        check_alike(group.last, aggregated(seeing_directory, asked))
        starts = [body.start for body in group.wire.relayed(Preallocated)]
        prompts = [len(command.job.prompt_token_ids) for command in group.wire.commands(Decode)]
        if cache == "chunk":
            assert starts == [0, 0] and not group.last["two"].metrics.cached_tokens
        else:
            assert starts[0] == 0 and prompts[0] - 8 - page_size < starts[1] <= prompts[0] + 6
            assert group.last["two"].metrics.cached_tokens > 0
        sent = [sum(chunk.num_pages for chunk in group.wire.relayed(Chunk) if chunk.room == room) for room in (0, 1)]
        assert sent == [
            -(-prompt // page_size) - start // page_size for prompt, start in zip(prompts, starts, strict=True)
        ]
        (taken,) = [event for event in group.listener.told("room_taken") if "two" in event.rids]
        assert cache == "chunk" or f"{starts[1]} tokens are cached here" in taken.text
        group.check_flushed()


@pytest.mark.parametrize(("shape", "cached_on"), [((1, 2), "prefill"), ((2, 1), "decode")], ids=str)
def test_each_side_uses_what_it_has_cached(seeing_directory: Path, shape: tuple[int, int], cached_on: str) -> None:
    """The second turn goes to the other one of two, because the first has something else to do."""
    first, second = messages((("a", 1),)), messages((("a", 1), (2,)))
    with Group(seeing_directory, *shape, **setting(8, 32)) as group:
        wanted = aggregated(seeing_directory, {"two": (second, greedy(6), {})})
        group.run({"one": (first, greedy(6), {})})
        group.add({"busy": (asking(7, 7, 7, 7, 7), greedy(60), {})})
        group.step()
        group.add({"two": (second, greedy(6), {})})
        group.until(lambda: group.last.get("two") is not None and group.last["two"].finished)
        check_alike({"two": group.last["two"]}, wanted)
        cached, start = group.last["two"].metrics.cached_tokens, group.wire.relayed(Preallocated)[-1].start
        assert (cached > 10 and start == 0) if cached_on == "prefill" else (cached == 0 and start > 10)
        group.run()


def test_namespaces_are_kept_apart_on_both_sides(seeing_directory: Path) -> None:
    with Group(seeing_directory, **setting()) as group:
        for rid, salt in (("a", "x"), ("b", "y"), ("c", None), ("d", "x")):
            group.run({rid: (asking("a", 1), greedy(4), {"cache_salt": salt})})
        assert len({output.token_ids for output in group.last.values()}) == 1
        assert [output.metrics.cached_tokens > 0 for output in group.last.values()] == [False, False, False, True]
        assert [body.start > 0 for body in group.wire.relayed(Preallocated)] == [False, False, False, True]


def test_priority_counts_where_prompts_wait(seeing_directory: Path) -> None:
    """One prompt at a time is computed; whoever matters most overtakes."""
    with Group(seeing_directory, **setting(1, 16, policy="priority")) as group:
        asked: dict[str, Any] = {
            f"p{number}": (asking(number, 3), greedy(3), {"priority": number}) for number in (0, 2, 5, 1)
        }
        group.add(asked)
        ends: list[str] = []
        while group.engine.has_unfinished_requests():
            ends += [rid for rid, output in group.step().items() if output.finished]
        assert {command.job.priority for command in group.wire.commands(Prefill)} == {0, 1, 2, 5}
        assert ends == ["p5", "p2", "p1", "p0"]
        group.settle()


# --- what the trace says ----------------------------------------------------------------------------------------------


def test_the_trace_tells_of_every_page_and_of_every_first_token_once(seeing_directory: Path) -> None:
    with Group(seeing_directory, 2, 2, is_traced=True, **setting(8, 32)) as group:
        group.run(crowd())
        chunks = group.wire.relayed(Chunk)
        for kind, pattern in (("chunk_sent", r"lie ready for"), ("chunk_received", r"came from")):
            said = group.listener.told(kind)
            assert len(said) == len(chunks) and all(pattern in event.text for event in said)
        sent = [event.text for event in group.listener.told("chunk_sent")]
        assert sum(int(words.split()[0]) for words in sent) == sum(chunk.num_pages for chunk in chunks)
        assert sum("the last ones" in words for words in sent) == len(group.wire.commands(Prefill))
        told = tokens_told(group)
        assert len(told) == len(group.wire.commands(Prefill)) == len(group.listener.events("request_routed"))
        joined = [event.name for event in group.listener.events("engine_joined")]
        assert joined == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
        finals = [event.text for event in group.listener.told("kv_poll_changed")]
        assert sum("-> success" in words for words in finals) == 2 * len(told)


@pytest.mark.parametrize("is_debugged", [True, False])
def test_pages_carry_checksums_where_errors_are_looked_for(seeing_directory: Path, is_debugged: bool) -> None:
    with Group(seeing_directory, **setting(debug=is_debugged)) as group:
        group.run(crowd())
        tickets = [(chunk.num_pages, chunk.ticket) for chunk in group.wire.relayed(Chunk)]
        assert all(len(ticket.checksums) == (pages if is_debugged else 0) for pages, ticket in tickets)


# --- totals and the cache ---------------------------------------------------------------------------------------------


SUMS = """num_steps num_prompt_tokens available_size evictable_size max_total_tokens num_cached_tokens
num_encoder_runs num_encoded_items embedding_cache_bytes"""


def test_stats_are_the_sums_of_all_engines(seeing_directory: Path) -> None:
    with Group(seeing_directory, 2, 2, **setting(8, 32)) as group:
        asked = crowd()
        group.run(asked)
        stats = group.engine.stats()
        own = [engine.core.stats() for engine in group.engines.values()]
        for name in SUMS.split():
            assert getattr(stats, name) == sum(getattr(one, name) for one in own) > 0, name
        assert (stats.kv_tokens, stats.kv_bytes, stats.num_waiting, stats.num_running) == (0, 0, 0, 0)
        assert stats.num_finished == Counter(output.finish_reason for output in group.last.values())
        assert stats.num_output_tokens == sum(
            len(one.token_ids) for output in group.last.values() for one in output.outputs
        )


@pytest.mark.sample(2)
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_flush_after_the_last_output_reaches_all(seeing_directory: Path, max_tokens: int, is_aborted: bool) -> None:
    """The engines may not have heard yet that it is over."""
    with Group(seeing_directory, 2, 2, **setting()) as group:
        group.add({"r": (asking("a", 1), greedy(max_tokens + 5 * is_aborted), {})})
        group.until(lambda: "r" in group.last)
        if is_aborted:
            assert group.engine.abort_request("r")
        group.until(lambda: not group.engine.has_unfinished_requests())
        group.check_flushed()
        assert group.run({"again": (asking("a", 1), greedy(2), {})})["again"].metrics.cached_tokens == 0
