"""The length of a group's requests: the shortest that an engine has room for, and the same on all of them."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from m6_multimodal_pd import (
    CacheConfig,
    ConfigError,
    DisaggregationConfig,
    EngineLostError,
    InvalidRequestError,
    LLMEngine,
    ModelConfig,
    SamplingParams,
    TraceConfig,
)
from tests.engine_contract.test_real_models import GIB, NARROW, text_model
from tests.m6_multimodal_pd.pd_engines import Listener, add, engine_of
from tests.m6_multimodal_pd.processes import by_hand, free_address

KV_BYTES = 4096
"""Of a token of the model that ships, and of one narrow layer of Qwen3."""


def memory(num_tokens: int) -> CacheConfig:
    """As a budget in bytes, page 0 included."""
    return CacheConfig(kv_cache_memory_bytes=KV_BYTES * (num_tokens + 16))


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`machines(8, 4)`: the first engine that asks has 8 GiB, the second 4."""

    def have(*gib: int) -> None:
        sizes = iter(gib)
        monkeypatch.setattr("m3_paged_attention.kv_cache_config.available_memory", lambda device: 64 * GIB)
        monkeypatch.setattr("m3_paged_attention.kv_cache_config.physical_memory", lambda: next(sizes) * GIB)

    return have


@pytest.mark.sample(1)
@pytest.mark.parametrize("gib", [(8, 4), (4, 8)], ids=["prefill has more", "decode has more"])
def test_the_shortest_length_of_an_engine_is_that_of_all(gib: tuple[int, int], tmp_path: Path, machines: Any) -> None:
    machines(*gib)
    listener = Listener()
    with LLMEngine(
        model_config=ModelConfig(
            model=text_model(tmp_path, **NARROW), device="cpu", dtype="bfloat16", load_format="dummy"
        ),
        disaggregation_config=DisaggregationConfig(transport="in_process"),
        trace_config=TraceConfig(readers=(listener,)),
    ) as engine:
        assert engine.stats().max_model_len == 7008, "512 MiB, and half of the next 512: of a quarter of 4 GiB"
        assert [event.max_model_len for event in listener.events("engine_joined")] == [7008, 7008]
        told = [dict(event.facts)["max_model_len"] for event in listener.told("engine_started")]
        assert told == [7008, 7008], "before any of them joined, and so of all its parts"
        with pytest.raises(InvalidRequestError, match="max_model_len is 7008"):
            engine.add_request([5] * 7008)
        assert len(engine.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


def test_an_answer_of_a_group_ends_at_the_fitted_length() -> None:
    group = DisaggregationConfig(transport="in_process")
    with LLMEngine(cache_config=memory(1024), disaggregation_config=group) as engine:
        assert engine.stats().max_model_len == 1024
        output = engine.generate([5, 6, 7] * 340, SamplingParams(max_tokens=99, ignore_eos=True))
        assert (len(output.token_ids), output.finish_reason) == (4, "length")


def test_a_group_whose_length_is_named_has_that_or_the_error_of_an_engine_that_has_no_room() -> None:
    group, model = DisaggregationConfig(transport="in_process"), ModelConfig(max_model_len=1500)
    with LLMEngine(model_config=model, cache_config=memory(2048), disaggregation_config=group) as engine:
        assert engine.stats().max_model_len == 1500
    with pytest.raises(ConfigError, match=r"max_model_len=1500 needs 94 blocks"):
        LLMEngine(model_config=model, cache_config=memory(1024), disaggregation_config=group)


def test_an_engine_that_comes_later_takes_the_length_or_is_refused_with_the_reason() -> None:
    listener = Listener()
    with LLMEngine(
        cache_config=memory(2048),
        disaggregation_config=DisaggregationConfig(transport="in_process"),
        trace_config=TraceConfig(readers=(listener,)),
    ) as engine:
        router = engine.engine_core.router
        config, shared = engine.config, router.links.engines["decode-0"].side.transport.segments
        for number, (tokens, named) in enumerate([(3072, None), (1024, None), (3072, 3000)], start=1):
            own = replace(
                config, cache=memory(tokens), model=replace(config.model, max_model_len=named), trace=TraceConfig()
            )
            add(router.links, f"decode-{number}", partial(engine_of, "decode", own, shared))
            router.receive(0)
        refused = {event.name: event.why for event in listener.events("engine_refused")}
        assert set(router.members) == {"prefill-0", "decode-0", "decode-1"} and set(refused) == {"decode-2", "decode-3"}
        assert refused["decode-2"] == "it has room for requests of 1,024 tokens, and max_model_len is 2,048 here"
        assert refused["decode-3"] == "its max_model_len is 3,000, as named, and 2,048 here"
        assert engine.generate("What is a KV cache?", SamplingParams(max_tokens=4)).finish_reason == "length"


@pytest.mark.exhaustive
def test_where_the_length_is_never_agreed_on_the_engines_end_with_their_router(keys: Path) -> None:
    address = free_address()
    group = DisaggregationConfig(address=address, key_file=keys, start_timeout_s=20)
    with by_hand("prefill", address, keys) as waiting:
        with pytest.raises(EngineLostError, match="1 for decode did not join within start_timeout_s=20"):
            LLMEngine(disaggregation_config=group)
        assert waiting.wait(60) is not None
