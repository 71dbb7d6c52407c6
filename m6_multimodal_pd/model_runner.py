"""Model runner with a vision encoder and CUDA graphs: tensors in, tokens out.

m5's runner, which prepares a step in one method and calls the model in another. The first also asks the encoder for the
embeddings of the images in the step, the second passes them to the model. A captured step belongs to its KV memory
(`KVStorage.step`): it is captured here, when that memory is reserved. SGLang: `ModelRunner` with
`general_mm_embed_routine`; vLLM: `v1/worker/gpu_model_runner.py`.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from m1_single_request.errors import ConfigError
from m3_paged_attention.kv_cache_spec import KVCacheConfig
from m3_paged_attention.step_threads import StepThreads
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m5_chunked_prefill_spec.config import SchedulerConfig
from m5_chunked_prefill_spec.forward_batch import ForwardBatch as TextForwardBatch
from m5_chunked_prefill_spec.model_runner import ModelRunner as TextModelRunner
from m5_chunked_prefill_spec.model_worker_batch import ModelWorkerBatch as TextModelWorkerBatch
from m5_chunked_prefill_spec.speculative.draft_runner import DraftRunner
from m5_chunked_prefill_spec.speculative.rejection_sampler import RejectionSampler
from m5_chunked_prefill_spec.speculative.spec_info import Drafts
from m6_multimodal_pd.forward_batch import ForwardBatch, slices_of
from m6_multimodal_pd.graph_runner import GraphCapture, GraphLimits
from m6_multimodal_pd.model_loader import LoadedModel
from m6_multimodal_pd.model_worker_batch import ModelWorkerBatch
from m6_multimodal_pd.models.qwen3_vl import Qwen3VLDecoder
from m6_multimodal_pd.models.vision import VisionTower
from m6_multimodal_pd.models.vision_network import Grid
from m6_multimodal_pd.multimodal.encoder import Encoder


class ModelRunner(TextModelRunner):
    """m5's runner, for steps with images, and with graphs for steps of few tokens.

    `prepare` also encodes images, `forward` also passes their embeddings to the model, and `profile_run` also measures
    the vision tower and the graphs. `initialize_kv_cache` also captures the graphs.
    """

    released = ("kv", "model", "encoder")

    def __init__(
        self,
        *,
        loaded_model: LoadedModel,
        scheduler_config: SchedulerConfig,
        req_to_token_pool: ReqToTokenPool,
        rejection_sampler: RejectionSampler,
        draft_runner: DraftRunner | None,
        num_draft_tokens: int,
        encoder: Encoder,
        step_threads: StepThreads | None,
        graph_capture: GraphCapture | None,
    ) -> None:
        """`graph_capture`: None if all steps run eagerly."""
        super().__init__(
            loaded_model=loaded_model,
            scheduler_config=scheduler_config,
            req_to_token_pool=req_to_token_pool,
            rejection_sampler=rejection_sampler,
            draft_runner=draft_runner,
            num_draft_tokens=num_draft_tokens,
        )
        self.encoder, self.step_threads, self.graph_capture = encoder, step_threads, graph_capture

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Reserve the KV memory as in m5, then capture the graphs of both models."""
        super().initialize_kv_cache(kv_cache_config)
        self.capture_graphs()

    def capture_graphs(self) -> None:
        """Capture the graphs of both models, if the engine is to have any."""
        if self.graph_capture is not None:
            for name, runner, limits in self._captured():
                self.graph_capture.capture(name, runner.model, runner.kv, limits)

    def prepare(self, batch: TextModelWorkerBatch, drafts: Drafts | None) -> TextForwardBatch:
        """Return a step as tensors, as in m5; images in it that are not encoded yet are encoded now."""
        text = super().prepare(batch, drafts)
        if not isinstance(batch, ModelWorkerBatch):
            return text
        slices = slices_of(batch)
        embeddings: list[Tensor] = []
        if slices:
            with all_threads(self.step_threads):  # the tower is torch's
                embeddings = self.encoder.embed(slices)
        return ForwardBatch.with_images(text, batch, slices, embeddings)

    def forward(self, batch: TextForwardBatch) -> Tensor:
        """Return hidden states `[total_tokens, hidden_size]`. The model is called nowhere else."""
        if not isinstance(batch, ForwardBatch):
            return super().forward(batch)
        assert isinstance(self.model, Qwen3VLDecoder)
        kv = self.arrived_kv(batch.attn_metadata)
        return self.model.forward(batch.input_ids, batch.positions, kv, batch.attn_metadata, batch.visual)

    def profile_run(self, num_tokens: int) -> int:
        """Run the largest step once on zeros, and the vision tower on as much as a step may encode.

        Both run beside a full embedding cache; the model beside the embeddings of the step, and the tower beside as
        much KV memory as the model had. All run beside as much memory as the graphs take. Returns the bytes of that KV
        memory.
        """
        _graphs = torch.empty(self._graph_bytes(), dtype=torch.uint8, device=self.device)
        tower, cache_bytes = self.encoder.tower, self.encoder.cache.capacity_bytes
        if tower is None:
            return super().profile_run(num_tokens)
        budget = min(self.encoder.budget, cache_bytes // tower.bytes_per_token)  # what is encoded must fit there, too
        try:
            _kept = torch.empty(cache_bytes, dtype=torch.uint8, device=self.device)
            embeddings = torch.empty(budget, tower.width, dtype=tower.dtype, device=self.device)
            kv_bytes = super().profile_run(num_tokens)
            del embeddings
            _kv = torch.empty(kv_bytes, dtype=torch.uint8, device=self.device)
            tower.encode([blank(tower, budget)])
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of {num_tokens:,} tokens, embedding_cache_bytes={cache_bytes} and "
                f"encoder_budget={self.encoder.budget} do not fit together: use smaller ones"
            ) from error
        return kv_bytes

    def _captured(self) -> Iterator[tuple[str, TextModelRunner | DraftRunner, GraphLimits]]:
        """Yield each model whose steps are captured: its name, the runner that has it, and its largest step."""
        limits = partial(GraphLimits, max_num_seqs=self.max_num_seqs, max_model_len=self.max_model_len)
        yield "target", self, limits(width=1 + self.num_draft_tokens)
        if self.draft_runner is not None:
            yield "draft", self.draft_runner, limits(width=1)

    def _graph_bytes(self) -> int:
        """Measure the memory of the graphs of both models."""
        if self.graph_capture is None:
            return 0
        return sum(self.graph_capture.measure(runner.model, limits) for _, runner, limits in self._captured())


def blank(tower: VisionTower, num_tokens: int) -> tuple[Tensor, Grid]:
    """Return a square image of zeros of about `num_tokens` tokens."""
    side = max(math.isqrt(num_tokens), 1) * tower.merge_size
    return torch.zeros(side * side, tower.patch_dim), (1, side, side)


def all_threads(step_threads: StepThreads | None) -> ExitStack:
    """Restore the caller's number of threads inside a step, until the returned context ends.

    For matrix products of torch, whose last bits depend on the number of threads.
    """
    after = ExitStack()
    lowered = None if step_threads is None else step_threads.lowered
    if lowered is not None:
        torch.set_num_threads(lowered[0])
        after.callback(torch.set_num_threads, lowered[1])
    return after
