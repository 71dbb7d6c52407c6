"""Which requests can be aborted, and what is reported of an abort.

What every milestone does with an abort, at every moment of a step, is tested in `tests/engine_contract`.
"""

from m1_single_request import LLMEngine
from tests.m1_single_request.engines import OnEvent, drain, greedy

PROMPT = [21, 22, 23]


def test_an_unknown_or_finished_request_cannot_be_aborted(engine: LLMEngine) -> None:
    assert not any(engine.abort_request(name) for name in ("stranger", None, 5, [], {}))
    rid = engine.generate("a", greedy(2)).request_id
    assert not engine.abort_request(rid)
    assert engine.step() == {}
    assert engine.stats().num_finished == {"length": 1}


def test_ids_are_exact(engine: LLMEngine) -> None:
    for rid in ("req-1", "req-10"):
        engine.add_request("a", greedy(2), request_id=rid)
    assert engine.abort_request("req-1")
    assert not engine.abort_request("req")
    last = drain(engine)
    assert {rid: output.finish_reason for rid, output in last.items()} == {"req-1": "abort", "req-10": "length"}


def test_a_request_that_has_ended_by_itself_cannot_be_aborted_any_more(engine: LLMEngine) -> None:
    rid = engine.add_request(PROMPT, greedy(2))
    reader = OnEvent(engine.tracer, "finish", lambda: engine.abort_request(rid))
    assert drain(engine)[rid].finish_reason == "length"
    assert reader.acted and reader.result is False
