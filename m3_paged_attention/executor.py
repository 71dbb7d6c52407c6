"""Where a step runs: the one thing below the engine core that it knows.

m2's executor took a batch and gave logits back. This one takes the scheduler's decision itself and gives tokens back:
both are plain data, so the workers could be anywhere. vLLM: `v1/executor` (`UniProcExecutor` is this one).
"""

from typing import Any

from m3_paged_attention.kv_cache_config import KVCacheConfig, KVCacheSpec, MemoryProfile
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.worker import GPUWorker


class GPUExecutor:
    """One worker, called directly."""

    def __init__(self, *, worker: GPUWorker) -> None:
        self.worker = worker

    def measure_memory(self, num_tokens: int) -> MemoryProfile:
        """What a step of `num_tokens` new tokens leaves of a GPU. Raises `ConfigError` if not even that fits."""
        return self.worker.measure_memory(num_tokens)

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """The shape of a block of this model."""
        return self.worker.kv_cache_spec(block_size)

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Reserve the KV memory. Raises `ConfigError` where there is not so much."""
        self.worker.initialize_kv_cache(kv_cache_config)

    def execute_model(self, decision: Any) -> ModelRunnerOutput:
        """Run a decision, in the form that the runner takes: here a `SchedulerOutput`. Returns the tokens.

        Whatever it raises fails the requests of this step, and no other; `torch.AcceleratorError` means that the device
        is lost.
        """
        return self.worker.execute_model(decision)

    def free_request(self, request_id: str) -> None:
        """Forget a request; nothing happens if it is unknown."""
        self.worker.free_request(request_id)

    def held_request_ids(self) -> list[str]:
        """The requests that are remembered."""
        return self.worker.held_request_ids()

    def shutdown(self) -> None:
        """Let go of the KV memory and the model. After that only the records of requests can be asked for."""
        self.worker.shutdown()
