"""Giving up what is preempted, on the host or one of several continuations; and what becomes of the blocks.

All that every milestone with batches promises about aborts is tested in `tests/engine_contract`.
"""

from typing import Any

import pytest

from m3_paged_attention import LLMEngine
from tests.m3_paged_attention.engines import (
    MakeEngine,
    OnEvent,
    Recorder,
    check_drained,
    check_step,
    greedy,
    held,
    run,
    setting,
)

PROMPTS = {"a": [21, 22, 23], "b": [31, 32, 33, 34], "c": [41], "d": [51, 52]}


@pytest.fixture
def expected(make_m1: Any) -> dict[str, tuple[int, ...]]:
    """Nine tokens for everybody."""
    engine = make_m1()
    return {rid: engine.generate(prompt, greedy(9)).token_ids for rid, prompt in PROMPTS.items()}


def submit(engine: LLMEngine) -> None:
    for rid, prompt in PROMPTS.items():
        engine.add_request(prompt, greedy(9), request_id=rid)


def ends(last: dict[str, Any]) -> dict[str, tuple[str, int]]:
    return {rid: (output.finish_reason, len(output.token_ids)) for rid, output in sorted(last.items())}


def test_an_abort_when_a_step_counts_its_blocks_takes_effect_in_the_next(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]]
) -> None:
    """The update has ended whom it had to."""
    engine = make_engine(**setting(3))
    submit(engine)
    reader = OnEvent(engine.tracer, "blocks_used", lambda: engine.abort_request("b"), nth=4)
    for _ in range(4):
        assert not engine.step()["b"].finished
    assert (reader.result, reader.error) == (True, None)
    output = engine.step()["b"]
    assert (output.finish_reason, output.token_ids) == ("abort", expected["b"][:4])
    run(engine)


def test_the_blocks_of_an_aborted_request_are_free_after_the_update_and_not_before(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(4, blocks=7))
    recorder = Recorder(engine.tracer)
    submit(engine)
    engine.step()
    before = engine.stats().num_free_blocks
    engine.abort_request("b")
    assert engine.stats().num_free_blocks == before, "an abort only marks"
    seen: list[int] = []
    OnEvent(engine.tracer, "batch", lambda: seen.append(engine.stats().num_free_blocks))
    engine.step()
    assert seen == [before], "b's block is still its own"
    assert engine.stats().num_free_blocks == before + 1
    assert [batch.rids for batch in recorder.events("batch")] == [("a", "b", "c"), ("a", "c")]
    run(engine)


def until_preempted(engine: LLMEngine) -> str:
    """Step until somebody has lost his place; returns who."""
    scheduler = engine.engine_core.scheduler
    while not engine.stats().num_preemptions:
        engine.step()
    (preempted,) = [request for request in scheduler.waiting if request.status.value == "preempted"]
    return str(preempted.request_id)


@pytest.mark.parametrize("later", [False, True], ids=["at once", "when it is next in line"])
def test_a_preempted_request_ends_where_it_is(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], mode: str, later: bool
) -> None:
    engine = make_engine(**setting(4, blocks=9, block_size=2, mode=mode))
    submit(engine)
    last: dict[str, Any] = {}
    scheduler = engine.engine_core.scheduler
    while not engine.stats().num_preemptions:
        last |= engine.step()
    victim = next(request.request_id for request in scheduler.waiting if request.status.value == "preempted")
    assert scheduler.kv_manager.is_swapped(victim) == (mode == "swap")
    if later:
        last |= engine.step()
    said = len(last[victim].token_ids)
    assert engine.abort_request(victim)
    last |= engine.step()
    check_step(engine)
    assert (last[victim].finish_reason, last[victim].token_ids) == ("abort", expected[victim][:said])
    assert not scheduler.kv_manager.swapped()
    last |= run(engine)
    assert all(last[rid].token_ids == expected[rid] for rid in PROMPTS if rid != victim)


@pytest.mark.parametrize("kind", ["preempted", "batch", "step_done"])
def test_an_abort_in_the_step_that_preempts(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], mode: str, kind: str
) -> None:
    """Its blocks were to be moved in this step, or given up."""
    engine = make_engine(**setting(4, blocks=9, block_size=2, mode=mode))
    submit(engine)
    victims: list[str] = []

    def abort() -> None:
        assert engine.abort_request(victims[0])

    class WhenSomebodyGoes:
        def read(self, record: Any) -> None:
            if record.event.kind != "preempted" or victims:
                return
            victims.append(record.event.rid)
            if kind == "preempted":
                abort()
            else:
                OnEvent(engine.tracer, kind, abort)

        def close(self) -> None: ...

    engine.tracer.attach(WhenSomebodyGoes())
    last = run(engine)
    assert len(victims) == 1
    assert last[victims[0]].finish_reason == "abort"
    assert all(last[rid].token_ids == expected[rid] for rid in PROMPTS if rid not in victims)


@pytest.mark.parametrize("kind", ["blocks_swapped", "admit", "batch"])
def test_an_abort_while_it_is_swapped_in(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], kind: str
) -> None:
    engine = make_engine(**setting(4, blocks=9, block_size=2, mode="swap"))
    submit(engine)
    victim: list[str] = []

    class WhenItComesBack:
        def read(self, record: Any) -> None:
            event = record.event
            if event.kind == "blocks_swapped" and event.direction == "in" and not victim:
                victim.append(event.owner)
                if kind == "blocks_swapped":
                    assert engine.abort_request(event.owner)
                else:
                    OnEvent(engine.tracer, kind, lambda: engine.abort_request(victim[0]))

        def close(self) -> None: ...

    engine.tracer.attach(WhenItComesBack())
    last = run(engine)
    assert len(victim) == 1 and last[victim[0]].finish_reason == "abort"
    assert all(last[rid].token_ids == expected[rid] for rid in PROMPTS if rid not in victim)


def test_all_can_be_aborted_at_once_wherever_they_are(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(**setting(4, blocks=9, block_size=2, mode=mode))
    submit(engine)
    until_preempted(engine)
    assert all(engine.abort_request(rid) for rid in PROMPTS)
    assert not any(engine.abort_request(rid) for rid in PROMPTS)
    assert {end for end, _ in ends(engine.step()).values()} == {"abort"}
    check_drained(engine)
    assert engine.step() == {}
    assert engine.stats().num_finished == {"abort": 4}


def test_a_closed_stream_leaves_a_crowded_memory_and_no_other_stream_notices(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], mode: str
) -> None:
    engine = make_engine(**setting(2, blocks=9, block_size=2, mode=mode))
    streams = {rid: engine.stream(prompt, greedy(9), request_id=rid) for rid, prompt in PROMPTS.items()}
    next(streams["a"])
    streams["a"].close()
    streams["d"].close()  # it waits
    assert [output.token_ids for output in streams["b"]] == [expected["b"][:n] for n in range(1, 10)]
    *_, last = streams["c"]
    assert last.token_ids == expected["c"]
    check_drained(engine)
    assert engine.stats().num_finished == {"abort": 2, "length": 2}


def test_the_trace_says_what_an_aborted_request_held(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for rid in ("a", "b"):
        engine.add_request(PROMPTS[rid], greedy(9), request_id=rid)
    engine.step()
    recorder = Recorder(engine.tracer)
    engine.abort_request("a")
    engine.step()
    (freed,) = recorder.events("blocks_freed")
    assert (freed.owner, freed.block_ids, freed.num_kept, freed.on_host) == ("a", (1,), 0, False)
    assert held(engine) == len(PROMPTS["b"]) + 1
    run(engine)


# --- one of several continuations -------------------------------------------------------------------------------------


def rows_of(output: Any) -> list[Any]:
    """The log-probabilities of a prompt, without the last bits."""
    return [row and {token: round(entry.logprob, 3) for token, entry in row.items()} for row in output.prompt_logprobs]


@pytest.mark.parametrize("when", ["waiting", "admit", "batch", "sampled"])
@pytest.mark.parametrize("given_up", [(0,), (0, 1), (0, 2), (0, 1, 2)], ids=str)
def test_the_prompts_logprobs_are_another_childs_task_if_the_first_one_is_given_up_before(
    make_engine: MakeEngine, when: str, given_up: tuple[int, ...]
) -> None:
    params = greedy(4, n=4, prompt_logprobs=2, temperature=1.0, seed=7)
    usual = make_engine(**setting(4)).generate([5, 6, 7, 8, 9], params)
    engine = make_engine(**setting(4))
    engine.add_request([5, 6, 7, 8, 9], params, request_id="p")

    def give_up() -> None:
        assert all(engine.abort_request(f"p/{child}") for child in given_up)

    if when == "waiting":
        give_up()
    else:
        OnEvent(engine.tracer, when, give_up, rid="p/0")
    output = run(engine)["p"]
    assert rows_of(output) == rows_of(usual)
    for child, completion in enumerate(output.outputs):
        assert completion.finish_reason == ("abort" if child in given_up else "length")
        assert completion.token_ids == (() if child in given_up else usual.outputs[child].token_ids)


def test_the_prompts_logprobs_stay_with_the_child_that_brought_them(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(3))
    engine.add_request([5, 6, 7], greedy(5, n=3, prompt_logprobs=1, temperature=1.0), request_id="p")
    engine.step()
    engine.abort_request("p/0")
    output = run(engine)["p"]
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "length", "length"]
    assert len(output.prompt_logprobs) == 3
    assert engine.stats().num_prompt_tokens == 3, "nobody computed the prompt again"


def test_a_family_that_is_given_up_as_a_whole_has_no_heir(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(3))
    engine.add_request([5, 6, 7], greedy(5, n=3, prompt_logprobs=1), request_id="p")
    assert engine.abort_request("p")
    output = run(engine)["p"]
    assert output.prompt_logprobs is None and output.finish_reason == "abort"
