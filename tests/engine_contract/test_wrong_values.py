"""What the configurations of each milestone refuse: every wrong value with its name, and what would be right."""

from typing import Any

import pytest

import m1_single_request as m1
import m2_continuous_batching as m2
import m3_paged_attention as m3
import m4_radix_cache as m4
import m5_chunked_prefill_spec as m5
from m1_single_request.errors import ConfigError
from tests.m5_chunked_prefill_spec.engines import COSTS
from tests.support.wrong_values import INFINITE, NAN, Wrong, check_refused, each_of

WRONG: Wrong = {
    m1.ModelConfig: {
        "device": ("gpu", "cuda:99", "cpu:-1", "meta", "", None, -1, 5, 1.5, True, 10**30),
        "dtype": ("float8", None),
        "max_model_len": (1, 2.0, True),
        "seed": (None, 0.5),
        "model": (["a"],),
    },
    m1.TraceConfig: {"console": ("loud",)},
    m2.SchedulerConfig: {"execution": ("paged", None, ["padded"])},
    m3.SchedulerConfig: {"preemption_mode": ("drop", None)},
    m3.CacheConfig: {
        "block_size": (0, 16.0, None),
        "num_blocks": (0, True),
        "kv_cache_memory_bytes": (0, 1e9),
        "swap_space_bytes": (-1,),
        "gpu_memory_utilization": (0, 1.5, NAN, True, "0.9"),
    },
    m3.ModelConfig: {
        "attention_backend": ("flash", None),
        "load_format": ("gguf", 1),
        "device": ("nowhere",),
        "dtype": ("int8",),
        "max_model_len": (1,),
    },
    m4.SchedulerConfig: {
        "schedule_policy": (None, ["lpm"]),
        "schedule_conservativeness": (-0.1, NAN, INFINITE, 10**400, True, "1", None),
        "priority_preemption": (1, None, "yes"),
        "preemption_threshold": (-1, 1.5, None, True),
    },
    m4.CacheConfig: {
        "page_size": (0, 16.0, None, True),
        "prefix_cache": (None, False),
        "eviction_policy": (None,),
        "max_total_tokens": (0, 1e4),
        "kv_cache_memory_bytes": (0, 1e9),
        "gpu_memory_utilization": (0, 1.01, NAN, True),
        "debug": (1, None),
    },
    m5.SchedulerConfig: {
        "schedule": (None,),
        "enable_chunked_prefill": (1, None),
        "chunked_prefill_size": (0, -1, 1.5, True),
        "target_gap_ms": (0, -5.0, NAN, INFINITE, "20", True),
        "schedule_conservativeness": (None,),
        "cost_table": ({1: 2.0},),
    },
    m5.SpeculativeConfig: {
        "method": (False,),
        "num_speculative_tokens": (0, None, 65),
        "prompt_lookup_max": (0, "4"),
        "prompt_lookup_min": (0, 1.0, 5),
        "model": (5,),
    },
}


@each_of(WRONG)
def test_a_wrong_value_is_refused_with_its_name(make: Any, name: str, value: Any) -> None:
    check_refused(make, name, value)


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (m2.SchedulerConfig, {"execution": "paged"}, "execution='paged' is not valid: use per_request or padded"),
        (m4.SchedulerConfig, {"schedule_conservativeness": -0.1}, "=-0.1 is not valid: Expected `float` >= 0.0"),
        (m4.CacheConfig, {"eviction_policy": "mru"}, "eviction_policy='mru' is unknown: use lru or lfu or fifo"),
        (m4.CacheConfig, {"max_total_tokens": 15}, "max_total_tokens=15 is less than one page of page_size=16 tokens"),
        (m5.SchedulerConfig, {"cost_table": {1: 2.0}}, "cost_table={1: 2.0} must be a CostTable"),
        (m5.SpeculativeConfig, {"method": "ngram", "prompt_lookup_min": 5}, "=5 is more than prompt_lookup_max=4"),
        (m5.SchedulerConfig, {"cost_table": COSTS}, "cost_table has no effect without target_gap_ms: give both"),
    ],
    ids=str,
)
def test_the_message_names_valid_values(make: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**values)
