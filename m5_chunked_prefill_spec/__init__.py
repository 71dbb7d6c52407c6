"""m5: many tokens in one step, on purpose.

Since m4: a step has a budget of tokens, and two ideas fill it. A prompt is cut into pieces that run beside decodes, so
that no running request waits for the long prompt of another one (Agrawal et al., "Sarathi-Serve", OSDI 2024). And the
next tokens of a request are drafted, from its own text or by a small model, and verified together: the model reads its
weights once for all of them (Leviathan et al., 2023). Both need nothing new of the kernels: for them, a step is a few
new tokens per request over paged KV. Greedy outputs stay the same token for token, and so do drawn ones; drafts that
are drawn themselves keep the distribution. Cache, policies, model and kernels are m4's and m3's.

    from m5_chunked_prefill_spec import LLMEngine, SamplingParams, SchedulerConfig, SpeculativeConfig

Read `batch_composer.py`, then `scheduler.py`, `prefill_adder.py`, `schedule_batch.py`; then `speculative/`:
`proposer.py`, `rejection_sampler.py`, `speculation.py`, `draft_runner.py`. `wiring.py` lists the parts that m5
replaces.
"""

from m1_single_request import face
from m1_single_request.config import DEFAULT_MODEL
from m1_single_request.face import *
from m3_paged_attention.config import ModelConfig, TraceConfig as TraceConfig
from m3_paged_attention.errors import KVCapacityError
from m4_radix_cache.config import CacheConfig
from m4_radix_cache.errors import DiskError, PoolError
from m5_chunked_prefill_spec.config import EngineConfig, SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.cost_table import CostTable
from m5_chunked_prefill_spec.llm_engine import LLMEngine
from m5_chunked_prefill_spec.outputs import EngineStats
from m5_chunked_prefill_spec.wiring import PARTS, build_engine_core

__all__ = [
    *face.__all__,
    "DEFAULT_MODEL",
    "DiskError",
    "PARTS",
    "CacheConfig",
    "CostTable",
    "EngineConfig",
    "EngineStats",
    "KVCapacityError",
    "LLMEngine",
    "ModelConfig",
    "PoolError",
    "SchedulerConfig",
    "SpeculativeConfig",
    "build_engine_core",
]
