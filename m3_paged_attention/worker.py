"""Worker: one device, the model runner on it, and the memory available for its KV blocks.

m2's worker only called its runner. Here it also measures memory: on CUDA the largest step runs once on dummy tokens,
and the rest of the device's share becomes KV blocks. vLLM: `determine_available_memory` and `initialize_from_config` in
`v1/worker/gpu_worker.py`; SGLang: `profile_max_num_token`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from m1_single_request.errors import ConfigError
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec, MemoryProfile
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.step_threads import StepThreads


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a CUDA device is the current one. It has no effect for a CPU.

    torch's operators run on the device of their tensors. Everything else goes to the current device: kernels of Triton,
    pinned memory, and streams, events and graphs that are made without a device.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class GPUWorker:
    """Runs steps on its device; makes no scheduling decision. Its device is the current one whenever its runner
    computes or reserves memory."""

    def __init__(self, *, model_runner: Any, step_threads: StepThreads | None = None) -> None:
        """`step_threads`: limits the CPU threads of each step; None does not change them."""
        self.model_runner = model_runner
        self.step_threads = step_threads or nullcontext()
        self.recorder: AbstractContextManager[None] = nullcontext()
        """Context of each step: that of `record_experts`."""
        self.device = device = model_runner.device
        if device == torch.device("cuda"):  # without an index: the device that is current now, whatever is later
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.inference_mode = torch.inference_mode()  # made once: that takes as long as to enter it
        self.on_device = current_device(self.device)
        """Context in which the device is the current one, for one call at a time."""

    @torch.inference_mode()
    def measure_memory(self, num_tokens: int) -> MemoryProfile:
        """Measure the GPU memory of a step of `num_tokens` new tokens. Raises `ConfigError` if it does not fit."""
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            with self.on_device:
                kv_bytes = self.model_runner.profile_run(num_tokens)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of max_num_batched_tokens={num_tokens} that samples for max_num_seqs="
                f"{self.model_runner.max_num_seqs} requests does not fit on {self.device}: use smaller ones"
            ) from error
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # the memory of the run is for KV now
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - kv_bytes  # without the temporary KV of the run
        return MemoryProfile(total_bytes=total, peak_bytes=peak, other_bytes=others)

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Return the shape of this model's KV blocks."""
        return self.model_runner.kv_cache_spec(block_size)

    @torch.inference_mode()
    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV memory. Raises `ConfigError` if the machine has less."""
        with self.on_device:
            self.model_runner.initialize_kv_cache(kv_cache_config)

    def execute_model(self, decision: Any) -> ModelRunnerOutput:
        """Run a step, described in the format of the model runner; return its tokens."""
        with self.inference_mode, self.on_device, self.step_threads, self.recorder:
            return self.model_runner.execute_model(decision)

    def free_request(self, request_id: str) -> None:
        """Remove the state of a request; does nothing for an unknown id."""
        self.model_runner.free_request(request_id)

    def held_request_ids(self) -> list[str]:
        """Return the ids of the requests whose state the runner stores."""
        return self.model_runner.held_request_ids()

    def shutdown(self) -> None:
        """Free the KV memory and the model. Afterwards only `free_request` and `held_request_ids` work."""
        self.model_runner.shutdown()
