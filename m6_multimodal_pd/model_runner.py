"""Tensors in, tokens out, with a vision tower in front.

m5's runner, which prepares a step in one place and calls the model in one place: in the first, the encoder is asked for
the embeddings of the pictures that are in the step; in the second they are handed over. Of a request one number is
kept, by its row: by how much its positions exceed its places. SGLang: `ModelRunner` with `general_mm_embed_routine`;
vLLM: `v1/worker/gpu_model_runner.py`.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m1_single_request.errors import ConfigError
from m3_paged_attention.step_threads import StepThreads
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m5_chunked_prefill_spec.config import SchedulerConfig
from m5_chunked_prefill_spec.forward_batch import ForwardBatch as TextForwardBatch
from m5_chunked_prefill_spec.model_runner import ModelRunner as TextModelRunner
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch
from m5_chunked_prefill_spec.speculative.draft_runner import DraftRunner
from m5_chunked_prefill_spec.speculative.rejection_sampler import RejectionSampler
from m6_multimodal_pd.forward_batch import ForwardBatch, PromptPiece, prompts_with_pictures, seen_in
from m6_multimodal_pd.model_loader import LoadedModel
from m6_multimodal_pd.models.qwen3_vl import Qwen3VLDecoder
from m6_multimodal_pd.models.vision import Grid, VisionTower
from m6_multimodal_pd.multimodal.encoder import Encoder


class ModelRunner(TextModelRunner):
    """m5's, for prompts with pictures."""

    released = ("kv", "model", "encoder")

    def __init__(
        self,
        *,
        loaded_model: LoadedModel,
        scheduler_config: SchedulerConfig,
        req_to_token_pool: ReqToTokenPool,
        rejection_sampler: RejectionSampler,
        draft_runner: DraftRunner | None,
        encoder: Encoder,
        step_threads: StepThreads | None = None,
    ) -> None:
        super().__init__(
            loaded_model=loaded_model,
            scheduler_config=scheduler_config,
            req_to_token_pool=req_to_token_pool,
            rejection_sampler=rejection_sampler,
            draft_runner=draft_runner,
        )
        self.encoder, self.step_threads = encoder, step_threads
        self.sees = encoder.tower is not None
        self.mrope_deltas = np.zeros(0, dtype=np.int64)  # by row, as many as the pool has made so far

    def prepare(self, batch: ModelWorkerBatch) -> Any:
        """A step as tensors; pictures that are in it and not encoded yet are encoded now."""
        text = TextForwardBatch.init_new(batch, self)
        if not self.sees:
            return text
        prompts = self.adopt(batch)
        rows = batch.req_pool_indices
        seen = seen_in(prompts, batch.rids)
        with all_threads(self.step_threads) if self.step_threads and seen else nullcontext():  # the tower is torch's
            embeddings = self.encoder.embed(seen) if seen else []
        return ForwardBatch.init_new(text, batch, self.mrope_deltas[rows], prompts, seen, embeddings)

    def adopt(self, batch: ModelWorkerBatch) -> list[PromptPiece]:
        """Note, by row, how the positions of a step's prompts exceed their places. Returns those with pictures.

        Enough for prompts that another engine has computed (see `disaggregation/`).
        """
        rows, num_rows = batch.req_pool_indices, len(self.req_to_token_pool.lens)
        if len(self.mrope_deltas) < num_rows:
            self.mrope_deltas = np.resize(self.mrope_deltas, num_rows)  # a new row is written before it is read
        prompts = prompts_with_pictures(batch)
        self.mrope_deltas[rows[: batch.num_prompts]] = 0
        for prompt in prompts:
            self.mrope_deltas[rows[prompt.row]] = prompt.inputs.mrope_position_delta
        return prompts

    def forward(self, batch: Any) -> Tensor:
        """Hidden states `[total_tokens, hidden_size]`. The one place where the model is called."""
        if isinstance(batch, TextForwardBatch):
            return super().forward(batch)
        assert isinstance(self.model, Qwen3VLDecoder)
        return self.model.forward(batch.input_ids, batch.positions, self.kv, batch.attn_metadata, batch.visual)

    def profile_run(self, num_tokens: int) -> int:
        """Run the largest step once, on nothing, and the tower on as much as a step may encode.

        Both beside a full embedding cache; the model beside the embeddings of the step, and the tower beside as much KV
        memory as the model had, because that is what the caller takes off.
        """
        tower, cache_bytes = self.encoder.tower, self.encoder.cache.capacity_bytes
        if tower is None:
            return super().profile_run(num_tokens)
        budget = min(self.encoder.budget, cache_bytes // tower.bytes_per_token)  # what is encoded must fit there, too
        try:
            _kept = torch.empty(cache_bytes, dtype=torch.uint8, device=self.device)
            made = torch.empty(budget, tower.width, dtype=tower.dtype, device=self.device)
            kv_bytes = super().profile_run(num_tokens)
            del made
            _kv = torch.empty(kv_bytes, dtype=torch.uint8, device=self.device)
            tower.encode([blank(tower, budget)])
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of {num_tokens:,} tokens, embedding_cache_bytes={cache_bytes} and "
                f"encoder_budget={self.encoder.budget} do not fit together: use smaller ones"
            ) from error
        return kv_bytes


def blank(tower: VisionTower, num_tokens: int) -> tuple[Tensor, Grid]:
    """A square image of about so many tokens, with nothing in it."""
    side = max(math.isqrt(num_tokens), 1) * tower.merge_size
    return torch.zeros(side * side, tower.patch_dim), (1, side, side)


@contextmanager
def all_threads(step_threads: StepThreads) -> Iterator[None]:
    """Restore the caller's number of threads inside a step, for matrix products of torch.

    The last bits of such a product depend on the number of threads.
    """
    lowered = step_threads.lowered
    if lowered is None:
        yield
        return
    torch.set_num_threads(lowered[0])
    try:
        yield
    finally:
        torch.set_num_threads(lowered[1])
