"""Several continuations of one prompt: one request outside, n inside, on shared blocks until they write.

What callers receive is tested for all milestones in `tests/engine_contract/test_n_outputs.py`.
"""

from typing import Any

import pytest

from m1_single_request import SamplingParams
from m3_paged_attention.output_processor import OutputProcessor
from m3_paged_attention.request import ParentRequest, Request
from tests.m3_paged_attention.engines import MakeEngine, Recorder, greedy, held, ids, run, setting, unfinished
from tests.testbed.fakes import answer, make_request
from tests.testbed.paged import PagedBed, make_paged_bed


def children(rid: str, n: int) -> list[str]:
    return [f"{rid}/{i}" for i in range(n)]


# --- forks ------------------------------------------------------------------------------------------------------------


def test_siblings_that_say_one_token_only() -> None:
    bed = make_paged_bed()
    rid = bed.add(6, max_tokens=1, n=3)
    assert bed.step().ended == {f"{rid}/0": "length"}
    assert bed.step().ended == {f"{rid}/1": "length", f"{rid}/2": "length"}, "on the blocks that the first one left"


def test_siblings_that_all_want_prompt_logprobs_share_nothing() -> None:
    bed = make_paged_bed(checked=False)
    params = SamplingParams(max_tokens=3, prompt_logprobs=1)
    own: list[Any] = [make_request(f"r/{i}", [1, 2, 3], params, request_class=Request, seed=i) for i in range(2)]
    bed.families.add_request(ParentRequest(own, request_id="r"))
    bed.requests = {child.request_id: child for child in own}
    assert bed.step().counts == {"r/0": 3, "r/1": 3}
    bed.drain()
    assert all(child.sequence.prompt_logprobs is not None for child in own)


# --- when something happens to the first one --------------------------------------------------------------------------


def abort_first(bed: PagedBed, ids: list[str]) -> Any:
    return bed.step(between=lambda output: bed.abort(ids[0]))


def fail_first(bed: PagedBed, ids: list[str]) -> Any:
    return bed.step(failing=[ids[0]])


def crash(bed: PagedBed, ids: list[str]) -> Any:
    return bed.step(crash=True)


@pytest.mark.parametrize("happens", [abort_first, fail_first, crash])
def test_siblings_whose_prompt_was_not_computed_start_over(happens: Any) -> None:
    bed = make_paged_bed(block_size=4)
    ids = children(bed.add(6, max_tokens=4, n=3), 3)
    step = happens(bed, ids)
    assert list(step.ended) == ids[:1] and bed.preempted() == ids[1:]
    step = bed.step()
    assert step.counts == {ids[1]: 6} and bed.running() == ids[1:]
    assert [bed.drain()[rid] for rid in ids[1:]] == ["length", "length"]


# --- one request outside ----------------------------------------------------------------------------------------------


def test_callers_hear_of_the_parent_only_and_once_of_its_end() -> None:
    bed = make_paged_bed(max_num_seqs=2, trace=True)
    family, alone = bed.add(5, max_tokens=3, n=3), bed.add(4, max_tokens=2)
    bed.drain()
    assert {rid for step in bed.reported for rid in step} == {family, alone}
    assert all(len(step) == len(set(step)) for step in bed.reported)
    assert sorted(bed.reported_ends) == [family, alone]
    (event,) = bed.events("parallel_sampling")
    assert (event.rid, event.children, event.seeds) == (family, tuple(children(family, 3)), (0, 1, 2))


def test_a_parent_ends_with_its_last_child() -> None:
    bed = make_paged_bed()
    prompt = [1, 2, 3]
    stop = answer(prompt, 9, seed=0)[4]
    rid = bed.add(prompt, 9, n=2, stop_token_ids=[stop])
    parent = bed.parents[rid]
    while not parent.is_finished:
        bed.step()
    assert bed.ended[f"{rid}/0"] == "stop" and not bed.scheduler.requests
    times = [child.finished_time for child in parent.children]
    assert parent.finished_time == max(times) and parent.finish_reason == parent.children[0].finish_reason  # type: ignore[type-var]
    assert parent.first_token_time == min(child.first_token_time for child in parent.children)  # type: ignore[type-var]
    metrics = OutputProcessor().make_output(parent).metrics
    assert metrics.num_output_tokens == sum(len(bed.said(child)) for child in children(rid, 2))


# --- what it saves ----------------------------------------------------------------------------------------------------


def test_the_prompt_is_computed_and_stored_once(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(8, blocks=30))
    recorder = Recorder(engine.tracer)
    engine.add_request(ids(21), greedy(8, n=4, temperature=1.0, seed=11), request_id="p")
    engine.step()
    assert (engine.stats().num_running, held(engine)) == (4, 21)
    (batch,) = recorder.events("batch")
    assert (batch.rids, batch.total_tokens) == (("p/0",), 21), "the others wait for its prompt"
    assert engine.stats().num_shared_blocks == 5
    engine.step()
    batch = recorder.events("batch")[-1]
    assert (batch.rids, batch.total_tokens) == (("p/1", "p/2", "p/3", "p/0"), 4)
    assert engine.stats().num_free_blocks == 30 - (5 + 4), "five full blocks for all, and one each"
    assert held(engine) == 20 + 2 + 3 * 1
    run(engine)
    assert engine.stats().num_prompt_tokens == 21
    assert [event.block_ids for event in recorder.events("blocks_forked")] == [(1, 2, 3, 4, 5)] * 3


# --- what is counted --------------------------------------------------------------------------------------------------


def test_the_number_of_output_tokens_never_falls(make_engine: MakeEngine) -> None:
    """Children end before their parent does: by an abort, by a stop, at their length."""
    engine = make_engine(**setting(3, blocks=9, block_size=2))
    engine.add_request([5, 6], greedy(9, n=4, temperature=1.0, seed=3), request_id="p")
    engine.add_request([7, 8, 9], greedy(4), request_id="q")
    seen = [0]
    for number, _ in enumerate(unfinished(engine)):
        if number == 3:
            assert engine.abort_request("p/1")
        engine.step()
        seen.append(engine.stats().num_output_tokens)
        said = sum(len(r.sequence.output_token_ids) for r in engine.engine_core.scheduler.requests.values())
        assert seen[-1] >= said
    assert seen == sorted(seen) and seen[-1] > 3 * 9
