"""Runs the model over a batch and samples: no token, one, or several for a request with accepted drafts.

m4's runner computed the logits of one token for each request. Here `sample_lens` gives their number: none for a piece
of a prompt, several for a request with drafts. A draft model, where there is one, makes its drafts before the target's
forward and completes its KV after it. SGLang: `EAGLEWorker.forward_batch_generation` around its `ModelRunner`; vLLM:
`v1/worker/gpu_model_runner.py`.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from m1_single_request.model_loader import LoadedModel
from m1_single_request.sampler import best_tokens
from m1_single_request.sampling_metadata import SamplingMetadata
from m3_paged_attention.attention.host_to_device import to_device
from m3_paged_attention.attention.metadata import AttentionMetadata
from m3_paged_attention.kv_cache_spec import KVCacheConfig, KVCacheSpec
from m3_paged_attention.kv_storage import KVStorage
from m3_paged_attention.profiling import run_largest_step
from m3_paged_attention.row_sampler import RatedPrompt, rate_prompts
from m4_radix_cache.mem_cache.host_kv_pool import HostKVPool
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m5_chunked_prefill_spec.config import SchedulerConfig
from m5_chunked_prefill_spec.cost_table import CostTable, measure, milliseconds, sizes_up_to
from m5_chunked_prefill_spec.forward_batch import ForwardBatch, nothing_in_page_0
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from m5_chunked_prefill_spec.outputs import ModelRunnerOutput
from m5_chunked_prefill_spec.speculative.draft_runner import DraftRunner
from m5_chunked_prefill_spec.speculative.rejection_sampler import RejectionSampler
from m5_chunked_prefill_spec.speculative.spec_info import Drafts
from m5_chunked_prefill_spec.speculative.verify_rows import metadata_of_rows

MAX_VERIFIED = 16
"""Number of tokens whose logits a measured step computes: few steps need more."""
HISTORY_BYTES = 4 + 1 + 4
"""Of a row of `SamplingBatchInfo`, per token of the vocabulary: bias, seen, output_counts."""


@dataclass(frozen=True, kw_only=True)
class SpecWithDraft(KVCacheSpec):
    """Shape of a page, with the draft model's KV of the same tokens."""

    draft_bytes_per_token: int

    @property
    def block_bytes(self) -> int:
        """Return the bytes of K and V of a page in all layers of both models."""
        return super().block_bytes + self.block_size * self.draft_bytes_per_token


class ModelRunner:
    """Runs a step of the scheduler: draft, prepare, forward, sample and verify."""

    released: ClassVar[tuple[str, ...]] = ("kv", "model")
    """Attributes that `shutdown` deletes."""

    def __init__(
        self,
        *,
        loaded_model: LoadedModel,
        scheduler_config: SchedulerConfig,
        req_to_token_pool: ReqToTokenPool,
        rejection_sampler: RejectionSampler,
        draft_runner: DraftRunner | None,
        num_draft_tokens: int,
    ) -> None:
        """`num_draft_tokens`: maximum number of drafts of a request in a step."""
        self.model = loaded_model.model
        self.device = loaded_model.device
        self.max_model_len = loaded_model.max_model_len
        assert scheduler_config.max_num_seqs is not None, "the configuration must be resolved"
        self.max_num_seqs = scheduler_config.max_num_seqs
        self.req_to_token_pool = req_to_token_pool
        self.draft_runner = draft_runner
        self.rejection_sampler = rejection_sampler
        self.num_draft_tokens = num_draft_tokens
        self.host_pool: HostKVPool | None = None

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Reserve the KV memory, and as many pages for the draft model. Raises `ConfigError` if there is too little."""
        self.page_size = kv_cache_config.spec.block_size
        self.kv = KVStorage(kv_cache_config, device=self.device)
        self.model.use_kv(self.kv)
        if self.draft_runner is not None:
            self.draft_runner.initialize_kv_cache(kv_cache_config.num_blocks, self.page_size)

    def use_host_memory(self, make_pool: Callable[[list[KVStorage]], HostKVPool]) -> HostKVPool:
        """Make the pool of the pages of both models, as in m4; the draft model reads its KV first."""
        storages = [self.kv] if self.draft_runner is None else [self.draft_runner.kv, self.kv]
        self.host_pool = make_pool(storages)
        return self.host_pool

    def arrived_kv(self, metadata: AttentionMetadata) -> Any:
        """Return the KV memory for a forward, which waits for what is loaded from the host."""
        return self.kv if self.host_pool is None else self.host_pool.arriving(self.kv, metadata)

    def profile_run(self, num_tokens: int) -> int:
        """Run the largest step once, on placeholder tokens; return the bytes of its temporary KV memory.

        Each request has as many drafts as it may, and a row of logits behind each. The step runs beside the tensors of
        `SamplingBatchInfo`, from which the rows are copied, and what the draft model drew its drafts from.
        """
        num_drafts = self.max_num_seqs * self.num_draft_tokens
        vocab_size = self.model.config.vocab_size
        _history = torch.empty(self.max_num_seqs, vocab_size, HISTORY_BYTES, dtype=torch.uint8, device=self.device)
        _drawn_from = torch.empty(num_drafts if self.draft_runner else 0, vocab_size, device=self.device)
        return run_largest_step(
            self.model,
            num_tokens,
            longest=self.max_model_len,
            num_rows=self.max_num_seqs + num_drafts,
            sampler=self.rejection_sampler.sampler,
            device=self.device,
        )

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """Return the shape of a page of this model, with the bytes of the draft model's KV."""
        spec = self.model.kv_cache_spec(block_size)
        if self.draft_runner is None:
            return spec
        return SpecWithDraft(**vars(spec), draft_bytes_per_token=self.draft_runner.model.kv_cache_spec(1).block_bytes)

    @torch.inference_mode()
    def measure_costs(self, most: int) -> CostTable:
        """Measure the costs of steps of up to `most` new tokens. The steps write to page 0, which no request reads."""
        context = max(min(1024, self.max_model_len // 2), 1)
        return measure(self._cost_of, sizes_up_to(most), context=context)

    def _cost_of(self, num_tokens: int, context: int) -> float:
        # A request has at most the model's length, so a large step is several equal ones, a few tokens more in all.
        num_rows = -(-num_tokens // (self.max_model_len - context))
        tokens = nothing_in_page_0(num_rows, -(-num_tokens // num_rows), context, self.page_size)
        # many different tokens: with experts, equal ones would all read the same few
        tokens.input_ids[:] = np.random.default_rng(0).integers(
            self.model.config.vocab_size, size=len(tokens.input_ids)
        )

        def run() -> None:
            forward_batch = to_device(ForwardBatch.init_new(tokens, self), self.device)
            best_tokens(self.model.compute_logits(self.forward(forward_batch)[-MAX_VERIFIED:])).tolist()

        return milliseconds(run)

    def execute_model(self, batch: ModelWorkerBatch) -> ModelRunnerOutput:
        """Run the new tokens of all requests through the model, and sample the next ones.

        An exception fails the requests of this step, and no other; `torch.AcceleratorError` means that the device is
        lost.
        """
        batch, drafts = self.drafted(batch)
        forward_batch = to_device(self.prepare(batch, drafts), self.device)
        return self.sample(batch, forward_batch, self.forward(forward_batch), drafts)

    def sample(
        self, batch: ModelWorkerBatch, forward_batch: ForwardBatch, hidden: Tensor, drafts: Drafts | None = None
    ) -> ModelRunnerOutput:
        """Sample from the hidden states of a forward, and verify its drafts."""
        last = hidden if forward_batch.logits_indices is None else hidden[forward_batch.logits_indices]
        began = time.perf_counter()
        prompt_rows, errors = (
            rate_prompts(self._prompts_to_rate(batch, hidden, forward_batch.starts), self.model.compute_logits)
            if batch.prompts_to_rate
            else ({}, {})
        )
        if not any(batch.sample_lens):  # the step is one piece of a prompt
            return ModelRunnerOutput([], [], [], prompt_logprobs=prompt_rows, errors=errors)
        info, rows = batch.sampling_info, forward_batch.sampling
        assert rows is not None
        sampled = None
        is_own = type(self.rejection_sampler) is RejectionSampler
        if is_own and drafts is None and last.shape[0] == len(batch.rids):
            sampled = self.rejection_sampler.one_each.best(batch.rids, rows, self.model, last)
        if sampled is None:
            logits = self.model.compute_logits(last)  # [sum(sample_lens), vocab]
            sampled = self.rejection_sampler(batch.rids, info, logits, rows, batch.sample_lens, drafts)
        sample_seconds = time.perf_counter() - began
        if self.draft_runner is not None:
            accepted = dict(zip(sampled.req_ids, sampled.sampled_token_ids, strict=True))
            self.draft_runner.follow(batch, drafts, [len(accepted.get(rid, [0])) - 1 for rid in batch.rids])
        return ModelRunnerOutput(
            req_ids=sampled.req_ids,
            sampled_token_ids=sampled.sampled_token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_rows,
            errors={**errors, **sampled.errors},
            sample_seconds=sample_seconds,
            draft_token_ids=dict(zip(batch.rids, drafts.token_ids, strict=True)) if drafts else {},
        )

    def prepare(self, batch: ModelWorkerBatch, drafts: Drafts | None) -> ForwardBatch:
        """Return the tensors of a step: those that are new in it on the host, so that one copy moves them."""
        return ForwardBatch.init_new(batch, self, sampling_of(batch, drafts))

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Return the hidden states `[total_tokens, hidden_size]`. The only call of the model."""
        kv = self.arrived_kv(batch.attn_metadata)
        return self.model.forward(batch.input_ids, batch.positions, kv, batch.attn_metadata)

    def free_request(self, request_id: str) -> None:
        """Do nothing: this runner stores nothing by request."""

    def held_request_ids(self) -> list[str]:
        """Return an empty list: this runner stores nothing by request."""
        return []

    def shutdown(self) -> None:
        """Release the KV memory and the models."""
        if self.host_pool is not None:
            self.host_pool.close()
            self.host_pool = None
        for name in self.released:
            vars(self).pop(name, None)  # `close` may be called again
        if self.draft_runner is not None:
            self.draft_runner.shutdown()

    def drafted(self, batch: ModelWorkerBatch) -> tuple[ModelWorkerBatch, Drafts | None]:
        """Return the step with its drafts, and the drafts: the proposer's, or the draft model's."""
        if self.draft_runner is None:
            return batch, None if batch.spec_info is None else Drafts(batch.spec_info.draft_token_ids, None)
        if self.host_pool is not None:
            self.host_pool.wait(self.draft_runner.kv)
        drafts = self.draft_runner.propose(batch)
        return batch if drafts is None else batch.with_drafts(drafts.token_ids), drafts

    def _prompts_to_rate(self, batch: ModelWorkerBatch, hidden: Tensor, starts: np.ndarray) -> Iterator[RatedPrompt]:
        """Yield the prompts of this step that request log-probabilities."""
        for place, rid in enumerate(batch.rids):
            if rid in batch.prompts_to_rate:
                start, num_tokens = int(starts[place]), int(batch.new_lens[place])
                yield RatedPrompt(rid, *batch.prompts_to_rate[rid], hidden[start : start + num_tokens])


def sampling_of(batch: ModelWorkerBatch, drafts: Drafts | None) -> SamplingMetadata | None:
    """Return the rows of a step whose tokens are sampled: one for each request, or one more than it has drafts.

    None: the step is one piece of a prompt.
    """
    if drafts is None and all([count == 1 for count in batch.sample_lens]):
        return batch.sampling_info.metadata()
    if not any(batch.sample_lens):
        return None
    token_ids = [[] for _ in batch.rids] if drafts is None else drafts.token_ids
    return metadata_of_rows(batch.sampling_info, batch.sample_lens, token_ids)
