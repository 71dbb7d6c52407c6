"""Where a batch runs: the one thing below the engine core that it knows.

New in m2. An executor hides how many workers there are and in which processes: here one, in this one. With tensor
parallelism it would send the same batch to several and take the logits from the first. vLLM: `v1/executor`
(`UniProcExecutor` is this one); SGLang has no such layer, its scheduler holds a `TpModelWorker`.
"""

from torch import Tensor

from m2_continuous_batching.input_batch import InputBatch
from m2_continuous_batching.outputs import BatchUsage
from m2_continuous_batching.worker import GPUWorker


class GPUExecutor:
    """One worker, called directly."""

    def __init__(self, *, worker: GPUWorker) -> None:
        self.worker = worker
        self.kv_bytes_per_token = worker.kv_bytes_per_token

    def execute_model_batch(self, input_batch: InputBatch) -> dict[str, Tensor]:
        """Logits of every row by request id: float32 `[num_logits, vocab]`.

        Whatever it raises fails the requests of this batch, and no other; `torch.AcceleratorError` means that the
        device is lost.
        """
        return self.worker.execute_model_batch(input_batch)

    def free_request_cache(self, request_id: str) -> None:
        """Release the KV of a request; one that never ran holds none."""
        self.worker.free_request_cache(request_id)

    def clear_kv_caches(self) -> None:
        """Release the KV of all requests."""
        self.worker.clear_kv_caches()

    def held_request_ids(self) -> list[str]:
        """The requests whose KV is held."""
        return self.worker.held_request_ids()

    def num_kv_tokens(self) -> int:
        """Tokens whose KV is held now."""
        return self.worker.num_kv_tokens()

    def usage(self) -> BatchUsage:
        """What the last batch did, and what stands in the KV memory now."""
        return self.worker.usage()
