"""Worker: one device and the model runner on it.

New in m2: the engine calls an executor instead of its runner, and the executor calls one worker per device. Here there
is one of each, in this process. The interface would also fit several processes: it passes plain data down and logits
up, and no code below it uses the queues. The name is the usual one; the device may also be a CPU. vLLM:
`v1/worker/gpu_worker.py`; SGLang: `managers/tp_worker.py`.
"""

import torch
from torch import Tensor

from m2_continuous_batching.input_batch import InputBatch
from m2_continuous_batching.model_runner import ModelRunner
from m2_continuous_batching.outputs import BatchUsage


class GPUWorker:
    """Runs batches on its device; makes no scheduling decision."""

    def __init__(self, *, model_runner: ModelRunner) -> None:
        self.model_runner = model_runner

    @torch.inference_mode()
    def execute_model_batch(self, input_batch: InputBatch) -> dict[str, Tensor]:
        """Run all rows, and return the logits by request id: float32 `[num_logits, vocab]`."""
        return self.model_runner.execute_model_batch(input_batch)

    @torch.inference_mode()
    def free_request_cache(self, request_id: str) -> None:
        """Free the KV of a request; does nothing for a request that never ran."""
        self.model_runner.free_request_cache(request_id)

    @torch.inference_mode()
    def clear_kv_caches(self) -> None:
        """Free the KV of all requests."""
        self.model_runner.clear_kv_caches()

    def num_kv_tokens(self) -> int:
        """Return the number of tokens with KV."""
        return self.model_runner.num_kv_tokens()

    def usage(self) -> BatchUsage:
        """Return the tokens of the last batch and the current KV memory."""
        return self.model_runner.usage()
