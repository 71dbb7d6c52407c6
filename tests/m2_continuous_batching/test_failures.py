"""What a failed forward leaves in the slots: nothing.

All that every milestone with batches promises about failures is tested in `tests/engine_contract`.
"""

from typing import Any

import pytest
from torch import Tensor

from tests.engine_contract.crowd import Answers, answers_of, check_the_rest, submit
from tests.engine_contract.variants import M2_PADDED
from tests.m2_continuous_batching.engines import MakeEngine, check_step, held, limits, run

BOOM = RuntimeError("the forward broke")


@pytest.fixture
def expected(make_m1: Any) -> Answers:
    """What everybody gets if nothing breaks."""
    return answers_of(make_m1)


def test_a_forward_that_breaks_between_two_layers_leaves_nothing_behind(
    make_engine: MakeEngine, expected: Answers
) -> None:
    """Some of the step's keys are in the slots already."""
    engine = make_engine(**limits(3))
    submit(engine)
    engine.step()
    execution = engine.engine_core.executor.worker.model_runner.execution
    last_layer, update = execution.cache.layers[-1], execution.cache.layers[-1].update

    def broken(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        last_layer.update = update
        raise BOOM

    last_layer.update = broken
    outputs = engine.step()
    check_step(engine)
    assert {rid: o.finish_reason for rid, o in outputs.items()} == dict.fromkeys("abc", "error")
    assert held(engine) == 0 and not execution.cache.key_cache.any() and not execution.cache.value_cache.any()
    check_the_rest(M2_PADDED, engine, outputs | run(engine), expected, {"a": 1, "b": 1, "c": 1}, BOOM)
