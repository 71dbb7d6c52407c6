"""What the roles must offer that m3 adds or changes; all others are those of m1 and m2."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

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
from m2_continuous_batching.interfaces import ROLES as M2_ROLES
from m3_paged_attention.config import ModelConfig, SchedulerConfig
from m3_paged_attention.kv_cache_config import KVCacheConfig, KVCacheSpec, MemoryProfile
from m3_paged_attention.kv_manager_interface import PagedKVManager
from m3_paged_attention.model_loader import LoadedModel
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.preemption import PreemptionPolicy
from m3_paged_attention.request import Request
from m3_paged_attention.scheduler_output import SchedulerOutput
from m3_paged_attention.step_threads import StepThreads


class ModelLoaderInterface(Protocol):
    """Brings a model into memory."""

    def __call__(self, config: ModelConfig) -> LoadedModel: ...


class InputProcessorInterface(M1InputProcessorInterface, Protocol):
    """m1's, told of the token budget and the size of the KV memory."""

    def __init__(
        self,
        *,
        request_class: type[Request],
        detokenizer_class: type[IncrementalDetokenizer],
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        num_blocks: int,
        block_size: int,
        seed: int,
    ) -> None: ...


class SchedulerInterface(Protocol):
    """Decides who runs, and which blocks they run on."""

    requests: dict[str, Request]
    waiting: Collection[Request]
    running: list[Request]
    kv_manager: PagedKVManager
    num_preemptions: int

    def __init__(
        self,
        *,
        scheduler_config: SchedulerConfig,
        kv_manager: PagedKVManager,
        preemption: PreemptionPolicy,
        stop_checker: StopCheckerInterface,
        tracer: Tracer,
    ) -> None: ...
    def add_request(self, request: Request) -> None: ...
    def has_unfinished_requests(self) -> bool: ...
    def schedule(self) -> SchedulerOutput | None: ...
    def update_from_output(
        self, scheduler_output: SchedulerOutput | None, output: ModelRunnerOutput | None
    ) -> list[Request]: ...
    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]: ...
    def reset(self, reason: BaseFinishReason) -> None: ...
    def check_invariants(self) -> None: ...


class RunsSteps(Protocol):
    """What runner, worker and executor have in common: each passes a decision further down."""

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec: ...
    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None: ...
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput: ...
    def free_request(self, request_id: str) -> None: ...
    def held_request_ids(self) -> list[str]: ...
    def shutdown(self) -> None: ...


class ModelRunnerInterface(RunsSteps, Protocol):
    """Runs the model and the sampler, and holds the KV."""

    device: torch.device

    def __init__(
        self,
        *,
        loaded_model: LoadedModel,
        scheduler_config: SchedulerConfig,
        sampler: SamplerInterface,
        token_text: Callable[[int], str],
        tracer: Tracer,
    ) -> None: ...
    def profile_run(self, num_tokens: int) -> int: ...


class WorkerInterface(RunsSteps, Protocol):
    """One device."""

    def __init__(self, *, model_runner: Any, step_threads: StepThreads | None) -> None: ...
    def measure_memory(self, num_tokens: int) -> MemoryProfile: ...


class ExecutorInterface(RunsSteps, Protocol):
    """Hides how many workers there are."""

    def __init__(self, *, worker: Any) -> None: ...
    def measure_memory(self, num_tokens: int) -> MemoryProfile: ...


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


ROLES: dict[str, type] = M2_ROLES | {
    "model_loader": ModelLoaderInterface,
    "input_processor": InputProcessorInterface,
    "kv_manager": PagedKVManager,
    "preemption": PreemptionPolicy,
    "scheduler": SchedulerInterface,
    "model_runner": ModelRunnerInterface,
    "worker": WorkerInterface,
    "executor": ExecutorInterface,
    "engine_core": EngineCoreInterface,
}
