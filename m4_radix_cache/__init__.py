"""m4: a request starts from the KV that other requests computed.

Since m3: KV outlives its request. Computed KV is kept in a tree of tokens (Zheng et al., "SGLang: Efficient Execution
of Structured Language Model Programs", NeurIPS 2024). A later request that begins with the same tokens computes only
the rest: a system prompt once for all its users, a conversation's next turn without the turns before it. Cached pages
stay until their memory is needed; those in use are locked. Memory limits the number of running requests, so the
scheduler is new: it keeps one batch from step to step, and has policies, a memory budget and retraction. Model,
kernels, KV tensors and sampler are m3's.

    from m4_radix_cache import LLMEngine, SamplingParams, CacheConfig

Read `mem_cache/radix_cache.py`, then `request.py`, `schedule_policy.py`, `prefill_adder.py`, `schedule_batch.py`,
`scheduler.py`; `wiring.py` shows what m4 replaces.
"""

from m1_single_request import face
from m1_single_request.config import DEFAULT_MODEL
from m1_single_request.face import *
from m3_paged_attention.config import ModelConfig, TraceConfig as TraceConfig
from m3_paged_attention.errors import KVCapacityError
from m4_radix_cache.config import CacheConfig, EngineConfig, SchedulerConfig
from m4_radix_cache.errors import DiskError, PoolError
from m4_radix_cache.llm_engine import LLMEngine
from m4_radix_cache.outputs import EngineStats
from m4_radix_cache.wiring import PARTS, build_engine_core

__all__ = [
    *face.__all__,
    "DEFAULT_MODEL",
    "DiskError",
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
