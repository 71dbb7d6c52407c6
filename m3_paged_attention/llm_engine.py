"""m3's engine: m1's public interface with m3's parts."""

from m1_single_request.llm_engine import LLMEngine as SingleRequestEngine
from m3_paged_attention.config import EngineConfig
from m3_paged_attention.wiring import PARTS


class LLMEngine(SingleRequestEngine):
    """Engine that runs many requests on KV blocks. `cache_config=CacheConfig(...)` sets their number and size."""

    parts = PARTS
    config_type = EngineConfig
