"""What a part of one's own can change in m2.

That every role takes a part that fits and refuses one that does not is tested in `tests/engine_contract`.
"""

from typing import Any

from torch import Tensor

import m1_single_request
from m2_continuous_batching import PARTS, PromptTooLongError
from m2_continuous_batching.executor import GPUExecutor
from m2_continuous_batching.input_batch import InputBatch
from m2_continuous_batching.input_processor import InputProcessor
from m2_continuous_batching.model_runner import ModelRunner
from m2_continuous_batching.worker import GPUWorker
from tests.m2_continuous_batching.engines import MakeEngine, greedy, limits

PROMPTS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]


def test_parts_of_m1_still_fit_where_m2_changed_nothing() -> None:
    unchanged = {"sampler", "stop_checker", "detokenizer", "output_processor", "request", "model_loader"}
    assert {role for role in PARTS if PARTS[role] is m1_single_request.PARTS.get(role)} == unchanged


def test_executor_worker_and_runner_of_ones_own_pass_the_batch_down(make_engine: MakeEngine, execution: str) -> None:
    passed: list[str] = []

    class Noting:
        def execute_model_batch(self, input_batch: InputBatch) -> dict[str, Tensor]:
            passed.append(type(self).__mro__[2].__name__)
            return super().execute_model_batch(input_batch)  # type: ignore[misc]

    bases = {"executor": GPUExecutor, "worker": GPUWorker, "model_runner": ModelRunner}
    parts = {role: type("Own", (Noting, base), {}) for role, base in bases.items()}
    usual, own = (make_engine(table, **limits(2, execution=execution)) for table in ({}, parts))
    assert own.generate(PROMPTS[0], greedy(3)).token_ids == usual.generate(PROMPTS[0], greedy(3)).token_ids
    assert passed == ["GPUExecutor", "GPUWorker", "ModelRunner"] * 3


class ShortPrompts(InputProcessor):
    """Takes two tokens at most."""

    def check_limits(self, token_ids: list[int], params: Any, request_id: str) -> None:
        super().check_limits(token_ids, params, request_id)
        if len(token_ids) > 2:
            raise PromptTooLongError(f"{request_id!r} is too long for me")


def test_an_input_processor_of_ones_own_refuses_what_it_likes(make_engine: MakeEngine) -> None:
    outputs = make_engine({"input_processor": ShortPrompts}).generate_batch(PROMPTS, greedy(2))
    assert [output.finish_reason for output in outputs.values()] == ["error", "length", "length", "error"]
