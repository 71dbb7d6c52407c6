"""Several continuations of one prompt: one request outside, n inside, on shared blocks until they write.

The children of the fake model choose by their seeds, so siblings say different things; the oracle sees at once if one
reads what another has written.
"""

from itertools import combinations
from typing import Any

import pytest

from m1_single_request import DuplicateRequestError, SamplingParams
from m3_paged_attention.output_processor import OutputProcessor
from m3_paged_attention.request import ParentRequest, Request
from tests.m3_paged_attention.engines import MakeEngine, greedy, setting, unfinished
from tests.testbed.fakes import answer, make_request
from tests.testbed.paged import PagedBed, make_paged_bed


def children(rid: str, n: int) -> list[str]:
    return [f"{rid}/{i}" for i in range(n)]


def tables(bed: PagedBed, *ids: str) -> list[list[int]]:
    return [bed.scheduler.kv_manager.block_ids(rid) for rid in ids]


# --- forks ------------------------------------------------------------------------------------------------------------


def test_siblings_join_in_one_step_and_the_prompt_is_computed_once() -> None:
    bed = make_paged_bed(block_size=4, tensors=True)
    rid = bed.add(10, max_tokens=5, n=3)
    ids = children(rid, 3)
    step = bed.step()
    assert step.counts == {ids[0]: 10} and bed.running() == ids
    assert tables(bed, *ids) == [[1, 2, 3]] * 3, "the last block in part"
    step = bed.step()
    assert step.counts == dict.fromkeys(ids, 1)
    assert [data.num_computed_tokens for data in step.output.scheduled_new_reqs] == [9, 9]
    bed.drain()
    assert bed.runner.num_written == 10 + 4 + 2 * (1 + 4), "each sibling computes the last token of the prompt again"
    assert all(bed.said(a) != bed.said(b) for a, b in combinations(ids, 2))


def test_the_first_one_to_write_copies_and_the_last_one_need_not() -> None:
    bed = make_paged_bed(block_size=4, trace=True)
    ids = children(bed.add(6, max_tokens=5, n=3), 3)
    bed.step()
    step = bed.step()
    assert step.output.blocks_to_copy == [(2, 3), (2, 4)]
    assert tables(bed, *ids) == [[1, 3], [1, 4], [1, 2]]
    assert [(event.owner, event.source, event.target) for event in bed.events("block_copied")] == [
        (ids[0], 2, 3),
        (ids[1], 2, 4),
    ]
    assert bed.step().output.blocks_to_copy == []
    bed.drain()


@pytest.mark.parametrize("num_prompt", [1, 4, 5, 8, 9])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_every_boundary(num_prompt: int, block_size: int) -> None:
    bed = make_paged_bed(block_size=block_size, num_blocks=128, max_num_seqs=3, tensors=True)
    bed.add(num_prompt, max_tokens=9, n=4)
    bed.add(num_prompt, max_tokens=2, n=2)
    assert set(bed.drain().values()) == {"length"}


def test_n_may_be_larger_than_the_number_of_places() -> None:
    bed = make_paged_bed(max_num_seqs=2)
    bed.add(7, max_tokens=6, n=9)
    assert len(bed.drain()) == 9
    assert bed.runner.num_written < 9 * (7 + 5), "those who came later found somebody to start from"


def test_siblings_that_say_one_token_only() -> None:
    bed = make_paged_bed()
    rid = bed.add(6, max_tokens=1, n=3)
    assert bed.step().ended == {f"{rid}/0": "length"}
    assert bed.step().ended == {f"{rid}/1": "length", f"{rid}/2": "length"}, "on the blocks that the first one left"


def test_whoever_wants_prompt_logprobs_computes_the_prompt() -> None:
    bed = make_paged_bed()
    rid = bed.add(6, max_tokens=3, n=3, prompt_logprobs=1)
    bed.drain()
    found = [bed.requests[child].sequence.prompt_logprobs for child in children(rid, 3)]
    assert len(found[0] or []) == 6 and found[1:] == [None, None]


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


def test_an_abort_of_a_sibling_that_waits_for_the_prompt() -> None:
    bed = make_paged_bed()
    ids = children(bed.add(6, max_tokens=4, n=3), 3)
    step = bed.step(between=lambda output: bed.abort(ids[1]))
    assert step.ended == {ids[1]: "abort"} and bed.running() == [ids[0], ids[2]]
    bed.drain()


@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
def test_siblings_that_are_preempted(swap: bool) -> None:
    bed = make_paged_bed(num_blocks=7, block_size=2, max_num_seqs=3, swap=swap, trace=True)
    bed.add(5, max_tokens=6, n=3)
    assert set(bed.drain().values()) == {"length"}
    assert bed.scheduler.num_preemptions > 0
    kept = [event.num_blocks - event.num_freed for event in bed.events("preempted")]
    assert max(kept) >= 2, "what siblings share does not come free"


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


def test_an_abort_of_the_parent_ends_all_that_are_left() -> None:
    bed = make_paged_bed(max_num_seqs=2)
    rid = bed.add(5, max_tokens=4, n=4)
    while not bed.ended:
        bed.step()
    assert bed.abort(rid, "nobody") == [rid]
    assert bed.abort(rid) == []
    bed.drain()
    assert [bed.ended[child] for child in children(rid, 4)] == ["length", "abort", "abort", "abort"]
    assert bed.reported_ends == [rid]


@pytest.mark.parametrize(("taken", "n"), [("r", 2), ("r/1", 2), ("r/1", 1)])
def test_an_id_that_a_family_needs_must_be_free(taken: str, n: int) -> None:
    bed = make_paged_bed()
    bed.add(3, request_id=taken)
    with pytest.raises(DuplicateRequestError, match=f"'{taken}' is in use"):
        bed.add(3, n=n, request_id=taken if n == 1 else "r")
    bed.requests = {taken: bed.requests[taken]}
    assert bed.waiting() == [taken], "nobody was queued"
    bed.drain()
    bed.add(3, n=2, request_id="r")
    for name in ("r", "r/0"):
        with pytest.raises(DuplicateRequestError, match=f"'{name}' is in use"):
            bed.families.add_request(make_request(name, [1], SamplingParams(), request_class=Request))
    bed.drain()


def test_an_id_can_be_used_again_when_the_whole_family_has_ended() -> None:
    bed = make_paged_bed(max_num_seqs=1)
    for length in (3, 5):
        rid = bed.add(length, max_tokens=2, n=2, request_id="same")
        bed.drain()
    assert bed.reported_ends == [rid, rid]


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
