"""m2's engine: m1's face over m2's parts."""

from m1_single_request.llm_engine import LLMEngine as SingleRequestEngine
from m2_continuous_batching.config import EngineConfig
from m2_continuous_batching.wiring import PARTS


class LLMEngine(SingleRequestEngine):
    """Runs many requests at a time. `scheduler_config=SchedulerConfig(...)` says how many, and how."""

    parts = PARTS
    config_type = EngineConfig
