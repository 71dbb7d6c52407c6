"""Aborts in the very step that preempts a request or brings it back.

All that every milestone with batches promises about aborts is tested in `tests/engine_contract`.
"""

from typing import Any

import pytest

from tests.engine_contract.test_aborts import PROMPTS, expected as expected, submit
from tests.m3_paged_attention.engines import MODES, MakeEngine, OnEvent, run, setting


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
