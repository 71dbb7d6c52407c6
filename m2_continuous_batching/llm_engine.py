"""m2's engine: m1's public interface with m2's parts."""

from m1_single_request.llm_engine import LLMEngine as SingleRequestEngine
from m2_continuous_batching.config import EngineConfig
from m2_continuous_batching.wiring import PARTS


class LLMEngine(SingleRequestEngine):
    """Engine that runs many requests at a time. `scheduler_config=SchedulerConfig(...)` sets the limits of a batch."""

    parts = PARTS
    config_type = EngineConfig
