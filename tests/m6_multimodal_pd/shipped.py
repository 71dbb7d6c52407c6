"""Engines with the models that ship, for tests that build one for a few words: each model is loaded once."""

from functools import cache
from typing import Any

from m1_single_request import DEFAULT_MODEL as TEXT_MODEL
from m6_multimodal_pd import CacheConfig, LLMEngine, ModelConfig, RequestOutput, SamplingParams
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.wiring import PARTS

MOST_TOKENS = 24
MANY_STEPS = 300

# --- with pictures ----------------------------------------------------------------------------------------------------


@cache
def seeing_engine() -> LLMEngine:
    """An engine that sees, loaded once."""
    return LLMEngine(cache_config=CacheConfig(max_total_tokens=1024))


def say(picture: Any, question: str, *, forget: bool = True) -> str:
    """The answer to a question about a picture. `forget`: with empty caches."""
    engine = seeing_engine()
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    try:
        if forget:
            engine.flush_cache()
        return engine.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=MOST_TOKENS)).text
    except BaseException:
        seeing_engine.cache_clear()  # a part may have stopped it in a step
        raise


# --- groups -----------------------------------------------------------------------------------------------------------

PROMPTS = ("Once upon a time there was a small engine that", "One two three four five six seven")
MANY_TOKENS = 6
load_once = cache(PARTS["model_loader"])


def text_engine(**configs: Any) -> LLMEngine:
    """An engine for texts, or a group of some, with pages of 4 tokens."""
    return LLMEngine(
        model_config=ModelConfig(model=TEXT_MODEL, device="cpu"),
        cache_config=CacheConfig(max_total_tokens=256, page_size=4),
        parts={"model_loader": load_once},
        **configs,
    )


def text_group(**engines: Any) -> LLMEngine:
    """A group in this process: `prefill=1, decode=2`."""
    return text_engine(disaggregation_config=DisaggregationConfig(transport="in_process", **engines))


@cache
def answers() -> tuple[tuple[int, ...], ...]:
    """What one engine says to the prompts."""
    with text_engine() as engine:
        outputs = engine.generate_batch(PROMPTS, SamplingParams(max_tokens=MANY_TOKENS))
        return tuple(output.token_ids for output in outputs.values())


def stepped(engine: LLMEngine, *, times: int = MANY_STEPS) -> dict[str, RequestOutput]:
    """The last outputs of the requests of an engine, after so many steps at most."""
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests() and times:
        last |= engine.step()
        times -= 1
    return last
