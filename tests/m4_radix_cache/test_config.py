"""What an m4 engine can be told: who goes first, how KV is shared, how much of it there is. Checked when it is said.

Wrong values are tested in `tests/engine_contract`.
"""

from typing import Any

import pytest

from m4_radix_cache import CacheConfig, ConfigError, SchedulerConfig
from tests.m4_radix_cache.engines import MakeEngine, setting

EVICTION_POLICIES = ("lru", "lfu", "fifo", "slru", "priority")


@pytest.mark.parametrize(
    ("prefix_cache", "reason"), [("hash", "evicts by lru only"), ("chunk", "keeps nothing that could be evicted")]
)
def test_an_eviction_policy_that_would_have_no_effect_is_refused(prefix_cache: Any, reason: str) -> None:
    for eviction in EVICTION_POLICIES[1:]:
        with pytest.raises(
            ConfigError, match=f"eviction_policy='{eviction}' has no effect .*'{prefix_cache}'.*{reason}"
        ):
            CacheConfig(prefix_cache=prefix_cache, eviction_policy=eviction)
    assert CacheConfig(prefix_cache=prefix_cache, eviction_policy="lru")


def test_too_little_memory_names_the_longest_request_that_would_fit(make_engine: MakeEngine) -> None:
    """The tiny model takes 1 KiB a token, and requests of up to 256."""
    with pytest.raises(
        ConfigError,
        match=r"256 tokens, the least .*, needs .*Use max_model_len of at most 60 or kv_cache_memory_bytes of at",
    ) as caught:
        make_engine(cache_config=CacheConfig(page_size=4, kv_cache_memory_bytes=64 * 2**10))
    enough = int(str(caught.value).rpartition(" ")[2].replace(",", ""))
    fits = make_engine(cache_config=CacheConfig(page_size=4, kv_cache_memory_bytes=enough))
    assert fits.stats().max_total_tokens == 256
    with pytest.raises(ConfigError, match="256 tokens, the least"):
        make_engine(cache_config=CacheConfig(page_size=4, kv_cache_memory_bytes=enough - 1))
    short = make_engine(max_model_len=60, cache_config=CacheConfig(page_size=4, kv_cache_memory_bytes=64 * 2**10))
    assert short.stats().max_total_tokens == 60


def test_all_memory_of_a_budget_is_used_because_the_cache_can_fill_it(make_engine: MakeEngine) -> None:
    """m3 made no more blocks than its requests could fill."""
    engine = make_engine(
        scheduler_config=SchedulerConfig(max_num_seqs=1), cache_config=CacheConfig(kv_cache_memory_bytes=2**20)
    )
    assert engine.stats().max_total_tokens == 2**20 // 1024 - 16
    assert make_engine(**setting(2, tokens=43)).stats().max_total_tokens == 40, "less what fills no page"
