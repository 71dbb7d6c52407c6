"""Milestone 2: requests join and leave a running batch at every step.

m1 answered one request after another, and a decode step read all weights for a single token. Here the scheduler chooses
the running requests at every step (iteration-level scheduling), and all decodes of a step share one forward pass. New
since m1: the scheduler and its messages, an executor over a runner that takes batches, and KV memory in slots. The
order of the stages, the sampler, the stop conditions and the public interface are m1's.

    from m2_continuous_batching import LLMEngine, SamplingParams, SchedulerConfig

Read `scheduler.py`, then `scheduler_output.py`, `input_batch.py`, `padded.py`, `slot_cache.py`; `wiring.py` shows what
m2 replaces.
"""

from m1_single_request import face
from m1_single_request.config import DEFAULT_MODEL, ModelConfig
from m1_single_request.face import *
from m2_continuous_batching.config import EngineConfig, SchedulerConfig
from m2_continuous_batching.llm_engine import LLMEngine
from m2_continuous_batching.outputs import EngineStats
from m2_continuous_batching.wiring import PARTS, build_engine_core

__all__ = [
    *face.__all__,
    "DEFAULT_MODEL",
    "PARTS",
    "EngineConfig",
    "EngineStats",
    "LLMEngine",
    "ModelConfig",
    "SchedulerConfig",
    "build_engine_core",
]
