"""Giving up in a batch: while waiting, in the prefill, in a decode, preempted, on the host, at every moment of a step.

An abort only marks; the step's update ends the request, and its blocks are free for the next step. It is reported
exactly once, and nobody else notices.
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


def test_a_waiting_request_ends_with_the_next_step_and_the_others_run(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(2))
    submit(engine)
    engine.step()
    assert engine.abort_request("c")
    outputs = engine.step()
    assert outputs.keys() == {"a", "b", "c"}
    assert outputs["c"].finish_reason == "abort" and outputs["c"].token_ids == ()
    assert outputs["c"].metrics.first_token_time is None
    assert len(outputs["a"].token_ids) == len(outputs["b"].token_ids) == 2, "nobody lost a step"
    assert ends(outputs | run(engine)) == {
        "a": ("length", 9),
        "b": ("length", 9),
        "c": ("abort", 0),
        "d": ("length", 9),
    }


def test_the_last_waiting_request_ends_in_a_step_that_runs_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(PROMPTS["a"], greedy(9), request_id="a")
    engine.abort_request("a")
    recorder = Recorder(engine.tracer)
    assert ends(engine.step()) == {"a": ("abort", 0)}
    assert [kind for kind in recorder.kinds() if kind != "kv_usage"] == ["finish", "step_done"]
    check_drained(engine)


@pytest.mark.parametrize(
    ("kind", "nth", "kept", "steps"),
    [
        ("admit", 1, 0, 1),  # running, but before its prefill
        ("batch", 1, 0, 1),  # between schedule and update: the first token is dropped
        ("sampled", 1, 0, 1),
        ("batch", 4, 3, 4),  # in a decode
        ("sampled", 4, 3, 4),
        ("result", 4, 4, 4),  # the token was committed before
        ("kv_usage", 4, 4, 5),
        ("step_done", 4, 4, 5),
    ],
)
def test_an_abort_within_a_step_takes_effect_at_its_update(
    make_engine: MakeEngine,
    expected: dict[str, tuple[int, ...]],
    kind: str,
    nth: int,
    kept: int,
    steps: int,
) -> None:
    engine = make_engine(**setting(3))
    submit(engine)
    rid = "b" if kind in ("admit", "sampled", "result") else None
    reader = OnEvent(engine.tracer, kind, lambda: engine.abort_request("b"), nth=nth, rid=rid)
    last: dict[str, Any] = {}
    while "b" not in last or not last["b"].finished:
        assert engine.stats().num_steps < 9, "the abort took no effect"
        last |= engine.step()
    check_step(engine)
    assert (reader.result, reader.error) == (True, None)
    assert (last["b"].finish_reason, last["b"].token_ids) == ("abort", expected["b"][:kept])
    assert engine.stats().num_steps == steps
    assert "b" not in engine.engine_core.executor.held_request_ids()
    last |= run(engine)
    assert {rid: output.token_ids for rid, output in last.items()} == expected | {"b": expected["b"][:kept]}
    assert engine.stats().num_finished == {"length": 3, "abort": 1}


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


def test_all_of_a_batch_can_be_aborted_at_once(make_engine: MakeEngine, mode: str) -> None:
    engine = make_engine(**setting(4, blocks=9, block_size=2, mode=mode))
    submit(engine)
    until_preempted(engine)
    assert all(engine.abort_request(rid) for rid in PROMPTS)
    assert not any(engine.abort_request(rid) for rid in PROMPTS)
    assert {end for end, _ in ends(engine.step()).values()} == {"abort"}
    check_drained(engine)
    assert engine.step() == {}
    assert engine.stats().num_finished == {"abort": 4}


def test_an_aborted_decode_that_the_budget_left_out_ends_all_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(3, 4))
    engine.add_request([5, 6], greedy(9), request_id="a")
    engine.step()
    for rid in ("long", "longer"):
        engine.add_request([7, 8, 9, 10], greedy(3), request_id=rid)
    recorder = Recorder(engine.tracer)
    engine.step()
    assert recorder.events("left_out")[0].rids == ("a",)
    engine.abort_request("a")
    assert ends(engine.step())["a"] == ("abort", 1)
    check_step(engine)
    assert ends(run(engine)) == {"long": ("length", 3), "longer": ("length", 3)}


def test_a_closed_stream_leaves_the_batch_and_no_other_stream_notices(
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


def test_everything_about_an_abort_is_in_the_trace(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for rid in ("a", "b"):
        engine.add_request(PROMPTS[rid], greedy(9), request_id=rid)
    engine.step()
    recorder = Recorder(engine.tracer)
    engine.abort_request("a")
    engine.step()
    engine.step()
    (abort,), (finish,), (freed,) = (recorder.events(kind) for kind in ("abort", "finish", "blocks_freed"))
    assert (abort.rid, abort.state) == ("a", "running")
    assert (finish.rid, finish.reason, finish.out_len) == ("a", "abort", 1)
    assert (freed.owner, freed.block_ids, freed.num_kept, freed.on_host) == ("a", (1,), 0, False)
    assert [(batch.rids, batch.left) for batch in recorder.events("batch")] == [(("b",), ()), (("b",), ("a",))]
    assert held(engine) == len(PROMPTS["b"]) + 2
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
