"""Parts of one's own in m4's roles: what fits is used by this engine alone, what does not fit is a readable error."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest

import m3_paged_attention
from m4_radix_cache import PARTS, CacheConfig, ConfigError, LLMEngine
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.eviction import STRATEGIES
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_policy import Order, SchedulePolicy
from tests.m4_radix_cache.caches import ForgetsSalts
from tests.m4_radix_cache.engines import MakeEngine, cache_of, cached_len, greedy, ids, setting
from tests.support.traces import order_of_admission

PROMPTS = [[5, 6, 7, 8, 9], [8], [9, 10], [11, 12, 13, 14]]


# --- what does not fit ------------------------------------------------------------------------------------------------


def without(part: Any, verb: str) -> Any:
    """The same part, called `Without`, and less one method."""
    return type("Without", (part,), {verb: None})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"prefix_cache": without(RadixCache, "inc_lock_ref")}, r"'prefix_cache': Without has no inc_lock_ref\(\)"),
        ({"req_to_token_pool": without(ReqToTokenPool, "page_tables")}, r"Without has no page_tables\(\)"),
        (
            {"token_to_kv_pool_allocator": without(TokenToKVPoolAllocator, "alloc_decode")},
            r"Without has no alloc_decode\(\)",
        ),
        ({"kv_manager": m3_paged_attention.PARTS["kv_manager"]}, "no role 'kv_manager'.*prefix_cache"),
        ({"scheduler": m3_paged_attention.PARTS["scheduler"]}, "Scheduler has no get_next_batch_to_run"),
        (
            {"model_runner": m3_paged_attention.PARTS["model_runner"]},
            r"ModelRunner has no use_host_memory\(\)",
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


# --- parts that fit ---------------------------------------------------------------------------------------------------


def test_a_prefix_cache_of_ones_own_is_the_one_that_remembers(make_engine: MakeEngine) -> None:
    def cached(parts: dict[str, Any]) -> int:
        engine = make_engine(parts, **setting(2))
        engine.generate(ids(9), greedy(1), cache_salt="a")
        return engine.generate(ids(9), greedy(1), cache_salt="b").metrics.cached_tokens

    assert (cached({"prefix_cache": ForgetsSalts}), cached({})) == (8, 0), "other engines are not affected"
    engine = make_engine({"prefix_cache": functools.partial(ForgetsSalts)}, **setting(2))
    assert type(cache_of(engine)) is ForgetsSalts, "a function that builds the part fits as well"


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


def test_a_function_that_makes_the_allocator_is_told_what_the_engine_was_told(make_engine: MakeEngine) -> None:
    made: list[dict[str, Any]] = []

    def make(**arguments: Any) -> Any:
        made.append(arguments)
        return TokenToKVPoolAllocator(**arguments)

    for page_size, debug in ((1, False), (8, True)):
        make_engine({"token_to_kv_pool_allocator": make}, **setting(2, tokens=64, page_size=page_size, debug=debug))
    assert made == [{"size": 64, "page_size": 1, "checked": False}, {"size": 64, "page_size": 8, "checked": True}]


# --- decisions --------------------------------------------------------------------------------------------------------


class NewestFirst(SchedulePolicy):
    """Last come, first served."""

    def calc_priority(self, waiting: Sequence[Req]) -> Order:
        return Order(sorted(waiting, key=lambda req: -req.number), [])


def test_a_policy_of_ones_own_decides_the_order(make_engine: MakeEngine) -> None:
    own, usual = make_engine({"schedule_policy": NewestFirst}, **setting(2)), make_engine(**setting(2))
    assert order_of_admission(own, PROMPTS) == [3, 2, 1, 0]
    assert order_of_admission(usual, PROMPTS) == [0, 1, 2, 3]
    assert PARTS["schedule_policy"] is SchedulePolicy
