"""Ctrl-C while a request is checked: intake is not held, so that a slow download can be stopped, and changes nothing.

An interrupt before any of its lines leaves no request behind, and gives no number of a picture to another one.
"""

from itertools import count
from typing import Any

from m6_multimodal_pd import LLMEngine, input_processor
from m6_multimodal_pd.multimodal import inputs, prompt
from tests.m6_multimodal_pd.engines import MakeEngine, check_drained, finish, greedy, setting
from tests.m6_multimodal_pd.seeing import Theirs, asking, picture, text
from tests.testbed.interrupts import interrupted


def arrival(number: int) -> list[dict[str, Any]]:
    """A picture that nobody has seen yet, as long as all others."""
    return [{"role": "user", "content": [{"type": "image", "image": picture(f"new {number}", 2, 2)}, text(1)]}]


def test_an_interrupt_before_any_line_of_an_arrival_gives_no_number_twice(make_engine: MakeEngine) -> None:
    """Two contents under one number would read each other's KV. A picture gets its number in `process_request`."""
    engine: Any = make_engine(**setting())
    intake, settings = engine.engine_core.input_processor, {"number": 0, "arrival_time": 0.0}
    known: dict[int, str] = {}
    for line in count(1):
        with interrupted(line, [inputs]) as interrupt:
            intake.process_request("r", arrival(line), greedy(1), **settings)
        for number in (line, -line):
            rid = engine.add_request(arrival(number), greedy(1))
            (item,) = engine.engine_core.scheduler.requests[rid].multimodal_inputs.mm_items
            assert known.setdefault(item.pad_value, item.hash) == item.hash, f"before {interrupt.where}"
            engine.abort_request(rid)
        if interrupt.where is None:
            break
    assert line > 20 and min(known) >= 4096
    finish(engine)


def test_an_interrupted_arrival_is_nobody_s(make_engine: MakeEngine, their_model: Theirs) -> None:
    engine: LLMEngine = make_engine(**setting())
    wanted = their_model.answer(engine.chat_prompt(asking("a", 1))).token_ids[:3]
    for line in range(1, 120, 7):
        with interrupted(line, [input_processor, prompt, inputs]) as interrupt:
            engine.add_request(asking("b", 2), greedy(3), request_id="r")
        if interrupt.where is None:
            break
        assert not engine.has_unfinished_requests(), f"after an interrupt before {interrupt.where}"
        assert engine.generate(asking("a", 1), greedy(3), request_id="r").token_ids == wanted
    check_drained(engine)
