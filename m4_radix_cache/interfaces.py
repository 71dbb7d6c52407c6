"""What the roles must offer that m4 adds or changes; all others are those of m1 to m3."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.interfaces import (
    EngineCoreInterface as M1EngineCoreInterface,
    InputProcessorInterface as M1InputProcessorInterface,
    SamplerInterface,
    StopCheckerInterface,
)
from m1_single_request.request import BaseFinishReason
from m1_single_request.tracer import Tracer
from m3_paged_attention.interfaces import ROLES as M3_ROLES
from m3_paged_attention.kv_cache_config import KVCacheConfig, KVCacheSpec
from m3_paged_attention.model_loader import LoadedModel
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.preemption import PreemptionPolicy
from m4_radix_cache.config import SchedulerConfig
from m4_radix_cache.mem_cache.allocator import BaseTokenToKVPoolAllocator
from m4_radix_cache.mem_cache.base_prefix_cache import MatchResult
from m4_radix_cache.mem_cache.radix_key import RadixKey
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.model_worker_batch import ModelWorkerBatch
from m4_radix_cache.prefill_adder import AddReqResult
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_batch import Pools, ScheduleBatch
from m4_radix_cache.schedule_policy import Order


class InputProcessorInterface(M1InputProcessorInterface, Protocol):
    """m1's, told of the token budget and the size of the KV memory."""

    def __init__(
        self,
        *,
        request_class: type[Req],
        detokenizer_class: type[IncrementalDetokenizer],
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        max_total_tokens: int,
        seed: int,
    ) -> None: ...


class ReqToTokenPoolInterface(Protocol):
    """A row of slots for each running request."""

    def __init__(self, *, size: int, max_context_len: int) -> None: ...
    def alloc(self, need_size: int) -> list[int] | None: ...
    def free(self, rows: int | Sequence[int]) -> None: ...
    def write(self, row: int, start: int, slots: np.ndarray) -> None: ...
    def append(self, rows: np.ndarray, slots: np.ndarray) -> None: ...
    def read(self, row: int, start: int, end: int) -> np.ndarray: ...
    def last_slots(self, rows: np.ndarray) -> np.ndarray: ...
    def page_tables(self, rows: np.ndarray, num_tokens: int, page_size: int) -> np.ndarray: ...
    def clear(self) -> None: ...


class AllocatorInterface(Protocol):
    """Hands out slots. To write one, derive it from `BaseTokenToKVPoolAllocator`; or give a function that makes it."""

    def __init__(self, *, size: int, page_size: int, checked: bool) -> None: ...
    def available_size(self) -> int: ...
    def owned_pages(self) -> np.ndarray: ...
    def alloc(self, num_tokens: int) -> np.ndarray | None: ...
    def alloc_extend(
        self, prefix_lens: np.ndarray, seq_lens: np.ndarray, last_locs: np.ndarray
    ) -> np.ndarray | None: ...
    def alloc_decode(self, seq_lens: np.ndarray, last_locs: np.ndarray) -> np.ndarray | None: ...
    def num_pages_for_extend(self, prefix_lens: np.ndarray, seq_lens: np.ndarray) -> int: ...
    def num_pages_for_decode(self, seq_lens: np.ndarray) -> int: ...
    def free(self, slots: np.ndarray) -> None: ...
    def free_group_begin(self) -> None: ...
    def free_group_end(self) -> None: ...
    def clear(self) -> None: ...


class PrefixCacheInterface(Protocol):
    """Keeps the KV of requests for others. To write one, derive it from `BasePrefixCache`."""

    def __init__(
        self,
        *,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator,
        eviction_policy: str,
        tracer: Tracer,
    ) -> None: ...
    def reset(self) -> None: ...
    def match_prefix(self, key: RadixKey, max_len: int | None = None) -> MatchResult: ...
    def insert(self, key: RadixKey, value: np.ndarray, priority: int = 0) -> int: ...
    def inc_lock_ref(self, node: Any) -> None: ...
    def dec_lock_ref(self, node: Any) -> None: ...
    def record_hit(self, node: Any) -> None: ...
    def evict(self, num_tokens: int) -> int: ...
    def evictable_size(self) -> int: ...
    def protected_size(self) -> int: ...
    def cache_unfinished_req(self, req: Any) -> None: ...
    def cache_finished_req(self, req: Any, *, is_insert: bool = True) -> None: ...
    def check_invariants(self) -> None: ...


class SchedulePolicyInterface(Protocol):
    """Orders those that wait."""

    def __init__(self, policy: str, *, tree_cache: Any, seed: int, tracer: Tracer) -> None: ...
    def calc_priority(self, waiting: Sequence[Req], prefilling: Sequence[Req] = ()) -> Order: ...


class PrefillAdderInterface(Protocol):
    """Says who of them fits into a prefill. Derive it from `PrefillAdder`, whose budgets the scheduler counts on."""

    can_run_list: list[Req]
    """Who was admitted, in order; the `last_node` of each is locked."""

    def __init__(
        self,
        *,
        tree_cache: Any,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator,
        running: Sequence[Req],
        new_token_ratio: float,
        max_prefill_tokens: int,
        max_new_reqs: int,
        tracer: Tracer,
    ) -> None: ...
    def add_one_req(self, req: Req) -> AddReqResult: ...


class SchedulerInterface(Protocol):
    """Decides who runs, and on which slots."""

    requests: dict[str, Req]
    waiting_queue: list[Req]
    running_batch: ScheduleBatch
    pools: Pools

    def __init__(
        self,
        *,
        scheduler_config: SchedulerConfig,
        pools: Pools,
        policy: Any,
        prefill_adder: Any,
        preemption: PreemptionPolicy,
        stop_checker: StopCheckerInterface,
        vocab_size: int,
        device: torch.device,
        tracer: Tracer,
    ) -> None: ...
    def add_request(self, request: Req) -> None: ...
    def has_unfinished_requests(self) -> bool: ...
    def schedule(self) -> ScheduleBatch | None: ...
    def update_from_output(self, batch: ScheduleBatch | None, output: ModelRunnerOutput | None) -> list[Req]: ...
    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]: ...
    def check_invariants(self) -> None: ...


class ModelRunnerInterface(Protocol):
    """Runs the model and the sampler, and holds the KV."""

    device: torch.device

    def __init__(
        self,
        *,
        loaded_model: LoadedModel,
        scheduler_config: SchedulerConfig,
        req_to_token_pool: ReqToTokenPool,
        sampler: SamplerInterface,
        token_text: Callable[[int], str],
        tracer: Tracer,
    ) -> None: ...
    def profile_run(self, num_tokens: int) -> int: ...
    def kv_cache_spec(self, block_size: int) -> KVCacheSpec: ...
    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None: ...
    def execute_model(self, batch: ModelWorkerBatch) -> ModelRunnerOutput: ...
    def free_request(self, request_id: str) -> None: ...
    def held_request_ids(self) -> list[str]: ...
    def shutdown(self) -> None: ...


class EngineCoreInterface(M1EngineCoreInterface, Protocol):
    """Runs steps."""

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
    ) -> None: ...


ROLES: dict[str, type] = {role: protocol for role, protocol in M3_ROLES.items() if role != "kv_manager"} | {
    "input_processor": InputProcessorInterface,
    "req_to_token_pool": ReqToTokenPoolInterface,
    "token_to_kv_pool_allocator": AllocatorInterface,
    "prefix_cache": PrefixCacheInterface,
    "schedule_policy": SchedulePolicyInterface,
    "prefill_adder": PrefillAdderInterface,
    "scheduler": SchedulerInterface,
    "model_runner": ModelRunnerInterface,
    "engine_core": EngineCoreInterface,
}
