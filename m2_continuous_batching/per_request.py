"""A batch run one request at a time: correct, simple, and no faster than m1.

Each request has its own `past_key_values`, exactly as in m1, whose runner does the work. Nothing is padded and no KV is
reserved in vain; but each row launches all operations and reads all weights for itself.
"""

from torch import Tensor

from m1_single_request.model_loader import LoadedModel
from m1_single_request.model_runner import ModelInputs, ModelRunner as SingleRequestRunner
from m1_single_request.tracer import Tracer
from m2_continuous_batching.input_batch import InputBatch


class PerRequestExecution:
    """A forward for each row."""

    num_padded = 0

    def __init__(self, *, loaded_model: LoadedModel, tracer: Tracer) -> None:
        self.runner = SingleRequestRunner(loaded_model=loaded_model, tracer=tracer)

    def execute(self, batch: InputBatch) -> dict[str, Tensor]:
        """Logits by request id."""
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
        """Release the KV of a request."""
        self.runner.free_request_cache(request_id)

    def clear(self) -> None:
        """Release the KV of all requests."""
        self.runner.clear_kv_caches()

    def lengths(self) -> dict[str, int]:
        """Tokens held, by request id."""
        return {request_id: cache.get_seq_length() for request_id, cache in self.runner.request_caches.items()}

    def reserved_bytes(self) -> int:
        """A cache of its own grows with its request: what is taken is what is used."""
        return sum(self.lengths().values()) * self.runner.kv_bytes_per_token
