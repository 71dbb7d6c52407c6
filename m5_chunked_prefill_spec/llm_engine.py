"""m5's engine: the public interface over m5's parts."""

from m4_radix_cache.llm_engine import LLMEngine as RadixEngine
from m5_chunked_prefill_spec.config import EngineConfig
from m5_chunked_prefill_spec.wiring import PARTS


class LLMEngine(RadixEngine):
    """Engine whose steps hold pieces of prompts beside decodes, and drafts that are verified together.

    A request may have `priority=`, `cache_salt=` and `speculate=`.
    """

    parts = PARTS
    config_type = EngineConfig
    request_options = ("priority", "cache_salt", "speculate")
