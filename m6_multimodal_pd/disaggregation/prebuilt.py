"""A step that is not run: another engine has computed these prompts, and the first token of each.

Its batch goes the way of any batch - decided, executed, committed - so that everything that looks at batches sees it:
the stop checker at the first token, the tree at the prompt's KV, the trace. Only the model does not. New in this
milestone. SGLang: `prepare_for_prebuilt` and `process_prebuilt` in `disaggregation/decode_schedule_batch_mixin.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from m1_single_request.sampler import LogprobRow
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.model_worker_batch import ForwardMode
from m5_chunked_prefill_spec.outputs import ModelRunnerOutput as StepOutput


@dataclass(frozen=True)
class FirstToken:
    """What came with a prompt's KV."""

    token_id: int
    logprobs: LogprobRow | None


class PrebuiltExecutor:
    """An executor before another one: a prebuilt step is answered here, with what came."""

    def __init__(self, executor: Any, first_tokens: Mapping[str, FirstToken]) -> None:
        """`first_tokens`: by request id, of all requests that will be in such a step."""
        self.executor, self.worker, self.first_tokens = executor, executor.worker, first_tokens

    def execute_model(self, batch: Any) -> ModelRunnerOutput:
        """Run a step; or say of a prebuilt one what is known."""
        if batch.forward_mode is not ForwardMode.PREBUILT:
            output: ModelRunnerOutput = self.executor.execute_model(batch)
            return output
        came = [self.first_tokens[rid] for rid in batch.rids]
        return StepOutput(
            req_ids=list(batch.rids),
            sampled_token_ids=[[first.token_id] for first in came],
            logprobs=[[first.logprobs] for first in came],
        )

    def shutdown(self) -> None:
        """Let go of the KV memory and the models."""
        self.executor.shutdown()
