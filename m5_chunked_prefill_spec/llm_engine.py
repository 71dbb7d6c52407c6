"""m5's engine: the face over m5's parts."""

from m4_radix_cache.llm_engine import LLMEngine as RadixEngine
from m5_chunked_prefill_spec.config import EngineConfig
from m5_chunked_prefill_spec.wiring import PARTS


class LLMEngine(RadixEngine):
    """Many tokens in one step: prompts in pieces beside decodes, and guesses that are verified together. A request may
    come with `priority=`, `cache_salt=` and `speculate=`."""

    parts = PARTS
    config_type = EngineConfig
    request_options = ("priority", "cache_salt", "speculate")
