"""What the roles must offer that m6 adds or changes; all others are those of m1 to m5."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.tracer import Tracer
from m4_radix_cache.interfaces import EngineCoreInterface as M4EngineCoreInterface
from m4_radix_cache.mem_cache.allocator import BaseTokenToKVPoolAllocator
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.request import Req as TextReq
from m5_chunked_prefill_spec.config import SchedulerConfig
from m5_chunked_prefill_spec.interfaces import (
    ROLES as M5_ROLES,
    InputProcessorInterface as M5InputProcessorInterface,
    ModelRunnerInterface as M5ModelRunnerInterface,
    PrefillAdderInterface as M5PrefillAdderInterface,
)
from m5_chunked_prefill_spec.prefill_adder import PieceLimit
from m5_chunked_prefill_spec.speculative.draft_runner import DraftRunnerProtocol
from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.input_processor import Sight
from m6_multimodal_pd.model_loader import LoadedModel
from m6_multimodal_pd.multimodal.embedding_cache import EmbeddingCache
from m6_multimodal_pd.multimodal.processor_settings import VisionShape
from m6_multimodal_pd.multimodal.vision_processor import ProcessedItem
from m6_multimodal_pd.outputs import EncoderTotals


class InputProcessorInterface(M5InputProcessorInterface, Protocol):
    """m5's, told what it must know of a model that sees."""

    def __init__(
        self,
        *,
        request_class: type[TextReq],
        detokenizer_class: type[IncrementalDetokenizer],
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        max_num_batched_tokens: int | None,
        max_total_tokens: int,
        speculates: bool,
        seed: int,
        sight: Sight | None,
        guesses_texts_only: bool,
    ) -> None: ...


class MediaReaderInterface(Protocol):
    """Makes patches of whatever a user calls a picture."""

    options_key: bytes
    merge_size: int

    def __init__(self, *, name: str | Path, config: MultimodalConfig, vision: VisionShape) -> None: ...
    def process(self, part: Mapping[str, Any], what: str) -> ProcessedItem: ...


class EmbeddingCacheInterface(Protocol):
    """Keeps what the tower made."""

    capacity_bytes: int
    used_bytes: int
    num_evicted: int

    def __init__(self, *, capacity_bytes: int, tracer: Tracer) -> None: ...
    def __contains__(self, content: str) -> bool: ...
    def get(self, content: str) -> Tensor | None: ...
    def put(self, content: str, embeddings: Tensor, in_use: Collection[str]) -> bool: ...
    def clear(self) -> None: ...


class EncoderBudgetInterface(PieceLimit, Protocol):
    """Says how far a prompt may go in a step before its pictures cost too much. Made anew for each step."""

    def __init__(self, *, max_tokens: int, bytes_per_token: int, cache: EmbeddingCache) -> None: ...


class PrefillAdderInterface(M5PrefillAdderInterface, Protocol):
    """m5's, which asks another limit."""

    def __init__(
        self,
        *,
        tree_cache: Any,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator,
        running: Any,
        new_token_ratio: float,
        max_prefill_tokens: int,
        max_new_reqs: int,
        rem_chunk_tokens: int | None,
        chunk_alignment: int,
        is_chunked: bool,
        has_whole_step: bool,
        bound_by: str,
        new_piece_limit: Callable[[], PieceLimit],
        tracer: Tracer,
    ) -> None: ...


class ModelRunnerInterface(M5ModelRunnerInterface, Protocol):
    """m5's, with a tower."""

    encoder_totals: EncoderTotals

    def __init__(
        self,
        *,
        loaded_model: LoadedModel,
        scheduler_config: SchedulerConfig,
        req_to_token_pool: ReqToTokenPool,
        rejection_sampler: Any,
        draft_runner: DraftRunnerProtocol | None,
        embedding_cache: EmbeddingCache,
        encoder_budget: int,
        tracer: Tracer,
    ) -> None: ...


class EngineCoreInterface(M4EngineCoreInterface, Protocol):
    """Runs steps, and knows what the tower did."""

    def __init__(
        self,
        *,
        input_processor: Any,
        scheduler: Any,
        executor: Any,
        output_processor: Any,
        kv_bytes_per_token: int,
        embedding_cache: EmbeddingCache,
        encoder_totals: EncoderTotals,
        tracer: Tracer,
    ) -> None: ...


ROLES: dict[str, type] = M5_ROLES | {
    "input_processor": InputProcessorInterface,
    "media_reader": MediaReaderInterface,
    "embedding_cache": EmbeddingCacheInterface,
    "encoder_budget": EncoderBudgetInterface,
    "prefill_adder": PrefillAdderInterface,
    "model_runner": ModelRunnerInterface,
    "engine_core": EngineCoreInterface,
}
