"""`flush_cache(tier=...)`: one tier is emptied, and the others keep what they have."""

from pathlib import Path
from typing import Any

import pytest

from m1_single_request.errors import ConfigError
from m4_radix_cache import CacheConfig, LLMEngine
from tests.m4_radix_cache.engines import MakeEngine, Recorder, Remembered, cache_of, check_memory, greedy, ids, setting
from tests.m4_radix_cache.test_disk_engines import PARAMS, PARTS, PROMPT, over, pages, until_written


def where(engine: LLMEngine) -> tuple[int, int]:
    """Tokens that are cached on the device, and in host memory."""
    cache: Any = cache_of(engine)
    return cache.evictable_size(), cache.host_size()


@pytest.mark.parametrize("tier", [None, "device", "host", "disk"])
def test_one_tier_is_emptied(make_engine: MakeEngine, m1: Remembered, tmp_path: Path, tier: Any) -> None:
    with make_engine(PARTS, **over(tmp_path)) as engine:
        engine.generate(PROMPT, PARAMS)
        recorder = Recorder(engine.engine_core.tracer)
        assert where(engine) == (44, 44)
        assert engine.flush_cache(tier)
        until_written(engine)
        assert where(engine) == {None: (0, 0), "device": (0, 44), "host": (44, 0), "disk": (44, 44)}[tier]
        assert len(pages(tmp_path)) == (0 if tier == "disk" else 11)
        assert bool(engine.stats().disk_bytes) == (tier != "disk")
        assert bool(recorder.events("host_flushed")) == (tier == "host")
        check_memory(engine)
        before = engine.stats()
        assert engine.generate(PROMPT, PARAMS).token_ids == m1.generate(PROMPT, PARAMS).token_ids
        after = engine.stats()
        assert after.num_prompt_tokens - before.num_prompt_tokens == 2, "all others are found in another tier"
        assert after.num_disk_hit_tokens == (40 if tier is None else 0)
        assert after.num_host_hit_tokens == (40 if tier in (None, "device") else 0)
        assert engine.flush_cache("host") and engine.flush_cache("device")
        assert where(engine) == (0, 0)
        cache: Any = cache_of(engine)
        assert cache.host.available() == cache.host.num_pages


@pytest.mark.parametrize("cache", ["radix", "hash", "chunk"])
def test_every_cache_has_a_device(make_engine: MakeEngine, cache: Any) -> None:
    with make_engine(**setting(cache=cache)) as engine:
        engine.generate(ids(20), greedy(4))
        assert engine.flush_cache("device") and cache_of(engine).evictable_size() == 0


def test_write_back_keeps_on_the_host_what_the_device_gives_up(make_engine: MakeEngine) -> None:
    with make_engine(**setting(host_memory_bytes=2**20, write_policy="write_back")) as engine:
        engine.generate(ids(20), greedy(4))
        assert engine.flush_cache("device") and where(engine) == (0, 20)


@pytest.mark.parametrize(
    ("tier", "tiers"), [("host", {}), ("disk", {"host_memory_bytes": 2**20}), ("gpu", {}), (1, {})]
)
def test_a_tier_that_is_not_configured_is_an_error(make_engine: MakeEngine, tier: Any, tiers: dict[str, Any]) -> None:
    with make_engine(**setting(**tiers)) as engine:
        engine.generate(ids(20), greedy(4))
        with pytest.raises(ConfigError, match="is not configured"):
            engine.flush_cache(tier)
        assert cache_of(engine).evictable_size() == 20


def test_nothing_is_flushed_while_requests_run(make_engine: MakeEngine, tmp_path: Path) -> None:
    with make_engine(PARTS, **over(tmp_path)) as engine:
        engine.add_request(PROMPT, PARAMS)
        for tier in (None, "device", "host", "disk"):
            engine.step()
            assert not engine.flush_cache(tier)


@pytest.mark.parametrize("path", ["", 5, True, 1.5, [], b"kv", "x/" * 3000])
def test_a_path_that_is_none_is_refused_before_a_model_is_loaded(path: Any) -> None:
    with pytest.raises(ConfigError, match="disk_path="):
        CacheConfig(host_memory_bytes=2**20, disk_path=path)
