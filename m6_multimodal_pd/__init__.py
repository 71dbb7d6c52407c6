"""m6: the full engine: images and video in every request, prefill and decode in separate engines, if you want that, and
steps that overlap with the work of the host, on a GPU as CUDA graphs.

Since m5: a prompt may contain images. They are cut into patches, a vision tower computes embeddings from these, and the
embeddings take the place of placeholder tokens, at positions on three axes (M-RoPE), with more features added in the
first layers (DeepStack): Qwen3-VL (Bai et al. 2025). To the scheduler an image is a range of tokens, which may be cut
like any other; in the prefix cache's key it is a number for its content; its embeddings are kept for later requests
with the same image. Everything of m1 to m5 works on prompts with and without images, in one batch.

    from m6_multimodal_pd import LLMEngine, MultimodalConfig, SamplingParams

    engine = LLMEngine()
    engine.chat([{"role": "user", "content": [{"type": "image", "image": "photo.png"},
                                              {"type": "text", "text": "Describe the picture."}]}])

Read the way of an image, which `multimodal/__init__.py` lists file by file; then `request.py`, `model_worker_batch.py`,
`forward_batch.py`, `model_runner.py` and `models/qwen3_vl.py`. `wiring.py` shows what m6 replaces. With a
`DisaggregationConfig` some engines compute prompts and others decode, each in a process of its own: read
`disaggregation/`: `poll.py`, `prefill_side.py`, `decode_side.py`, `router.py`, `staging.py`. On CUDA the steps of few
tokens are captured once and replayed: `graph_runner.py`. With `SchedulerConfig(enable_overlap=True)`, the default on
CUDA, a step is launched before the one before it is booked: read `overlap/`.
"""

from m1_single_request import face
from m1_single_request.face import *
from m3_paged_attention.config import TraceConfig as TraceConfig
from m3_paged_attention.errors import KVCapacityError
from m4_radix_cache.config import CacheConfig
from m4_radix_cache.errors import DiskError, PoolError
from m5_chunked_prefill_spec.config import SpeculativeConfig
from m5_chunked_prefill_spec.cost_table import CostTable
from m6_multimodal_pd.config import DEFAULT_MODEL, EngineConfig, ModelConfig, MultimodalConfig, SchedulerConfig
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.errors import (
    EngineLostError,
    InvalidMediaError,
    PeerLostError,
    RemoteError,
    TransferError,
    WireError,
)
from m6_multimodal_pd.llm_engine import LLMEngine
from m6_multimodal_pd.outputs import EngineStats
from m6_multimodal_pd.wiring import PARTS, build_engine_core

__all__ = [
    *face.__all__,
    "DEFAULT_MODEL",
    "DiskError",
    "PARTS",
    "CacheConfig",
    "CostTable",
    "DisaggregationConfig",
    "EngineConfig",
    "EngineLostError",
    "EngineStats",
    "InvalidMediaError",
    "KVCapacityError",
    "LLMEngine",
    "ModelConfig",
    "MultimodalConfig",
    "PeerLostError",
    "PoolError",
    "RemoteError",
    "SchedulerConfig",
    "SpeculativeConfig",
    "TransferError",
    "WireError",
    "build_engine_core",
]
