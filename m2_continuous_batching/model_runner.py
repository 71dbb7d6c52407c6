"""Tensors in, logits out, for a whole batch.

m1's runner took one request. This one takes all rows of a step and has two ways to run them, because the difference
between the two is the lesson: `per_request.py` runs them one after the other, `padded.py` all together. It counts what
each way wastes. m3 brings the project's own model, which needs no padding. vLLM: `v1/worker/gpu_model_runner.py`.
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
    """A way to run the rows of a batch, with the KV memory that goes with it."""

    num_padded: int
    """Padding in the last batch."""

    def execute(self, batch: InputBatch) -> dict[str, Tensor]: ...
    def free(self, request_id: str) -> None: ...
    def clear(self) -> None: ...
    def lengths(self) -> dict[str, int]: ...
    def reserved_bytes(self) -> int: ...


class ModelRunner:
    """Runs what the scheduler decided, and owns the KV of every request that has started."""

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
        """Run the new tokens of all rows; their keys and values stay in the requests' memory.

        Returns the logits of each row's last `num_logits` tokens by request id: float32 `[num_logits, vocab]`.
        """
        self._num_tokens = 0
        logits = self.execution.execute(input_batch)
        self._num_tokens = input_batch.num_tokens
        if self.tracer:
            usage = self.usage()
            self.tracer.emit(
                KVUsage(
                    useful_tokens=usage.useful_tokens,
                    padded_tokens=usage.padded_tokens,
                    kv_bytes_used=usage.kv_bytes_used,
                    kv_bytes_reserved=usage.kv_bytes_reserved,
                )
            )
        return logits

    def free_request_cache(self, request_id: str) -> None:
        """Release the KV of a request; one that never ran holds none."""
        self.execution.free(request_id)

    def clear_kv_caches(self) -> None:
        """Release the KV of all requests."""
        self.execution.clear()

    def held_request_ids(self) -> list[str]:
        """The requests whose KV is held."""
        return list(self.execution.lengths())

    def num_kv_tokens(self) -> int:
        """Tokens whose KV is held now."""
        return sum(self.execution.lengths().values())

    def usage(self) -> BatchUsage:
        """What the last batch did, and what stands in the KV memory now."""
        return BatchUsage(
            useful_tokens=self._num_tokens,
            padded_tokens=self.execution.num_padded,
            kv_bytes_reserved=self.execution.reserved_bytes(),
            kv_bytes_used=self.num_kv_tokens() * self.kv_bytes_per_token,
        )
