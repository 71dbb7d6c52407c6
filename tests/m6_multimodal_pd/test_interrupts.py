"""Ctrl-C while a request is checked: intake is not held, so that a slow download can be stopped, and changes nothing.

An interrupt before any of its lines gives no number of a picture to another one. That it leaves no request behind is
tested for all milestones (`tests/engine_contract`).
"""

from itertools import count
from typing import Any

from m6_multimodal_pd.multimodal import inputs
from tests.m6_multimodal_pd.engines import MakeEngine, finish, greedy, setting
from tests.m6_multimodal_pd.seeing import picture, text
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
