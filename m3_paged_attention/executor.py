"""Executor: runs a step for the engine core, on one or more workers.

m2's executor took a batch and returned logits. This one takes the scheduler's output and returns tokens. Both are plain
data, so the workers could be in any process. vLLM: `v1/executor` (`UniProcExecutor` is this one).
"""

from typing import Any

from m3_paged_attention.kv_cache_config import KVCacheConfig, KVCacheSpec, MemoryProfile
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.worker import GPUWorker


class GPUExecutor:
    """Executor of one worker in the same process."""

    def __init__(self, *, worker: GPUWorker) -> None:
        self.worker = worker

    def measure_memory(self, num_tokens: int) -> MemoryProfile:
        """Measure the GPU memory of a step of `num_tokens` new tokens. Raises `ConfigError` if it does not fit."""
        return self.worker.measure_memory(num_tokens)

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Return the shape of this model's KV blocks."""
        return self.worker.kv_cache_spec(block_size)

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV memory. Raises `ConfigError` if the machine has less."""
        self.worker.initialize_kv_cache(kv_cache_config)

    def execute_model(self, decision: Any) -> ModelRunnerOutput:
        """Run a step, described in the format of the model runner (in m3 a `SchedulerOutput`); return its tokens.

        An exception fails only the requests of this step; `torch.AcceleratorError` means that the device is lost.
        """
        return self.worker.execute_model(decision)

    def free_request(self, request_id: str) -> None:
        """Remove the state of a request; does nothing for an unknown id."""
        self.worker.free_request(request_id)

    def held_request_ids(self) -> list[str]:
        """Return the ids of the requests whose state the runner stores."""
        return self.worker.held_request_ids()

    def shutdown(self) -> None:
        """Free the KV memory and the model. Afterwards only `free_request` and `held_request_ids` work."""
        self.worker.shutdown()
