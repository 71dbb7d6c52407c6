"""What the roles must offer that m5 adds or changes; all others are those of m1 to m4."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.interfaces import (
    InputProcessorInterface as M1InputProcessorInterface,
    SamplerInterface,
    StopCheckerInterface,
)
from m1_single_request.tracer import Tracer
from m3_paged_attention.kv_cache_config import KVCacheConfig, KVCacheSpec
from m3_paged_attention.model_loader import LoadedModel
from m3_paged_attention.preemption import PreemptionPolicy
from m3_paged_attention.row_sampler import SampledRows
from m4_radix_cache.interfaces import (
    ROLES as M4_ROLES,
    PrefillAdderInterface as M4PrefillAdderInterface,
    ReqToTokenPoolInterface as M4ReqToTokenPoolInterface,
    SchedulerInterface as M4SchedulerInterface,
)
from m4_radix_cache.mem_cache.allocator import BaseTokenToKVPoolAllocator
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.prefill_adder import AddReqResult
from m4_radix_cache.request import Req
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m4_radix_cache.schedule_batch import Pools
from m5_chunked_prefill_spec.batch_composer import Work
from m5_chunked_prefill_spec.config import SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.cost_table import CostTable
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from m5_chunked_prefill_spec.outputs import ModelRunnerOutput
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from m5_chunked_prefill_spec.speculative.draft_runner import DraftRunnerProtocol
from m5_chunked_prefill_spec.speculative.proposer import Proposer
from m5_chunked_prefill_spec.speculative.spec_info import Drafts, SpeculativeAlgorithm


class InputProcessorInterface(M1InputProcessorInterface, Protocol):
    """m1's, told of the size of the KV memory, and of the token budget if no prompt is cut."""

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
    ) -> None: ...


class ReqToTokenPoolInterface(M4ReqToTokenPoolInterface, Protocol):
    """m4's, whose rows grow by several tokens and shrink again."""

    def __init__(self, *, size: int, max_context_len: int) -> None: ...
    def append_runs(self, rows: np.ndarray, slots: np.ndarray, counts: np.ndarray) -> None: ...
    def truncate(self, row: int, num_tokens: int, *, page_size: int) -> np.ndarray: ...


class PrefillAdderInterface(M4PrefillAdderInterface, Protocol):
    """Says who fits into a step, and how much of the last one. Derive it from `PrefillAdder`."""

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
        tracer: Tracer,
    ) -> None: ...
    def add_chunked_req(self, req: Req) -> AddReqResult: ...


class ComposerInterface(Protocol):
    """Fills a step."""

    def __init__(self, config: SchedulerConfig, costs: CostTable | None, /) -> None: ...
    def compose(self, work: Work) -> ScheduleBatch | None: ...


class ProposerInterface(Proposer, Protocol):
    """Guesses the next tokens; made by a class or a function of the configuration. A function may make none (None)."""

    def __init__(self, config: SpeculativeConfig, /) -> None: ...


class SpeculationInterface(Protocol):
    """Says how many tokens are guessed for whom, and counts what came of it; trace and `stats()` read the counts."""

    algorithm: SpeculativeAlgorithm
    num_draft_tokens: int
    num_accepted_tokens: int
    num_verifications: int

    def __init__(
        self,
        *,
        proposer: Proposer | None,
        config: SpeculativeConfig,
        max_model_len: int,
        vocab_size: int,
        cost_table: CostTable | None,
    ) -> None: ...
    def propose(self, reqs: Sequence[Req], max_draft_tokens: int) -> list[list[int]]: ...
    def verified(self, req: Req, drafted: int, accepted: int) -> None: ...


class DraftRunnerInterface(DraftRunnerProtocol, Protocol):
    """Makes guesses on the device."""

    def __init__(self, *, loaded_model: LoadedModel, req_to_token_pool: ReqToTokenPool) -> None: ...


class RejectionSamplerInterface(Protocol):
    """Reads guesses against logits."""

    def __init__(self, *, sampler: SamplerInterface, token_text: Callable[[int], str], tracer: Tracer) -> None: ...
    def __call__(
        self,
        req_ids: Sequence[str],
        info: SamplingBatchInfo,
        logits: Tensor,
        sample_lens: Sequence[int],
        drafts: Drafts | None,
    ) -> SampledRows: ...


class SchedulerInterface(M4SchedulerInterface, Protocol):
    """Decides who runs, and with how many tokens."""

    def __init__(
        self,
        *,
        scheduler_config: SchedulerConfig,
        pools: Pools,
        policy: Any,
        prefill_adder: Any,
        composer: Any,
        speculation: Any,
        chunk_alignment: int,
        preemption: PreemptionPolicy,
        stop_checker: StopCheckerInterface,
        vocab_size: int,
        device: torch.device,
        tracer: Tracer,
    ) -> None: ...
    def stats(self, totals: Mapping[str, Any]) -> Any: ...


class ModelRunnerInterface(Protocol):
    """Runs the models and the sampler, and holds the KV."""

    device: torch.device

    def __init__(
        self,
        *,
        loaded_model: LoadedModel,
        scheduler_config: SchedulerConfig,
        req_to_token_pool: ReqToTokenPool,
        rejection_sampler: Any,
        draft_runner: DraftRunnerProtocol | None,
    ) -> None: ...
    def profile_run(self, num_tokens: int) -> int: ...
    def kv_cache_spec(self, block_size: int) -> KVCacheSpec: ...
    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None: ...
    def measure_costs(self, most: int) -> CostTable: ...
    def execute_model(self, batch: ModelWorkerBatch) -> ModelRunnerOutput: ...
    def free_request(self, request_id: str) -> None: ...
    def held_request_ids(self) -> list[str]: ...
    def shutdown(self) -> None: ...


ROLES: dict[str, type] = M4_ROLES | {
    "input_processor": InputProcessorInterface,
    "req_to_token_pool": ReqToTokenPoolInterface,
    "prefill_adder": PrefillAdderInterface,
    "composer": ComposerInterface,
    "proposer": ProposerInterface,
    "speculation": SpeculationInterface,
    "draft_runner": DraftRunnerInterface,
    "rejection_sampler": RejectionSamplerInterface,
    "scheduler": SchedulerInterface,
    "model_runner": ModelRunnerInterface,
}
