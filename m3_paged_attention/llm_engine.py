"""m3's engine: m1's face over m3's parts."""

from m1_single_request.llm_engine import LLMEngine as SingleRequestEngine
from m3_paged_attention.config import EngineConfig
from m3_paged_attention.wiring import PARTS


class LLMEngine(SingleRequestEngine):
    """Runs many requests on KV blocks. `cache_config=CacheConfig(...)` says how many blocks, and of which size."""

    parts = PARTS
    config_type = EngineConfig
