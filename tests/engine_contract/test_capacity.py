"""When KV memory is short: a prompt that can never fit is refused, a request that outgrows the memory ends alone.

All other requests are served, in turns if need be. What it costs (preemption, retraction, eviction) and how the memory
is sized is tested with the milestone.
"""

from typing import Any

import pytest

from m3_paged_attention import KVCapacityError
from tests.engine_contract.crowd import MakeEngine, ids, run
from tests.engine_contract.variants import VARIANTS, WHOLE, Variant, each_of
from tests.support.engines import Recorder, greedy
from tests.support.families import Singles, check_children, drawn

pytestmark = pytest.mark.sample(3)

LIMITED = [variant for variant in VARIANTS if variant.milestone >= "m3"]


variant = each_of(LIMITED)
"""Every milestone whose requests share KV memory."""


def test_a_prompt_over_the_whole_memory_is_refused_by_every_call(variant: Variant, make_engine: MakeEngine) -> None:
    engine = make_engine(seats=2, room=12)
    for call in (engine.add_request, engine.generate, engine.stream):
        for params in (greedy(2), drawn(2, n=3)):
            with pytest.raises(KVCapacityError, match="'big' has 13 prompt tokens"):
                call(ids(13), params, request_id="big")
    assert not engine.has_unfinished_requests()
    refused, served = engine.generate_batch([ids(13), ids(3)], greedy(2)).values()
    assert isinstance(refused.error, KVCapacityError) and refused.finish_reason == "error"
    assert served.finish_reason == "length"
    variant.check_drained(engine)


def test_the_longest_prompt_runs_until_the_memory_is_full(make_engine: MakeEngine) -> None:
    engine = make_engine(seats=2, room=12)
    assert engine.generate(ids(10), greedy(3)).finish_reason == "length"
    output = engine.generate(ids(10), greedy(4))
    assert (output.finish_reason, len(output.token_ids)) == ("error", 3)
    assert isinstance(output.error, KVCapacityError) and "13 tokens" in str(output.error)


def test_a_request_that_outgrows_the_memory_keeps_its_tokens_and_the_others_go_on(
    variant: Variant, make_engine: MakeEngine, make_m1: Any
) -> None:
    engine, alone = make_engine(seats=3, room=24), make_m1()
    asked = {"big": (ids(5), 40), "small": (ids(3, 9), 12), "late": (ids(4, 7), 9)}
    for rid, (prompt, max_tokens) in asked.items():
        engine.add_request(prompt, greedy(max_tokens), request_id=rid)
    outputs = run(variant, engine)
    assert isinstance(outputs["big"].error, KVCapacityError) and "'big'" in str(outputs["big"].error)
    assert len(outputs["big"].token_ids) == 20, "there is room for 20 beside its prompt"
    for rid, (prompt, _) in asked.items():
        tokens = outputs[rid].token_ids
        assert tokens == alone.generate(prompt, greedy(len(tokens))).token_ids
    assert engine.stats().num_finished == {"error": 1, "length": 2}
    assert engine.generate(ids(5), greedy(15)).finish_reason == "length"


def test_a_family_that_does_not_fit_together_runs_in_turns(
    variant: Variant, make_engine: MakeEngine, make_m1: Any
) -> None:
    engine, params = make_engine(room=14), drawn(5)
    check_children(engine.generate(ids(7), params), Singles(make_m1())(ids(7), params))
    variant.check_drained(engine)


@pytest.mark.parametrize("variant", [variant for variant in WHOLE if variant.milestone >= "m3"], ids=str)
def test_a_request_that_lost_its_place_may_exceed_the_token_budget_alone(
    variant: Variant, make_engine: MakeEngine, make_m1: Any
) -> None:
    """Its output counts as prompt when it is computed again."""
    engine, alone = make_engine(seats=2, budget=8, room=20), make_m1()
    recorder = Recorder(engine.tracer)
    for n in (0, 1):
        engine.add_request(ids(7, n), greedy(9), request_id=str(n))
    outputs = run(variant, engine)
    over = [batch for batch in recorder.events("batch") if batch.total_tokens > 8]
    assert all(len(batch.rids) == 1 for batch in over)
    for n in (0, 1):
        assert outputs[str(n)].token_ids == alone.generate(ids(7, n), greedy(9)).token_ids
