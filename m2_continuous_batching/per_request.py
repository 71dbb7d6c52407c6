"""Per-request execution: run the rows of a batch one after the other. Correct, simple, and no faster than m1.

Each request has its own KV cache, as in m1, whose runner is used. There is no padding, and no KV memory is reserved
without use. But every row launches all operations and reads all weights again.
"""

from torch import Tensor

from m1_single_request.model_loader import LoadedModel
from m1_single_request.model_runner import ModelInputs, ModelRunner as SingleRequestRunner
from m1_single_request.tracer import Tracer
from m2_continuous_batching.input_batch import InputBatch


class PerRequestExecution:
    """Runs one forward per row."""

    num_padded = 0

    def __init__(self, *, loaded_model: LoadedModel, tracer: Tracer) -> None:
        self.runner = SingleRequestRunner(loaded_model=loaded_model, tracer=tracer)

    def execute(self, batch: InputBatch) -> dict[str, Tensor]:
        """Run all rows, and return the logits by request id: float32 `[num_logits, vocab]`."""
        logits: dict[str, Tensor] = {}
        for row, request_id in enumerate(batch.req_ids):
            token_ids, _, positions = batch.select([row]).to_tensors(self.runner.device)
            inputs = ModelInputs(
                request_id=request_id,
                input_ids=token_ids,
                positions=positions,
                num_computed_tokens=batch.start_positions[row],
                num_logits=batch.num_logits[row],
            )
            logits |= self.runner.execute_model(inputs)
        return logits

    def free(self, request_id: str) -> None:
        """Free the KV of a request."""
        self.runner.free_request_cache(request_id)

    def clear(self) -> None:
        """Release the KV of all requests."""
        self.runner.clear_kv_caches()

    def lengths(self) -> dict[str, int]:
        """Return the number of tokens with KV by request id."""
        return {request_id: cache.get_seq_length() for request_id, cache in self.runner.request_caches.items()}

    def reserved_bytes(self) -> int:
        """Return the bytes of all requests' KV; each cache grows with its request, so all of it is in use."""
        return sum(self.lengths().values()) * self.runner.kv_bytes_per_token
