"""The model that ships, in one engine for all tests that show it pictures: its answers are words with a meaning."""

from functools import cache
from typing import Any

from m6_multimodal_pd import CacheConfig, LLMEngine, SamplingParams

MOST_TOKENS = 24


@cache
def shipped_engine() -> LLMEngine:
    """The engine, loaded once. It keeps nothing from one `say` to the next."""
    return LLMEngine(cache_config=CacheConfig(max_total_tokens=1024))


def say(picture: Any, question: str, *, forget: bool = True) -> str:
    """The answer to a question about a picture. `forget`: with empty caches."""
    engine = shipped_engine()
    if forget:
        engine.flush_cache()
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return engine.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=MOST_TOKENS)).text
