"""What the roles must offer that m6 adds or changes; all others are those of m1 to m5."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Unpack

from torch import Tensor

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.input_processor import Message, Prompt, RequestOptions
from m1_single_request.interfaces import EngineCoreInterface as M1EngineCoreInterface
from m1_single_request.outputs import EngineStats
from m1_single_request.request import Request
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.tracer import Tracer
from m3_paged_attention.step_threads import StepThreads
from m4_radix_cache.mem_cache.allocator import BaseTokenToKVPoolAllocator
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.prefill_adder import AddReqResult
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.config import SchedulerConfig
from m5_chunked_prefill_spec.interfaces import ROLES as M5_ROLES, ModelRunnerInterface as M5ModelRunnerInterface
from m5_chunked_prefill_spec.prefill_adder import PieceLimit
from m5_chunked_prefill_spec.speculative.draft_runner import DraftRunnerProtocol
from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.input_processor import Sight
from m6_multimodal_pd.model_loader import LoadedModel
from m6_multimodal_pd.models.vision import VisionTower
from m6_multimodal_pd.multimodal.embedding_cache import EmbeddingCache
from m6_multimodal_pd.multimodal.encoder import Encoder, Seen
from m6_multimodal_pd.multimodal.processor_settings import VisionShape
from m6_multimodal_pd.multimodal.prompt import ReadsMedia


class InputProcessorInterface(Protocol):
    """Checks what a user hands in and builds requests; told what it must know of a model that sees."""

    def __init__(
        self,
        *,
        request_class: type[Req],
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
    def process_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        number: int,
        arrival_time: float,
        **options: Unpack[RequestOptions],
    ) -> Request: ...
    def apply_chat_template(
        self, messages: Sequence[Message], options: Mapping[str, Any] | None = None
    ) -> list[int]: ...


class MediaReaderInterface(ReadsMedia, Protocol):
    """Makes patches of whatever a user calls a picture."""

    def __init__(
        self, *, name: str | Path, config: MultimodalConfig, vision: VisionShape, max_item_tokens: int
    ) -> None: ...


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


class EncoderInterface(Protocol):
    """Makes embeddings of pictures, keeps them, and says what that took."""

    tower: VisionTower | None
    cache: EmbeddingCache
    budget: int

    def __init__(self, *, tower: VisionTower | None, cache: EmbeddingCache, budget: int, tracer: Tracer) -> None: ...
    def embed(self, seen: Sequence[Seen]) -> list[Tensor]: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...
    def add_to(self, stats: EngineStats) -> EngineStats: ...


class PrefillAdderInterface(Protocol):
    """Says who fits into a step, and how much of the last one; asks another limit. Derive it from m5's
    `PrefillAdder`."""

    can_run_list: list[Req]

    def __init__(
        self,
        *,
        tree_cache: Any,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator,
        running: Sequence[Req],
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
    def add_one_req(self, req: Req) -> AddReqResult: ...
    def add_chunked_req(self, req: Req) -> AddReqResult: ...


class ModelRunnerInterface(M5ModelRunnerInterface, Protocol):
    """m5's, with an encoder."""

    def __init__(
        self,
        *,
        loaded_model: LoadedModel,
        scheduler_config: SchedulerConfig,
        req_to_token_pool: ReqToTokenPool,
        rejection_sampler: Any,
        draft_runner: DraftRunnerProtocol | None,
        encoder: Encoder,
        step_threads: StepThreads | None,
    ) -> None: ...


class EngineCoreInterface(M1EngineCoreInterface, Protocol):
    """Runs steps, and has a companion that outlives requests: the encoder."""

    def __init__(
        self,
        *,
        input_processor: Any,
        scheduler: Any,
        executor: Any,
        output_processor: Any,
        kv_bytes_per_token: int,
        parts: Mapping[str, Any],
        tracer: Tracer,
        companion: Any,
    ) -> None: ...


ROLES: dict[str, type] = M5_ROLES | {
    "input_processor": InputProcessorInterface,
    "media_reader": MediaReaderInterface,
    "embedding_cache": EmbeddingCacheInterface,
    "encoder": EncoderInterface,
    "encoder_budget": EncoderBudgetInterface,
    "prefill_adder": PrefillAdderInterface,
    "model_runner": ModelRunnerInterface,
    "engine_core": EngineCoreInterface,
}
