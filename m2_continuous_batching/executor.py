"""Executor: runs a batch for the engine core, on one or more workers.

New in m2. An executor hides the number of workers and their processes: here one worker, in this process. With tensor
parallelism it would send the same batch to several workers and take the logits of the first. vLLM: `v1/executor`
(`UniProcExecutor` is this one); SGLang has no such layer, its scheduler holds a `TpModelWorker`.
"""

from torch import Tensor

from m2_continuous_batching.input_batch import InputBatch
from m2_continuous_batching.outputs import BatchUsage
from m2_continuous_batching.worker import GPUWorker


class GPUExecutor:
    """Executor of one worker in the same process."""

    def __init__(self, *, worker: GPUWorker) -> None:
        self.worker = worker

    def execute_model_batch(self, input_batch: InputBatch) -> dict[str, Tensor]:
        """Run all rows, and return the logits by request id: float32 `[num_logits, vocab]`.

        An exception fails only the requests of this batch; `torch.AcceleratorError` means that the device is lost.
        """
        return self.worker.execute_model_batch(input_batch)

    def free_request_cache(self, request_id: str) -> None:
        """Free the KV of a request; does nothing for a request that never ran."""
        self.worker.free_request_cache(request_id)

    def clear_kv_caches(self) -> None:
        """Free the KV of all requests."""
        self.worker.clear_kv_caches()

    def num_kv_tokens(self) -> int:
        """Return the number of tokens with KV."""
        return self.worker.num_kv_tokens()

    def usage(self) -> BatchUsage:
        """Return the tokens of the last batch and the current KV memory."""
        return self.worker.usage()
