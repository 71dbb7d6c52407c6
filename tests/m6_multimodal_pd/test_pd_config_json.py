"""A configuration that goes to another process as text is the same there, whatever fields it has and will have."""

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from m3_paged_attention.config import TraceConfig
from m5_chunked_prefill_spec.cost_table import CostTable
from m6_multimodal_pd import CacheConfig, ModelConfig, MultimodalConfig, SchedulerConfig, SpeculativeConfig
from m6_multimodal_pd.config import EngineConfig
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.disaggregation.runtime.config_json import from_json, to_json

CONFIG = EngineConfig(
    model=ModelConfig(
        model=Path("a") / "mödel",
        device="cpu",
        dtype="bfloat16",
        max_model_len=77,
        seed=2**63 - 1,
        load_format="dummy",
        attention_backend="torch",
        quantization="int8",
        cuda_graphs=False,
    ),
    scheduler=SchedulerConfig(
        max_num_seqs=5,
        max_num_batched_tokens=33,
        target_gap_ms=5,
        chunked_prefill_size=17,
        schedule_policy="priority",
        schedule_conservativeness=0.1,
        priority_preemption=True,
        preemption_threshold=3,
        enable_overlap=True,
        cost_table=CostTable((1, 2, 8), (0.1, 0.25, 1e-300 + 1), 0.3, 0.4),
    ),
    cache=CacheConfig(page_size=4, eviction_policy="lfu", max_total_tokens=400, kv_cache_dtype="int8", debug=True),
    speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=7, prompt_lookup_min=3),
    multimodal=MultimodalConfig(
        allowed_url_schemes=("https", "file"),
        allowed_url_hosts=("images.example.org",),
        url_timeout_s=1 / 3,
        max_items=3,
        max_file_bytes=1000,
        max_image_pixels=1001,
        max_video_frames=7,
        max_video_pixels=1002,
        min_pixels=10,
        max_pixels=2**40,
        encoder_budget=99,
        embedding_cache_bytes=12345,
        num_media_processes=2,
    ),
    disaggregation=DisaggregationConfig(
        prefill=2,
        decode=3,
        devices="cpu,cpu,cpu,cpu,cpu",
        transport="in_process",
        transfer_buffer_bytes=1,
        max_message_bytes=20_000,
        max_retries=0,
        max_restarts=7,
        start_timeout_s=1.5,
        heartbeat_timeout_s=2.5,
        step_timeout_s=3.5,
    ),
)
OTHERS = [
    EngineConfig(),
    EngineConfig(
        scheduler=SchedulerConfig(enable_chunked_prefill=False),
        cache=CacheConfig(prefix_cache="hash", kv_cache_memory_bytes=2**40),
        speculative=SpeculativeConfig(method="draft_model", model="hub/id"),
        disaggregation=DisaggregationConfig(address="tcp://127.0.0.1:5600", key_file=Path("keys")),
    ),
    EngineConfig(
        model=ModelConfig(model="."),
        scheduler=SchedulerConfig(schedule="prefill_first"),
        cache=CacheConfig(
            gpu_memory_utilization=0.5,
            host_memory_bytes=2**40,
            write_policy="write_back",
            disk_path=Path("cäche"),
            disk_bytes=2**41,
            prefetch_policy="best_effort",
        ),
        speculative=SpeculativeConfig(method="draft_model", model=Path("draft")),
        disaggregation=DisaggregationConfig(both=2),
    ),
]
"""What cannot be said together with the first."""


def nested(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """All values of a configuration, by where they stand."""
    found: dict[tuple[str, ...], Any] = {}
    for own in fields(value):
        one = found[(*path, own.name)] = getattr(value, own.name)
        if is_dataclass(one):
            found |= nested(one, (*path, own.name))
    return found


@pytest.mark.parametrize("config", [CONFIG, *OTHERS], ids=["all", "defaults", "others", "more"])
def test_a_configuration_comes_back_the_same(config: EngineConfig) -> None:
    came = from_json(EngineConfig, to_json(config))
    assert as_texts(came) == came, "no part distinguishes a path from its text"
    config = as_texts(config)
    assert came == config
    before, after = nested(config), nested(came)
    assert {path: type(value) for path, value in after.items()} == {path: type(one) for path, one in before.items()}
    assert hash(came) == hash(config), "its tuples are tuples"


def as_texts(config: Any) -> Any:
    """The configuration with texts instead of paths."""
    changed = {}
    for own in fields(config):
        value = getattr(config, own.name)
        if is_dataclass(value):
            changed[own.name] = as_texts(value)
        elif isinstance(value, Path):
            changed[own.name] = str(value)
    return replace(config, **changed)


def test_every_field_is_tried_with_another_value_than_its_default() -> None:
    """A field that is new anywhere needs one above."""
    defaults = nested(EngineConfig(disaggregation=DisaggregationConfig()))
    tried = [nested(config) for config in (CONFIG, *OTHERS)]
    for path, value in defaults.items():
        assert path[0] == "trace" or any(own.get(path, value) != value for own in tried), path


def test_readers_of_the_trace_stay_behind() -> None:
    class Reader:
        def __call__(self, record: Any) -> None: ...

        def close(self) -> None: ...

    told = replace(CONFIG, trace=TraceConfig(console="verbose", jsonl=Path("x"), chrome="y", readers=(Reader(),)))  # type: ignore[arg-type]
    came = from_json(EngineConfig, to_json(told))
    assert came == as_texts(CONFIG) and came.trace == TraceConfig()


def changed(*path: str, to: Any) -> str:
    said = json.loads(to_json(CONFIG))
    inner = said
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = to
    return json.dumps(said)


@pytest.mark.parametrize("inside", [(), *((own.name,) for own in fields(EngineConfig)), ("scheduler", "cost_table")])
def test_a_field_that_is_not_known_is_refused(inside: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="no fields of"):
        from_json(EngineConfig, changed(*inside, "and_more", to=1))


SECTIONS = [own.name for own in fields(EngineConfig)]
PLACES = sorted(path for path in nested(CONFIG) if path[0] != "trace")
OF_ANOTHER_KIND: list[tuple[tuple[str, ...], Any]] = [
    *(((name,), value) for name in SECTIONS for value in (5, "x", [], [1, 2], True)),
    *(((name,), None) for name in SECTIONS if name != "disaggregation"),
    *((path, value) for path in PLACES for value in ({"x": 1}, [{}])),
]


@pytest.mark.parametrize(("path", "value"), OF_ANOTHER_KIND, ids=str)
def test_a_value_of_another_kind_is_refused(path: tuple[str, ...], value: Any) -> None:
    with pytest.raises(ValueError):
        from_json(EngineConfig, changed(*path, to=value))


def test_what_may_be_missing_may_be_none() -> None:
    assert from_json(EngineConfig, changed("disaggregation", to=None)).disaggregation is None
    assert from_json(EngineConfig, changed("scheduler", "cost_table", to=None)).scheduler.cost_table is None


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '"x"', "5", to_json(EngineConfig())[:-1]])
def test_what_is_no_such_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        from_json(EngineConfig, text)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_text_without_one_of_the_fields_is_refused(name: str) -> None:
    """It is of another version, and a default would not be what was asked for."""
    said = json.loads(to_json(CONFIG))
    del said[name]
    with pytest.raises(ValueError):
        from_json(EngineConfig, json.dumps(said))
