"""m6: the full engine: images and video in every request, and prefill and decode apart where that is wanted.

Since m5: a prompt may hold pictures. They are cut into patches, a vision tower makes embeddings of these, and the
embeddings stand in the prompt where placeholder tokens stood, at positions of three axes (M-RoPE), with more of them
added in the first layers (DeepStack): Qwen3-VL (Bai et al. 2025). To the scheduler a picture is so many tokens, which
may be cut like any others; to the prefix cache it is a token that stands for its content; what the tower made is kept
for whoever brings the picture again. Everything of m1 to m5 works on prompts with and without pictures, in one batch.

    from m6_multimodal_pd import LLMEngine, MultimodalConfig, SamplingParams

    engine.chat([{"role": "user", "content": [{"type": "image", "image": "photo.png"},
                                              {"type": "text", "text": "Describe the picture."}]}])

Read `multimodal/`: `media.py`, `vision_processor.py`, `prompt.py`, `inputs.py`, `mrope.py`; then `models/qwen3_vl.py`,
`forward_batch.py`, `model_runner.py`; then `multimodal/encoder_budget.py` and `embedding_cache.py`. `wiring.py` shows
what m6 replaces. With a `DisaggregationConfig` some engines compute prompts and others answer, each in a process of its
own: read `disaggregation/`: `poll.py`, `prefill_side.py`, `decode_side.py`, `router.py`, `transport.py`.
"""

from m1_single_request import face
from m1_single_request.face import *
from m3_paged_attention.config import ModelConfig
from m3_paged_attention.errors import KVCapacityError
from m4_radix_cache.config import CacheConfig
from m4_radix_cache.errors import PoolError
from m5_chunked_prefill_spec.config import SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.cost_table import CostTable
from m6_multimodal_pd.config import DEFAULT_MODEL, EngineConfig, MultimodalConfig
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
