"""m5's engine: m1's face over m5's parts."""

from m1_single_request.llm_engine import LLMEngine as SingleRequestEngine
from m5_chunked_prefill_spec.config import EngineConfig
from m5_chunked_prefill_spec.interfaces import ROLES
from m5_chunked_prefill_spec.wiring import PARTS


class LLMEngine(SingleRequestEngine):
    """Many tokens in one step: prompts in pieces beside decodes, and guesses that are verified together. A request may
    come with `priority=`, `cache_salt=` and `speculate=`."""

    parts = PARTS
    roles = ROLES
    config_type = EngineConfig
    request_options = ("priority", "cache_salt", "speculate")
