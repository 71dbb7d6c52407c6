"""Aborts of preempted requests, of requests on the host, and of one of several continuations.

All that every milestone with batches promises about aborts is tested in `tests/engine_contract`.
"""

from typing import Any

import pytest

from tests.engine_contract.test_aborts import PROMPTS, expected as expected, submit
from tests.m3_paged_attention.engines import MODES, MakeEngine, OnEvent, check_step, greedy, run, setting


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
    num_tokens = len(last[victim].token_ids)
    assert engine.abort_request(victim)
    last |= engine.step()
    check_step(engine)
    assert (last[victim].finish_reason, last[victim].token_ids) == ("abort", expected[victim][:num_tokens])
    assert not scheduler.kv_manager.swapped()
    last |= run(engine)
    assert all(last[rid].token_ids == expected[rid] for rid in PROMPTS if rid != victim)


@pytest.mark.parametrize(
    ("mode", "kind", "when"),
    [
        *((mode, "preempted", when) for mode in MODES for when in ("at once", "batch", "step_done")),
        *(("swap", "blocks_swapped", when) for when in ("at once", "admit", "batch")),
    ],
)
def test_an_abort_in_the_step_that_preempts_a_request_or_swaps_it_in(
    make_engine: MakeEngine, expected: dict[str, tuple[int, ...]], mode: str, kind: str, when: str
) -> None:
    """Its blocks were to be moved in this step, or given up."""
    engine = make_engine(**setting(4, blocks=9, block_size=2, mode=mode))
    submit(engine)
    moved: list[str] = []

    class AbortsTheFirst:
        def read(self, record: Any) -> None:
            event = record.event
            if event.kind != kind or moved or getattr(event, "direction", "in") == "out":
                return
            moved.extend(event.request_ids())
            if when == "at once":
                assert engine.abort_request(moved[0])
            else:
                OnEvent(engine.tracer, when, lambda: engine.abort_request(moved[0]))

        def close(self) -> None: ...

    engine.tracer.attach(AbortsTheFirst())
    last = run(engine)
    assert len(moved) == 1 and last[moved[0]].finish_reason == "abort"
    assert all(last[rid].token_ids == expected[rid] for rid in PROMPTS if rid not in moved)


# --- one of several continuations -------------------------------------------------------------------------------------


def test_the_prompts_logprobs_stay_with_the_child_that_brought_them(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(3))
    engine.add_request([5, 6, 7], greedy(5, n=3, prompt_logprobs=1, temperature=1.0), request_id="p")
    engine.step()
    engine.abort_request("p/0")
    output = run(engine)["p"]
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "length", "length"]
    assert len(output.prompt_logprobs) == 3
    assert engine.stats().num_prompt_tokens == 3, "the prompt is not computed again"


def test_a_family_that_is_given_up_as_a_whole_has_no_heir(make_engine: MakeEngine) -> None:
    engine = make_engine(**setting(3))
    engine.add_request([5, 6, 7], greedy(5, n=3, prompt_logprobs=1), request_id="p")
    assert engine.abort_request("p")
    output = run(engine)["p"]
    assert output.prompt_logprobs is None and output.finish_reason == "abort"
