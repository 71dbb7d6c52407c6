"""Model runner: run the model on one step's tokens and return logits. Only this part uses the model and the KV cache.

The model is transformers' own, with one `DynamicCache` per request: after the prefill it holds the keys and values
of the whole prompt, and each decode step appends those of one token. m2 batches requests; m3 adds the project's own
model and a KV cache in blocks. vLLM: `v1/worker/gpu_model_runner.py`; SGLang: `model_executor/model_runner.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from m1_single_request.events import Alloc, Free
from m1_single_request.model_loader import LoadedModel
from m1_single_request.scheduler import SchedulerOutput
from m1_single_request.tracer import Tracer


@dataclass(frozen=True)
class ModelInputs:
    """One step's tensors, with the request and the counts to run them."""

    request_id: str
    input_ids: Tensor  # int64 [1, new tokens]
    positions: Tensor  # int64 [1, new tokens]
    num_computed_tokens: int
    num_logits: int


class ModelRunner:
    """Runs the scheduler's output, and owns the KV cache of every started request."""

    def __init__(self, *, loaded_model: LoadedModel, tracer: Tracer) -> None:
        self.model, self.device = loaded_model.model, loaded_model.device
        self.kv_bytes_per_token = loaded_model.kv_bytes_per_token
        self.tracer = tracer
        self.request_caches: dict[str, DynamicCache] = {}

    def prepare_inputs(self, scheduler_output: SchedulerOutput) -> ModelInputs:
        """Convert the scheduler's output to tensors on the model's device."""
        start, new = scheduler_output.start_position, scheduler_output.token_ids
        return ModelInputs(
            request_id=scheduler_output.request_id,
            input_ids=torch.tensor([new], device=self.device),
            positions=torch.arange(start, start + len(new), device=self.device)[None],
            num_computed_tokens=start,
            num_logits=len(new) if scheduler_output.wants_prompt_logits else 1,
        )

    @torch.inference_mode()
    def execute_model(self, inputs: ModelInputs) -> dict[str, Tensor]:
        """Run the new tokens through the model, and append their keys and values to the request's cache.

        Returns the logits of the last `num_logits` new tokens by request id: float32 `[num_logits, vocab]`. An
        exception fails only this step, except `torch.AcceleratorError`: then the device is lost.
        """
        if inputs.num_computed_tokens == 0:  # keeps every token, also in layers with a sliding window
            self.request_caches[inputs.request_id] = DynamicCache()
        cache = self.request_caches[inputs.request_id]
        output = self.model(
            input_ids=inputs.input_ids,
            position_ids=inputs.positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=inputs.num_logits,
        )
        logits = output.logits[0].float()
        num_new = inputs.input_ids.shape[1]
        total = inputs.num_computed_tokens + num_new
        num_bytes = total * self.kv_bytes_per_token
        self.tracer.emit(Alloc, owner=inputs.request_id, tokens=num_new, total_tokens=total, total_bytes=num_bytes)
        return {inputs.request_id: logits}

    def free_request_cache(self, request_id: str) -> None:
        """Free the KV of a request; does nothing for a request that never started."""
        cache = self.request_caches.pop(request_id, None)
        if cache is not None:
            tokens = cache.get_seq_length()
            self.tracer.emit(Free, owner=request_id, tokens=tokens, bytes=tokens * self.kv_bytes_per_token)

    def clear_kv_caches(self) -> None:
        """Free the KV of all requests."""
        self.request_caches.clear()

    def num_kv_tokens(self) -> int:
        """Return the number of tokens in all KV caches."""
        return sum(cache.get_seq_length() for cache in self.request_caches.values())
