"""m3: KV memory in blocks, a forward pass of our own, and kernels of our own.

Since m2: a request's keys and values lie in blocks of a few tokens that may be anywhere, found through its block table
(Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023). So nothing
is reserved for tokens that may never come; a prompt is stored once for all continuations that start from it (`n > 1`),
and copied where they part; a request can lose its blocks and come back. Attention must follow the tables, which
transformers' model cannot, so from here on the model is ours: Qwen3, Qwen2 and Llama over one flat row of tokens, with
kernels in torch, C++ or Triton.

    from m3_paged_attention import LLMEngine, SamplingParams, CacheConfig

Read `kv_cache_manager.py`, then `scheduler.py`, `model_input.py`, `models/decoder.py`, `attention/`; `wiring.py` shows
what m3 replaces.
"""

from m1_single_request import face
from m1_single_request.config import DEFAULT_MODEL
from m1_single_request.face import *
from m3_paged_attention.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
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
