"""One device: the model runner on it, and how much of its memory the KV blocks may take.

m2's worker only passed batches on. Here it also measures: on CUDA the largest step runs once on empty input, and what
the device then still has of its share becomes KV blocks. vLLM: `determine_available_memory` and
`initialize_from_config` in `v1/worker/gpu_worker.py`; SGLang: `profile_max_num_token`.
"""

from contextlib import nullcontext
from typing import Any

import torch

from m1_single_request.errors import ConfigError
from m3_paged_attention.kv_cache_config import KVCacheConfig, KVCacheSpec, MemoryProfile
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.step_threads import StepThreads


class GPUWorker:
    """Runs on its device whatever it is handed; decides nothing."""

    def __init__(self, *, model_runner: Any, step_threads: StepThreads | None = None) -> None:
        """`step_threads`: limits the CPU threads of each step; None leaves them as they are."""
        self.model_runner = model_runner
        self._step_threads = step_threads or nullcontext()
        self.device = model_runner.device
        self._on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @torch.inference_mode()
    def measure_memory(self, num_tokens: int) -> MemoryProfile:
        """What a step of `num_tokens` new tokens leaves of a GPU. Raises `ConfigError` if not even that fits."""
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            with self._on_device:
                kv_bytes = self.model_runner.profile_run(num_tokens)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of max_num_batched_tokens={num_tokens} does not fit on {self.device}: use a smaller one"
            ) from error
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - kv_bytes  # KV is what the rest is for
        return MemoryProfile(total_bytes=total, peak_bytes=others + peak)

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """The shape of a block of this model."""
        return self.model_runner.kv_cache_spec(block_size)

    @torch.inference_mode()
    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Reserve the KV memory. Raises `ConfigError` where there is not so much."""
        self.model_runner.initialize_kv_cache(kv_cache_config)

    @torch.inference_mode()
    def execute_model(self, decision: Any) -> ModelRunnerOutput:
        """Run a decision, in the form that the runner takes; returns the tokens."""
        with self._on_device, self._step_threads:  # a kernel of triton runs on the current device, wherever its
            return self.model_runner.execute_model(decision)  # arguments lie

    def free_request(self, request_id: str) -> None:
        """Forget a request; nothing happens if it is unknown."""
        self.model_runner.free_request(request_id)

    def held_request_ids(self) -> list[str]:
        """The requests that are remembered."""
        return self.model_runner.held_request_ids()

    def shutdown(self) -> None:
        """Let go of the KV memory and the model. After that only the records of requests can be asked for."""
        self.model_runner.shutdown()
