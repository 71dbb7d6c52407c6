"""m4: a request starts from what others already computed.

Since m3: KV outlives its request. What one has computed lies in a tree of tokens (Zheng et al., "SGLang: Efficient
Execution of Structured Language Model Programs", NeurIPS 2024), and the next one that begins with the same tokens
computes only the rest: a system prompt once for all its users, a conversation's next turn without the turns before it.
Cached pages stay until the room is needed; those in use are locked. Memory decides who may run, so the scheduler is
written anew around a batch that lives, with policies, a budget and retraction. Model, kernels, KV tensors and sampler
are m3's.

    from m4_radix_cache import LLMEngine, SamplingParams, CacheConfig

Read `mem_cache/radix_cache.py`, then `request.py`, `schedule_policy.py`, `prefill_adder.py`, `schedule_batch.py`,
`scheduler.py`; `wiring.py` shows what m4 replaces.
"""

from m1_single_request import face
from m1_single_request.config import DEFAULT_MODEL
from m1_single_request.face import *
from m3_paged_attention.config import ModelConfig
from m3_paged_attention.errors import KVCapacityError
from m4_radix_cache.config import CacheConfig, EngineConfig, SchedulerConfig
from m4_radix_cache.errors import PoolError
from m4_radix_cache.llm_engine import LLMEngine
from m4_radix_cache.outputs import EngineStats
from m4_radix_cache.wiring import PARTS, build_engine_core

__all__ = [
    *face.__all__,
    "DEFAULT_MODEL",
    "PARTS",
    "CacheConfig",
    "EngineConfig",
    "EngineStats",
    "KVCapacityError",
    "LLMEngine",
    "ModelConfig",
    "PoolError",
    "SchedulerConfig",
    "build_engine_core",
]
