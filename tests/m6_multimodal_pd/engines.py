"""Helpers of m6's engine tests: m5's, with pictures."""

from collections.abc import Mapping
from typing import Any

from m6_multimodal_pd import MultimodalConfig, SchedulerConfig
from tests.m5_chunked_prefill_spec.engines import (
    Guessing as Guessing,
    check_drained as check_drained,
    check_flushed as check_m5_flushed,
    check_step as check_m5_step,
    runner_of as runner_of,
    scheduler_of as scheduler_of,
    setting as m5_setting,
)
from tests.support.engines import (
    MakeEngine as MakeEngine,
    OnEvent as OnEvent,
    Recorder as Recorder,
    drain as drain,
    greedy as greedy,
)


def setting(
    *args: Any, multimodal: Mapping[str, Any] | None = None, enable_overlap: bool | None = None, **limits: Any
) -> dict[str, Any]:
    """m5's keywords of an engine with these limits, and fields of `MultimodalConfig`."""
    keywords = m5_setting(*args, **limits)
    scheduler = SchedulerConfig(**vars(keywords["scheduler_config"]), enable_overlap=enable_overlap)
    more = {"scheduler_config": scheduler, "multimodal_config": MultimodalConfig(**dict(multimodal or {}))}
    return keywords | more


def check_step(engine: Any) -> None:
    """What must hold after every step that was not interrupted."""
    check_m5_step(engine)
    engine.engine_core.encoder.cache.check_invariants()


def finish(engine: Any) -> dict[str, Any]:
    """Step to the end, the engine looked at after each step and at the end; the last output of everybody."""
    last = drain(engine, check_step)
    check_drained(engine)
    return last


def check_flushed(engine: Any) -> None:
    """Nothing is left of anybody."""
    check_m5_flushed(engine)
    assert engine.stats().embedding_cache_bytes == 0


def counts(engine: Any) -> tuple[int, int, int]:
    """How often the tower ran, how many items it encoded, and how many hits there were."""
    stats = engine.stats()
    return stats.num_encoder_runs, stats.num_encoded_items, stats.num_encoder_hits
