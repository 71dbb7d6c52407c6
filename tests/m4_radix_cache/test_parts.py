"""Parts of one's own in m4's roles: what fits is used by this engine alone, what does not fit is a readable error."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import m3_paged_attention
from m3_paged_attention.executor import GPUExecutor
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.worker import GPUWorker
from m4_radix_cache import PARTS, CacheConfig, ConfigError, LLMEngine, PromptTooLongError
from m4_radix_cache.engine_core import EngineCore
from m4_radix_cache.input_processor import InputProcessor
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.chunk_cache import ChunkCache
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.model_runner import ModelRunner
from m4_radix_cache.model_worker_batch import ModelWorkerBatch
from m4_radix_cache.prefill_adder import AddReqResult, PrefillAdder
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_policy import Order, SchedulePolicy
from m4_radix_cache.scheduler import Scheduler
from tests.m4_radix_cache.engines import (
    InTurn,
    MakeEngine,
    Recorder,
    cache_of,
    cached_len,
    check_drained,
    greedy,
    ids,
    run,
    runner_of,
    scheduler_of,
    setting,
)

PROMPTS = [[5, 6, 7, 8, 9], [8], [9, 10], [11, 12, 13, 14]]
NEW_ROLES = {"req_to_token_pool", "token_to_kv_pool_allocator", "prefix_cache", "schedule_policy", "prefill_adder"}


def tokens_of(engine: LLMEngine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate_batch(PROMPTS, greedy(6)).values()]


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_every_role_has_a_part_and_every_part_a_role() -> None:
    assert LLMEngine.parts is PARTS
    assert PARTS.keys() - m3_paged_attention.PARTS.keys() == NEW_ROLES
    assert m3_paged_attention.PARTS.keys() - PARTS.keys() == {"kv_manager"}


def test_parts_of_before_still_fit_where_m4_changed_nothing() -> None:
    same = {role for role in PARTS if PARTS[role] is m3_paged_attention.PARTS.get(role)}
    assert same >= {"model_loader", "executor", "worker", "sampler", "stop_checker", "detokenizer", "preemption"}
    assert not same & (NEW_ROLES | {"scheduler", "model_runner", "request", "engine_core", "input_processor", "wiring"})


class CacheWithoutLocks(RadixCache):
    inc_lock_ref = None  # type: ignore[assignment]


class PolicyWithoutOrder:
    def __init__(self, policy: str, *, tree_cache: Any, seed: int, tracer: Any) -> None: ...


class AdderThatInsists(PrefillAdder):
    def __init__(self, *, chunk_size: int, **arguments: Any) -> None:
        super().__init__(**arguments)


class RowsWithoutTables(ReqToTokenPool):
    page_tables = None  # type: ignore[assignment]


class AllocatorWithoutDecode(TokenToKVPoolAllocator):
    alloc_decode = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"prefix_cache": CacheWithoutLocks}, r"'prefix_cache': CacheWithoutLocks has no inc_lock_ref\(\)"),
        ({"prefix_cache": dict}, r"'prefix_cache': dict has no .*match_prefix\(\).*evict\(\)"),
        ({"prefix_cache": "hash"}, "'prefix_cache' must be a class or a function, not 'hash'"),
        ({"schedule_policy": PolicyWithoutOrder}, r"PolicyWithoutOrder has no calc_priority\(\)"),
        ({"schedule_policy": "lpm"}, "'schedule_policy' must be a class or a function, not 'lpm'"),
        ({"prefill_adder": AdderThatInsists}, "cannot be called as the default part is: .* 'chunk_size'"),
        ({"req_to_token_pool": RowsWithoutTables}, r"RowsWithoutTables has no page_tables\(\)"),
        ({"token_to_kv_pool_allocator": AllocatorWithoutDecode}, r"AllocatorWithoutDecode has no alloc_decode\(\)"),
        ({"token_to_kv_pool_allocator": 16}, "must be a class or a function, not 16"),
        ({"kv_manager": m3_paged_attention.PARTS["kv_manager"]}, "no role 'kv_manager'.*prefix_cache"),
        (
            {"scheduler": m3_paged_attention.PARTS["scheduler"]},
            "Scheduler has no get_next_batch_to_run",
        ),
        (
            {"model_runner": m3_paged_attention.PARTS["model_runner"]},
            "cannot be called as the default part is: .* 'req_to_token_pool'",
        ),
        (
            {"input_processor": m3_paged_attention.PARTS["input_processor"]},
            "cannot be called as the default part is: .* 'num_blocks'",
        ),
    ],
    ids=str,
)
def test_a_part_that_does_not_fit_is_refused_before_anything_is_loaded(parts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLMEngine("/nowhere", parts=parts)


@pytest.mark.parametrize("named", ["hash", "chunk"])
def test_two_prefix_caches_at_once_are_refused_before_anything_is_loaded(named: Any) -> None:
    with pytest.raises(ConfigError, match=f"the parts name a prefix cache, and prefix_cache='{named}' another one"):
        LLMEngine("/nowhere", parts={"prefix_cache": ForgetsSalts}, cache_config=CacheConfig(prefix_cache=named))


# --- the cache --------------------------------------------------------------------------------------------------------


class ForgetsSalts(RadixCache):
    """Everybody shares with everybody."""

    def match_prefix(self, key: Any, max_len: int | None = None) -> Any:
        key.extra_key = None
        return super().match_prefix(key, max_len)

    def insert(self, key: Any, value: Any, priority: int = 0) -> int:
        key.extra_key = None
        return super().insert(key, value, priority)


def test_a_prefix_cache_of_ones_own_is_the_one_that_remembers(make_engine: MakeEngine) -> None:
    def cached(parts: dict[str, Any]) -> int:
        engine = make_engine(parts, **setting(2))
        engine.generate(ids(9), greedy(1), cache_salt="a")
        return engine.generate(ids(9), greedy(1), cache_salt="b").metrics.cached_tokens

    assert (cached({"prefix_cache": ForgetsSalts}), cached({})) == (8, 0), "other engines are not affected"
    engine = make_engine({"prefix_cache": functools.partial(ForgetsSalts)}, **setting(2))
    assert type(cache_of(engine)) is ForgetsSalts, "a function that builds the part fits as well"


def test_a_cache_of_ones_own_may_keep_nothing(make_engine: MakeEngine) -> None:
    class Nothing(ChunkCache): ...

    engine = make_engine({"prefix_cache": Nothing}, **setting(2))
    assert (
        tokens_of(engine) == tokens_of(make_engine(**setting(2))) == tokens_of(make_engine(**setting(2, cache="hash")))
    )
    assert engine.stats().evictable_size == 0


def test_a_cache_may_have_its_own_eviction_strategy(make_engine: MakeEngine) -> None:
    class MostRecentFirst(RadixCache):
        strategies = {**STRATEGIES, "lru": lambda node: -node.last_access_time}  # noqa: RUF012

    def left(parts: dict[str, Any]) -> list[int]:
        engine = make_engine(parts, **setting(2, tokens=40))
        for first in (10, 40, 70, 100):  # 12 tokens each, and room for three
            engine.generate(ids(13, first), greedy(1))
        return [cached_len(engine, ids(13, first)) for first in (10, 40, 70, 100)]

    assert left({"prefix_cache": MostRecentFirst}) == [12, 12, 0, 12]
    assert left({}) == [0, 12, 12, 12]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_an_allocator_of_ones_own_hands_out_the_slots(make_engine: MakeEngine) -> None:
    asked: list[tuple[int, int]] = []

    class Noting(TokenToKVPoolAllocator):
        def alloc_extend(self, prefix_lens: Any, seq_lens: Any, last_locs: Any) -> Any:
            asked.extend(zip(prefix_lens.tolist(), seq_lens.tolist(), strict=True))
            return super().alloc_extend(prefix_lens, seq_lens, last_locs)

    engine = make_engine({"token_to_kv_pool_allocator": Noting}, **setting(2))
    assert tokens_of(engine) == tokens_of(make_engine(**setting(2)))
    assert sorted(asked) == [(0, 1), (0, 2), (0, 4), (0, 5)]


def test_rows_of_ones_own_are_the_ones_that_the_model_reads(make_engine: MakeEngine) -> None:
    class LastRowFirst(ReqToTokenPool):
        def clear(self) -> None:
            super().clear()
            self._free.reverse()

    engine = make_engine({"req_to_token_pool": LastRowFirst}, **setting(3))
    assert tokens_of(engine) == tokens_of(make_engine(**setting(3)))
    rows = scheduler_of(engine).pools.req_to_token_pool
    assert type(rows) is LastRowFirst and runner_of(engine).req_to_token_pool is rows
    engine.add_request([5], greedy(2))
    engine.step()
    assert np.flatnonzero(rows.lens)[-1] == 2
    run(engine)


def test_a_function_that_makes_the_allocator_is_told_what_the_engine_was_told(make_engine: MakeEngine) -> None:
    made: list[dict[str, Any]] = []

    def make(**arguments: Any) -> Any:
        made.append(arguments)
        return TokenToKVPoolAllocator(**arguments)

    for page_size, debug in ((1, False), (8, True)):
        make_engine({"token_to_kv_pool_allocator": make}, **setting(2, tokens=64, page_size=page_size, debug=debug))
    assert made == [
        {"size": 64, "page_size": 1, "checked": False},
        {"size": 64, "page_size": 8, "checked": True},
    ]


# --- decisions --------------------------------------------------------------------------------------------------------


def admitted(engine: LLMEngine) -> list[str]:
    """In which order requests that arrive together get in."""
    recorder = Recorder(engine.tracer)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(2), request_id=str(number))
    run(engine)
    return [admit.rid for admit in recorder.events("admit")]


class NewestFirst(SchedulePolicy):
    """Last come, first served."""

    def calc_priority(self, waiting: Sequence[Req]) -> Order:
        return Order(sorted(waiting, key=lambda req: -req.number), [])


class OneAtATime(PrefillAdder):
    """A prompt of one request in each step."""

    def add_one_req(self, req: Req) -> AddReqResult:
        result = super().add_one_req(req)
        return AddReqResult.OTHER if result is AddReqResult.CONTINUE else result


def test_a_policy_of_ones_own_decides_the_order(make_engine: MakeEngine) -> None:
    assert admitted(make_engine({"schedule_policy": NewestFirst}, **setting(2))) == ["3", "2", "1", "0"]
    assert admitted(make_engine(**setting(2))) == ["0", "1", "2", "3"]
    assert PARTS["schedule_policy"] is SchedulePolicy


def test_an_adder_of_ones_own_decides_how_many_get_in(make_engine: MakeEngine) -> None:
    def extends(parts: dict[str, Any]) -> list[int]:
        engine = make_engine(parts, **setting(4))
        recorder = Recorder(engine.tracer)
        tokens_of(engine)
        return [len(batch.rids) for batch in recorder.events("batch") if batch.mode == "extend"]

    assert extends({"prefill_adder": OneAtATime}) == [1, 1, 1, 1] and extends({}) == [4]


def test_a_preemption_policy_of_ones_own_chooses_the_victims(make_engine: MakeEngine) -> None:
    def victims(parts: dict[str, Any]) -> tuple[list[str], list[tuple[int, ...]]]:
        engine = make_engine(parts, **setting(4, tokens=40, conservativeness=0.0))
        recorder = Recorder(engine.tracer)
        for number, prompt in enumerate(PROMPTS):  # one by one: who runs already is charged less
            engine.add_request(prompt, greedy(14), request_id=str(number))
            engine.step()
        outputs = run(engine)
        return [event.rid for event in recorder.events("retract")], [outputs[rid].token_ids for rid in sorted(outputs)]

    usual, tokens = victims({})
    mine, same_tokens = victims({"preemption": InTurn})
    assert tokens == same_tokens
    assert usual != mine and min(len(usual), len(mine)) > 0


def test_a_scheduler_of_ones_own_decides_what_runs(make_engine: MakeEngine) -> None:
    class DecodesFirst(Scheduler):
        """Lets nobody in while anybody runs."""

        def get_next_batch_to_run(self) -> Any:
            self.batch_is_full = bool(self.running)
            return super().get_next_batch_to_run()

    engine = make_engine({"scheduler": DecodesFirst}, **setting(2))
    recorder = Recorder(engine.tracer)
    assert tokens_of(engine) == tokens_of(make_engine(**setting(2)))
    modes = [batch.mode for batch in recorder.events("batch")]
    assert modes == (["extend"] + ["decode"] * 5) * 2


# --- below and around -------------------------------------------------------------------------------------------------


def test_executor_worker_and_runner_of_ones_own_pass_the_batch_down(make_engine: MakeEngine) -> None:
    passed: list[str] = []

    class Noting:
        def execute_model(self, batch: ModelWorkerBatch) -> ModelRunnerOutput:
            passed.append(type(self).__mro__[2].__name__)
            return super().execute_model(batch)  # type: ignore[misc]

    class MyExecutor(Noting, GPUExecutor): ...

    class MyWorker(Noting, GPUWorker): ...

    class MyRunner(Noting, ModelRunner): ...

    engine = make_engine({"executor": MyExecutor, "worker": MyWorker, "model_runner": MyRunner}, **setting(2))
    executor = engine.engine_core.executor
    assert (type(executor), type(executor.worker), type(runner_of(engine))) == (MyExecutor, MyWorker, MyRunner)
    engine.generate(PROMPTS[0], greedy(3))
    assert passed == ["GPUExecutor", "GPUWorker", "ModelRunner"] * 3


def test_a_request_class_of_ones_own_may_look_up_less(make_engine: MakeEngine) -> None:
    class TakesNothing(Req):
        @property
        def match_limit(self) -> int:
            return 0

    engine = make_engine({"request": TakesNothing}, **setting(2))
    for _ in range(2):
        assert engine.generate(ids(9), greedy(2)).metrics.cached_tokens == 0
    check_drained(engine)


def test_an_input_processor_of_ones_own_refuses_what_it_likes(make_engine: MakeEngine) -> None:
    class ShortPrompts(InputProcessor):
        def check_limits(self, token_ids: list[int], params: Any, request_id: str) -> None:
            super().check_limits(token_ids, params, request_id)
            if len(token_ids) > 2:
                raise PromptTooLongError(f"{request_id!r} is too long for me")

    outputs = make_engine({"input_processor": ShortPrompts}).generate_batch(PROMPTS, greedy(2))
    assert [output.finish_reason for output in outputs.values()] == ["error", "length", "length", "error"]


def test_an_engine_core_of_ones_own_may_count_more(make_engine: MakeEngine) -> None:
    class Counting(EngineCore):
        added = 0

        def add_request(self, request: Any) -> None:
            self.added += 1
            super().add_request(request)

    engine = make_engine({"engine_core": Counting})
    engine.generate_batch(PROMPTS, greedy(1, n=2))
    assert engine.engine_core.added == 4, "parents, not children"
