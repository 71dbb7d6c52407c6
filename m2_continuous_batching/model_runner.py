"""Model runner: run the model on all rows of a step and return logits.

m1's runner ran one request. This one runs all rows of a step, in one of two ways, which the lesson compares:
`per_request.py` runs them one after the other, `padded.py` all together. It reports the padding, which `padded.py`
counts, and the unused KV memory of each. m3 adds the project's own model, which needs no padding. vLLM:
`v1/worker/gpu_model_runner.py`.
"""

from typing import Protocol

from torch import Tensor

from m1_single_request.model_loader import LoadedModel
from m1_single_request.tracer import Tracer
from m2_continuous_batching.config import SchedulerConfig
from m2_continuous_batching.events import KVUsage
from m2_continuous_batching.input_batch import InputBatch
from m2_continuous_batching.outputs import BatchUsage
from m2_continuous_batching.padded import PaddedExecution
from m2_continuous_batching.per_request import PerRequestExecution


class BatchExecution(Protocol):
    """A way to run the rows of a batch, with its own KV memory."""

    num_padded: int
    """Number of padding positions in the last batch."""

    def execute(self, batch: InputBatch) -> dict[str, Tensor]: ...
    def free(self, request_id: str) -> None: ...
    def clear(self) -> None: ...
    def lengths(self) -> dict[str, int]: ...
    def reserved_bytes(self) -> int: ...


class ModelRunner:
    """Runs the scheduler's output, and owns the KV cache of every started request."""

    def __init__(self, *, loaded_model: LoadedModel, scheduler_config: SchedulerConfig, tracer: Tracer) -> None:
        self.model = loaded_model.model
        self.kv_bytes_per_token = loaded_model.kv_bytes_per_token
        self.tracer = tracer
        self.execution: BatchExecution
        if scheduler_config.execution == "per_request":
            self.execution = PerRequestExecution(loaded_model=loaded_model, tracer=tracer)
        else:
            self.execution = PaddedExecution(
                loaded_model=loaded_model, max_num_seqs=scheduler_config.max_num_seqs, tracer=tracer
            )
        self._num_tokens = 0

    def execute_model_batch(self, input_batch: InputBatch) -> dict[str, Tensor]:
        """Run the new tokens of all rows, and store their keys and values in the requests' KV memory.

        Returns the logits of each row's last `num_logits` tokens by request id: float32 `[num_logits, vocab]`.
        """
        self._num_tokens = 0
        logits = self.execution.execute(input_batch)
        self._num_tokens = input_batch.num_tokens
        self.tracer.emit(KVUsage.of, self.usage)
        return logits

    def free_request_cache(self, request_id: str) -> None:
        """Free the KV of a request; does nothing for a request that never ran."""
        self.execution.free(request_id)

    def clear_kv_caches(self) -> None:
        """Free the KV of all requests."""
        self.execution.clear()

    def num_kv_tokens(self) -> int:
        """Return the number of tokens with KV."""
        return sum(self.execution.lengths().values())

    def usage(self) -> BatchUsage:
        """Return the tokens of the last batch and the current KV memory."""
        return BatchUsage(
            useful_tokens=self._num_tokens,
            padded_tokens=self.execution.num_padded,
            kv_bytes_reserved=self.execution.reserved_bytes(),
            kv_bytes_used=self.num_kv_tokens() * self.kv_bytes_per_token,
        )
