"""Prebuilt batch: a step without a forward, for prompts that another engine has computed, with their first tokens.

The batch is scheduled, executed and committed as any other, so that the stop checker, the cache and the trace get the
first token and the KV of the prompt as always. New in this milestone. SGLang: `prepare_for_prebuilt` and
`process_prebuilt` in `disaggregation/decode_schedule_batch_mixin.py`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from m1_single_request.sampler import SampledTokens
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.model_worker_batch import ForwardMode
from m4_radix_cache.request import Req
from m4_radix_cache.sampling_batch_info import SamplingBatchInfo
from m4_radix_cache.schedule_batch import Pools
from m5_chunked_prefill_spec.outputs import ModelRunnerOutput as StepOutput
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch


class PrebuiltBatch(ScheduleBatch):
    """A batch without new tokens: the rows of its requests hold the KV of their whole prompts."""

    def __init__(self, reqs: list[Req], pools: Pools, sampling_info: SamplingBatchInfo) -> None:
        super().__init__(reqs, pools)
        self.forward_mode, self.sampling_info, self.num_prompts = ForwardMode.PREBUILT, sampling_info, len(reqs)
        self.req_pool_indices = np.array([req.req_pool_idx for req in reqs], dtype=np.int64)
        self.seq_lens = np.array([len(req.fill_ids) for req in reqs], dtype=np.int64)
        self.new_lens = np.zeros(len(reqs), dtype=np.int64)
        self.output_ids = np.zeros(len(reqs), dtype=np.int64)


class PrebuiltExecutor:
    """An executor in front of another one; it returns the first tokens of a prebuilt batch itself."""

    def __init__(self, executor: Any, first_tokens: Mapping[str, SampledTokens]) -> None:
        """`first_tokens`: by request id, of all requests in prebuilt batches."""
        self.executor, self.worker, self.first_tokens = executor, executor.worker, first_tokens

    def execute_model(self, batch: Any) -> ModelRunnerOutput:
        """Run a batch; return the first tokens of a prebuilt one."""
        if batch.forward_mode is not ForwardMode.PREBUILT:
            output: ModelRunnerOutput = self.executor.execute_model(batch)
            return output
        first_tokens = [self.first_tokens[rid] for rid in batch.rids]
        return StepOutput(
            req_ids=list(batch.rids),
            sampled_token_ids=[list(first.token_ids) for first in first_tokens],
            logprobs=[list(first.logprobs) for first in first_tokens],
        )

    def shutdown(self) -> None:
        """Release the KV memory and the models."""
        self.executor.shutdown()
