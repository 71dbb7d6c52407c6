"""Several continuations of one prompt: one request outside, n inside, on shared blocks until they write.

What callers receive is tested for all milestones in `tests/engine_contract/test_n_outputs.py`.
"""

from m3_paged_attention.output_processor import OutputProcessor
from tests.m3_paged_attention.engines import MakeEngine, Recorder, greedy, held, ids, run, setting, unfinished
from tests.testbed.fakes import answer
from tests.testbed.paged import make_paged_bed


def children(rid: str, n: int) -> list[str]:
    return [f"{rid}/{i}" for i in range(n)]


# --- one request outside ----------------------------------------------------------------------------------------------


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
