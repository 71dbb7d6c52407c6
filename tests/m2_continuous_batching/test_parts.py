"""Parts of one's own in m2's roles: what fits is used by this engine alone, what does not fit is a readable error."""

import functools
from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

import m1_single_request
from m1_single_request.request import Request
from m2_continuous_batching import PARTS, ConfigError, LLMEngine, PromptTooLongError
from m2_continuous_batching.engine_core import EngineCore
from m2_continuous_batching.executor import GPUExecutor
from m2_continuous_batching.input_batch import InputBatch
from m2_continuous_batching.input_processor import InputProcessor
from m2_continuous_batching.kv_manager import SlotManager
from m2_continuous_batching.model_runner import ModelRunner
from m2_continuous_batching.scheduler import Scheduler
from m2_continuous_batching.step_plan import StepPlan
from m2_continuous_batching.worker import GPUWorker
from tests.m2_continuous_batching.engines import MakeEngine, Recorder, check_drained, greedy, limits, run

PROMPTS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]

# --- what does not fit ------------------------------------------------------------------------------------------------


def test_every_role_has_a_part_and_every_part_a_role() -> None:
    assert LLMEngine.parts is PARTS
    assert m1_single_request.PARTS.keys() < PARTS.keys()
    assert PARTS.keys() - m1_single_request.PARTS.keys() == {"kv_manager", "worker", "executor"}


class KVManagerWithoutRelease:
    def __init__(self, *, max_num_seqs: int, max_model_len: int) -> None: ...
    def can_hold(self, request_id: str, num_tokens: int) -> bool: ...
    def reserve(self, request_id: str, num_tokens: int) -> list[int]: ...
    def block_ids(self, request_id: str) -> list[int]: ...
    def owned(self) -> Mapping[str, list[int]]: ...
    def check_invariants(self) -> None: ...


class KVManagerThatInsists(SlotManager):
    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        super().__init__(max_num_seqs=max_num_seqs, max_model_len=max_model_len)


class WorkerWithoutArguments(GPUWorker):
    def __init__(self) -> None: ...


class ExecutorThatForgets:
    def __init__(self, *, worker: GPUWorker) -> None: ...
    def execute_model_batch(self, input_batch: InputBatch) -> dict[str, Tensor]: ...


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"kv_manager": KVManagerWithoutRelease}, r"'kv_manager': KVManagerWithoutRelease has no release\(\)"),
        ({"kv_manager": KVManagerThatInsists}, "cannot be called as the default part is: .* 'block_size'"),
        (
            {"worker": WorkerWithoutArguments},
            "cannot be called as the default part is: .* 'model_runner'",
        ),
        ({"executor": ExecutorThatForgets}, r"'executor': ExecutorThatForgets has no .*free_request_cache\(\)"),
        ({"executor": GPUWorker}, "cannot be called as the default part is: .* 'model_runner'"),
        ({"scheduler": m1_single_request.PARTS["scheduler"]}, "'scheduler': Scheduler cannot be called as the"),
        ({"model_runner": m1_single_request.PARTS["model_runner"]}, r"has no execute_model_batch\(\)"),
        (
            {"engine_core": m1_single_request.PARTS["engine_core"]},
            "cannot be called as the default part is: .* 'model_runner'",
        ),
        ({"block_manager": SlotManager}, "no role 'block_manager'.*kv_manager"),
        ({"kv_manager": 16}, "must be a class or a function, not 16"),
    ],
    ids=str,
)
def test_a_part_that_does_not_fit_is_refused_before_anything_is_loaded(parts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMEngine("/nowhere", parts=parts)


# --- what fits --------------------------------------------------------------------------------------------------------


class HighestFirst(SlotManager):
    """Hands out the last slot first."""

    def reserve(self, request_id: str, num_tokens: int) -> list[int]:
        if request_id in self._slots:
            return []
        taken = set(self._slots.values())
        slot = self._slots[request_id] = next(s for s in reversed(range(self.num_slots)) if s not in taken)
        return [slot]


def test_a_kv_manager_of_ones_own_hands_out_the_slots(make_engine: MakeEngine, execution: str) -> None:
    usual = make_engine(**limits(3, execution=execution)).generate_batch(PROMPTS, greedy(6))
    engine = make_engine({"kv_manager": HighestFirst}, **limits(3, execution=execution))
    recorder = Recorder(engine.tracer)
    outputs = engine.generate_batch(PROMPTS, [greedy(n) for n in (6, 2, 4, 6)])
    assert [admit.block_ids for admit in recorder.events("admit")] == [(2,), (1,), (0,), (1,)]
    for output, whole in zip(outputs.values(), usual.values(), strict=True):
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    check_drained(engine)


class FullForOthers(SlotManager):
    """Has room for eight tokens in all."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.held: dict[str, int] = {}

    def can_hold(self, request_id: str, num_tokens: int) -> bool:
        others = sum(tokens for rid, tokens in self.held.items() if rid != request_id)
        return others + num_tokens <= 8 and super().can_hold(request_id, num_tokens)

    def reserve(self, request_id: str, num_tokens: int) -> list[int]:
        self.held[request_id] = num_tokens
        return super().reserve(request_id, num_tokens)

    def release(self, request_id: str) -> None:
        self.held.pop(request_id, None)
        super().release(request_id)


def test_a_kv_manager_that_is_full_lets_prompts_wait(make_engine: MakeEngine) -> None:
    engine = make_engine({"kv_manager": FullForOthers}, **limits(4))
    recorder = Recorder(engine.tracer)
    outputs = engine.generate_batch([[5, 6, 7]] * 3, greedy(2))
    assert [output.finish_reason for output in outputs.values()] == ["length"] * 3
    refused = recorder.events("not_admitted")
    assert {event.limit for event in refused} == {"kv_memory"} and refused[0].needed == 3
    assert max(len(batch.rids) for batch in recorder.events("batch")) == 2


class NewestFirst(Scheduler):
    """Last come, first served."""

    def _admit(self, plan: StepPlan) -> None:
        self.waiting.reverse()
        super()._admit(plan)
        self.waiting.reverse()


def test_a_scheduler_of_ones_own_decides_the_order(make_engine: MakeEngine) -> None:
    def admitted(engine: LLMEngine) -> list[str]:
        recorder = Recorder(engine.tracer)
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(prompt, greedy(2), request_id=str(number))
        run(engine)
        return [admit.rid for admit in recorder.events("admit")]

    assert admitted(make_engine({"scheduler": NewestFirst}, **limits(2))) == ["3", "2", "1", "0"]
    assert admitted(make_engine(**limits(2))) == ["0", "1", "2", "3"], "other engines are not affected"
    assert PARTS["scheduler"] is Scheduler


def test_executor_worker_and_runner_of_ones_own_pass_the_batch_down(make_engine: MakeEngine, execution: str) -> None:
    passed: list[str] = []

    class Noting:
        def execute_model_batch(self, input_batch: InputBatch) -> dict[str, Tensor]:
            passed.append(type(self).__mro__[1].__name__)
            return super().execute_model_batch(input_batch)  # type: ignore[misc]

    class MyExecutor(Noting, GPUExecutor): ...

    class MyWorker(Noting, GPUWorker): ...

    class MyRunner(Noting, ModelRunner): ...

    engine = make_engine(
        {"executor": MyExecutor, "worker": MyWorker, "model_runner": MyRunner}, **limits(2, execution=execution)
    )
    executor = engine.engine_core.executor
    assert (type(executor), type(executor.worker)) == (MyExecutor, MyWorker)
    assert type(executor.worker.model_runner) is MyRunner
    expected = make_engine(**limits(2, execution=execution)).generate(PROMPTS[0], greedy(3)).token_ids
    assert engine.generate(PROMPTS[0], greedy(3)).token_ids == expected
    assert len(passed) == 3 * 3


class ShortPrompts(InputProcessor):
    """Takes two tokens at most."""

    def check_limits(self, token_ids: list[int], params: Any, request_id: str) -> None:
        super().check_limits(token_ids, params, request_id)
        if len(token_ids) > 2:
            raise PromptTooLongError(f"{request_id!r} is too long for me")


def test_an_input_processor_of_ones_own_refuses_what_it_likes(make_engine: MakeEngine) -> None:
    outputs = make_engine({"input_processor": ShortPrompts}).generate_batch(PROMPTS, greedy(2))
    assert [output.finish_reason for output in outputs.values()] == ["error", "length", "length", "error"]


def test_an_engine_core_of_ones_own_may_count_more(make_engine: MakeEngine) -> None:
    class Counting(EngineCore):
        added = 0

        def add_request(self, request: Request) -> None:
            self.added += 1
            super().add_request(request)

    engine = make_engine({"engine_core": Counting})
    engine.generate_batch(PROMPTS, greedy(1))
    assert engine.engine_core.added == 4


def test_a_function_that_builds_the_part_fits_as_well(make_engine: MakeEngine) -> None:
    made: list[Any] = []

    def kv_manager(**limits: Any) -> SlotManager:
        made.append(HighestFirst(**limits))
        return made[-1]

    engine = make_engine({"kv_manager": kv_manager, "scheduler": functools.partial(NewestFirst)}, **limits(2))
    assert engine.engine_core.scheduler.kv_manager is made[0]
    assert len(engine.generate_batch(PROMPTS, greedy(2))) == 4


def test_parts_of_m1_still_fit_where_m2_changed_nothing(make_engine: MakeEngine) -> None:
    unchanged = {"sampler", "stop_checker", "detokenizer", "output_processor", "request", "model_loader"}
    assert {role for role in PARTS if PARTS[role] is m1_single_request.PARTS.get(role)} == unchanged
