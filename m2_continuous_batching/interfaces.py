"""What the roles must offer that m2 adds or changes; all others are m1's."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.interfaces import (
    ROLES as M1_ROLES,
    EngineCoreInterface as M1EngineCoreInterface,
    InputProcessorInterface as M1InputProcessorInterface,
    StopCheckerInterface,
)
from m1_single_request.model_loader import LoadedModel
from m1_single_request.request import BaseFinishReason, Request
from m1_single_request.sampling_step import SampledTokens
from m1_single_request.tracer import Tracer
from m2_continuous_batching.config import SchedulerConfig
from m2_continuous_batching.input_batch import InputBatch
from m2_continuous_batching.kv_manager import KVManager
from m2_continuous_batching.outputs import BatchUsage
from m2_continuous_batching.request_queue import RequestQueue
from m2_continuous_batching.scheduler_output import SchedulerOutput


class InputProcessorInterface(M1InputProcessorInterface, Protocol):
    """m1's, told of the token budget."""

    def __init__(
        self,
        *,
        request_class: type[Request],
        detokenizer_class: type[IncrementalDetokenizer],
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        seed: int,
    ) -> None: ...


class SchedulerInterface(Protocol):
    """Decides who runs, a batch at a time."""

    requests: dict[str, Request]
    waiting: RequestQueue
    running: list[Request]
    finished_req_ids: set[str]
    kv_manager: KVManager

    def __init__(
        self,
        *,
        scheduler_config: SchedulerConfig,
        kv_manager: KVManager,
        stop_checker: StopCheckerInterface,
        tracer: Tracer,
    ) -> None: ...
    def add_request(self, request: Request) -> None: ...
    def has_unfinished_requests(self) -> bool: ...
    def schedule(self) -> SchedulerOutput | None: ...
    def update_from_output(
        self, scheduler_output: SchedulerOutput | None, sampled: Mapping[str, SampledTokens]
    ) -> list[Request]: ...
    def finish_requests(self, request_ids: Iterable[str], reason: BaseFinishReason) -> list[str]: ...
    def reset(self, reason: BaseFinishReason) -> None: ...
    def check_invariants(self) -> None: ...


class RunsBatches(Protocol):
    """What runner, worker and executor have in common: each passes a batch further down."""

    kv_bytes_per_token: int

    def execute_model_batch(self, input_batch: InputBatch) -> dict[str, Tensor]: ...
    def free_request_cache(self, request_id: str) -> None: ...
    def clear_kv_caches(self) -> None: ...
    def held_request_ids(self) -> list[str]: ...
    def num_kv_tokens(self) -> int: ...
    def usage(self) -> BatchUsage: ...


class ModelRunnerInterface(RunsBatches, Protocol):
    """Runs the model and holds the KV."""

    def __init__(self, *, loaded_model: LoadedModel, scheduler_config: SchedulerConfig, tracer: Tracer) -> None: ...


class WorkerInterface(RunsBatches, Protocol):
    """One device."""

    def __init__(self, *, model_runner: Any) -> None: ...


class ExecutorInterface(RunsBatches, Protocol):
    """Hides how many workers there are."""

    def __init__(self, *, worker: Any) -> None: ...


class EngineCoreInterface(M1EngineCoreInterface, Protocol):
    """Runs steps."""

    def __init__(
        self,
        *,
        input_processor: Any,
        scheduler: Any,
        executor: Any,
        sampling_step: Any,
        output_processor: Any,
        parts: Mapping[str, Any],
        tracer: Tracer,
    ) -> None: ...


ROLES: dict[str, type] = M1_ROLES | {
    "input_processor": InputProcessorInterface,
    "kv_manager": KVManager,
    "scheduler": SchedulerInterface,
    "model_runner": ModelRunnerInterface,
    "worker": WorkerInterface,
    "executor": ExecutorInterface,
    "engine_core": EngineCoreInterface,
}
