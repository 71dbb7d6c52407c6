"""One device and the model runner on it.

New in m2: the engine does not call its runner any more, it calls an executor, and that calls a worker for each device.
In this course there is one of each, in this process. The cut is right all the same: what crosses it downwards is plain
data, what comes back are logits, and nothing below it knows a queue. The name is the field's; the device may as well be
a CPU. vLLM: `v1/worker/gpu_worker.py`; SGLang: `managers/tp_worker.py`.
"""

import torch
from torch import Tensor

from m2_continuous_batching.input_batch import InputBatch
from m2_continuous_batching.model_runner import ModelRunner
from m2_continuous_batching.outputs import BatchUsage


class GPUWorker:
    """Runs on its device whatever it is handed; decides nothing."""

    def __init__(self, *, model_runner: ModelRunner) -> None:
        self.model_runner = model_runner
        self.kv_bytes_per_token = model_runner.kv_bytes_per_token

    @torch.inference_mode()
    def execute_model_batch(self, input_batch: InputBatch) -> dict[str, Tensor]:
        """Logits of every row by request id: float32 `[num_logits, vocab]`."""
        return self.model_runner.execute_model_batch(input_batch)

    @torch.inference_mode()
    def free_request_cache(self, request_id: str) -> None:
        """Release the KV of a request; one that never ran holds none."""
        self.model_runner.free_request_cache(request_id)

    @torch.inference_mode()
    def clear_kv_caches(self) -> None:
        """Release the KV of all requests."""
        self.model_runner.clear_kv_caches()

    def held_request_ids(self) -> list[str]:
        """The requests whose KV is held."""
        return self.model_runner.held_request_ids()

    def num_kv_tokens(self) -> int:
        """Tokens whose KV is held now."""
        return self.model_runner.num_kv_tokens()

    def usage(self) -> BatchUsage:
        """What the last batch did, and what stands in the KV memory now."""
        return self.model_runner.usage()
