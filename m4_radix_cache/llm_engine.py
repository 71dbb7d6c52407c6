"""m4's engine: m1's face over m4's parts."""

from m1_single_request.llm_engine import LLMEngine as SingleRequestEngine
from m4_radix_cache.config import EngineConfig
from m4_radix_cache.interfaces import ROLES
from m4_radix_cache.wiring import PARTS


class LLMEngine(SingleRequestEngine):
    """Runs many requests, each from what others computed. A request may come with `priority=` and `cache_salt=`."""

    parts = PARTS
    roles = ROLES
    config_type = EngineConfig
    request_options = ("priority", "cache_salt")
