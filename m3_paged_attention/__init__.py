"""m3: KV memory in blocks, a forward pass of our own, and kernels of our own.

Since m2: the keys and values of a request are stored in blocks of a few tokens, anywhere in memory; its block table
lists them (Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023).
So no memory is reserved for tokens that may never come. A prompt is stored once for all its continuations (`n > 1`),
and a shared block is copied before a write. A request can be preempted and resumed. Attention must follow the tables,
which transformers' model cannot, so from here on the model is ours: Qwen3 (also with experts), Qwen2 and Llama over one
flat row of tokens, with kernels in torch, C++ or Triton.

    from m3_paged_attention import LLMEngine, SamplingParams, CacheConfig

Read `kv_cache_manager.py`, then `scheduler.py`, `model_input.py`, `models/decoder.py`, `attention/`; `wiring.py` shows
what m3 replaces.
"""

from m1_single_request import face
from m1_single_request.config import DEFAULT_MODEL
from m1_single_request.face import *
from m3_paged_attention.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    TraceConfig as TraceConfig,
)
from m3_paged_attention.errors import KVCapacityError
from m3_paged_attention.llm_engine import LLMEngine
from m3_paged_attention.outputs import EngineStats
from m3_paged_attention.wiring import PARTS, build_engine_core

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
    "SchedulerConfig",
    "build_engine_core",
]
