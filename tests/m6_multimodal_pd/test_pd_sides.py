"""What no message holds fails its request, and neither the engine that would say it nor anybody else's request."""

from collections.abc import Iterator
from typing import Any

import pytest

from m6_multimodal_pd import CacheConfig, DisaggregationConfig, LLMEngine, SamplingParams, WireError
from m6_multimodal_pd.disaggregation.runtime.messages import FirstToken, Relay, Tokens
from tests.m6_multimodal_pd.pd_engines import Listener

QUESTION = [{"role": "user", "content": "What is a KV cache?"}]
OTHER = [{"role": "user", "content": "What is prefill?"}]
PARAMS = SamplingParams(max_tokens=6)
TOO_LARGE = {"prefill-0": FirstToken, "decode-0": Tokens}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_message_that_is_too_large_fails_its_request_alone(name: str) -> None:
    config = DisaggregationConfig(transport="in_process", max_retries=0)
    with LLMEngine(cache_config=CacheConfig(page_size=4, max_total_tokens=512), disaggregation_config=config) as engine:
        expected = engine.chat(QUESTION, PARAMS).token_ids
        side: Any = engine.engine_core.router.links.engines[name].side  # type: ignore[attr-defined]
        usual, told = side.send, []

        def send(message: Any) -> None:
            body = message.body if isinstance(message, Relay) else message
            if isinstance(body, TOO_LARGE[name]) and not told:
                told.append(body)
                raise WireError("a message of 9 bytes; 8 are the limit")
            usual(message)

        side.send = send
        outputs = engine.generate_batch([engine.chat_prompt(OTHER), engine.chat_prompt(QUESTION)], PARAMS)
        failed, other = sorted(outputs.values(), key=lambda output: output.error is None)
        assert isinstance(failed.error, WireError) and "8 are the limit" in str(failed.error)
        assert failed.finish_reason == "error" and other.finish_reason == "length"
        assert engine.chat(QUESTION, PARAMS).token_ids == expected
        assert engine.flush_cache()


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_no_message_holds_is_not_tried_anew(name: str) -> None:
    """It would be as large the second time; whoever hears of it first."""
    config = DisaggregationConfig(transport="in_process")
    with LLMEngine(cache_config=CacheConfig(page_size=4, max_total_tokens=512), disaggregation_config=config) as engine:
        links: Any = engine.engine_core.router.links  # type: ignore[attr-defined]
        engine.tracer.attach(listener := Listener())
        usual, own = links.receive, links.engines[name].side
        send = own.send

        def too_large(message: Any) -> None:
            body = message.body if isinstance(message, Relay) else message
            if isinstance(body, TOO_LARGE[name]):
                raise WireError("a message of 9 bytes; 8 are the limit")
            send(message)

        def others_first(timeout_s: float) -> Iterator[Any]:
            """As if this engine's words came last."""
            return iter(sorted(usual(timeout_s), key=lambda heard: heard[0] == name))

        own.send, links.receive = too_large, others_first
        output = engine.chat(QUESTION, PARAMS)
        assert isinstance(output.error, WireError) and "8 are the limit" in str(output.error)
        assert len(listener.own("request_routed")) == 1
        own.send = send
        assert engine.chat(OTHER, PARAMS).error is None
        assert engine.flush_cache()
