"""Model runner without state of requests: runs a batch through the model and samples its next tokens.

m3's runner kept a record of every request, which each message changed. Here each batch is complete, sampling parameters
included, and block tables are read from the row of each request, so the runner stores nothing between two steps. The
model, its kernels, the KV storage and the sampler are m3's. SGLang: `model_executor/model_runner.py` and
`managers/tp_worker.py`.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from m1_single_request.model_loader import LoadedModel
from m1_single_request.sampler import Sampler
from m1_single_request.tracer import Tracer
from m3_paged_attention.attention.host_to_device import to_device
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.profiling import run_largest_step
from m3_paged_attention.row_sampler import RatedPrompt, RowSampler, rate_prompts
from m4_radix_cache.config import SchedulerConfig
from m4_radix_cache.forward_batch import ForwardBatch
from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.model_worker_batch import ModelWorkerBatch


class ModelRunner:
    """Runs a scheduled batch: prepare, forward, sample."""

    def __init__(
        self,
        *,
        loaded_model: LoadedModel,
        scheduler_config: SchedulerConfig,
        req_to_token_pool: ReqToTokenPool,
        sampler: Sampler,
        token_text: Callable[[int], str],
        tracer: Tracer,
    ) -> None:
        self.model = loaded_model.model
        self.device = loaded_model.device
        self.max_model_len = loaded_model.max_model_len
        assert scheduler_config.max_num_seqs is not None, "the configuration must be resolved"
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.req_to_token_pool = req_to_token_pool
        self.sampler = RowSampler(sampler=sampler, token_text=token_text, tracer=tracer)
        self.host_pool: HostKVPool | None = None

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Reserve the KV memory. Raises `ConfigError` if the machine has less."""
        self.page_size = kv_cache_config.spec.block_size
        self.kv = KVStorage(kv_cache_config, device=self.device)
        self.model.use_kv(self.kv)

    def use_host_memory(self, make_pool: Callable[[list[KVStorage]], HostKVPool]) -> HostKVPool:
        """Make the pool of the pages of this model, and let the forwards wait for what is loaded from it."""
        self.host_pool = make_pool([self.kv])
        return self.host_pool

    def profile_run(self, num_tokens: int) -> int:
        """Run the largest step once, on dummy data; return the bytes of the KV memory that existed during the run."""
        return run_largest_step(
            self.model,
            num_tokens,
            longest=self.max_model_len,
            num_rows=self.max_num_seqs,
            sampler=self.sampler.sampler,
            device=self.device,
        )

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Return the shape of a page of this model."""
        return self.model.kv_cache_spec(block_size)

    def execute_model(self, batch: ModelWorkerBatch) -> ModelRunnerOutput:
        """Run the new tokens of all requests through the model, and sample the next ones.

        An exception fails the requests of this step, and no other; `torch.AcceleratorError` means that the device is
        lost.
        """
        step = ForwardBatch.init_new(batch, self), batch.sampling_info.metadata()
        forward_batch, metadata = to_device(step, self.device)
        hidden = self.forward(forward_batch)
        last = hidden if forward_batch.logits_indices is None else hidden[forward_batch.logits_indices]
        of_prompts, errors = (
            rate_prompts(self._prompts_to_rate(batch, hidden), self.model.compute_logits)
            if batch.prompts_to_rate
            else ({}, {})
        )
        sampled, began = self.sampler.best(batch.rids, metadata, self.model, last), time.perf_counter()
        if sampled is None:
            logits = self.model.compute_logits(last)  # [batch_size, vocab]
            began = time.perf_counter()
            sampled = self.sampler(batch.rids, batch.sampling_info, logits, metadata)
        errors |= sampled.errors
        seconds = time.perf_counter() - began
        return replace(sampled, prompt_logprobs=of_prompts, errors=errors, sample_seconds=seconds)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the hidden states `[total_tokens, hidden_size]`. The only call of the model."""
        kv = self.kv if self.host_pool is None else self.host_pool.arriving(self.kv, batch.attn_metadata)
        return self.model.forward(batch.input_ids, batch.positions, kv, batch.attn_metadata)

    def free_request(self, request_id: str) -> None:
        """Do nothing: the runner stores no request."""

    def held_request_ids(self) -> list[str]:
        """Return the ids of stored requests: none."""
        return []

    def shutdown(self) -> None:
        """Release the KV memory and the model."""
        if self.host_pool is not None:
            self.host_pool.close()
            self.host_pool = None
        for name in ("kv", "model"):
            vars(self).pop(name, None)  # `close` may be called again

    def _prompts_to_rate(self, batch: ModelWorkerBatch, hidden: Tensor) -> Iterator[RatedPrompt]:
        """Yield the prompts of this step that request log-probabilities."""
        end = 0
        for rid, num_tokens in batch.num_scheduled_tokens.items():
            start, end = end, end + num_tokens
            if rid in batch.prompts_to_rate:
                yield RatedPrompt(rid, *batch.prompts_to_rate[rid], hidden[start:end])
