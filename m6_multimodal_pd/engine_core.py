"""m4's engine core with a vision encoder, whose embeddings outlive requests.

The step is m4's; a batch may have images in it. The weights can be exchanged between requests, and steps be profiled.
SGLang: `SchedulerUpdateWeightsMixin` and `SchedulerProfilerMixin`; vLLM: `reload_weights` and `start_profile` of its
workers.
"""

from collections.abc import Mapping
from typing import Any

from m1_single_request.errors import EngineDeadError, EngineUsageError
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.outputs import RequestOutput
from m1_single_request.request import FinishAbort, Request
from m1_single_request.tracer import Tracer
from m3_paged_attention.executor import GPUExecutor
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.engine_core import EngineCore as RadixEngineCore
from m4_radix_cache.mem_cache.disk_radix_cache import DiskRadixCache
from m4_radix_cache.model_worker_batch import ModelWorkerBatch as PlainModelWorkerBatch
from m4_radix_cache.scheduler import Scheduler
from m6_multimodal_pd.input_processor import InputProcessor, children_of
from m6_multimodal_pd.model_worker_batch import ModelWorkerBatch
from m6_multimodal_pd.multimodal.encoder import Encoder
from m6_multimodal_pd.multimodal.media_intake import MediaIntake
from m6_multimodal_pd.outputs import EngineStats
from m6_multimodal_pd.step_profiler import StepProfiler
from m6_multimodal_pd.weight_loader import WeightLoader, check_loader


class EngineCore(RadixEngineCore):
    """Engine core of a model with a vision encoder.

    `add_request` traces the images of a request, and `_execute` adds those of a step to its batch; `run_step` first
    queues the requests whose images were read. `clear_kv_caches` and `close` also clear the embedding cache; `close`
    also ends a profile, and the processes that read images. `stats` and `run_step` add the totals of the encoder.
    """

    def __init__(
        self,
        *,
        input_processor: InputProcessor,
        scheduler: Scheduler,
        executor: GPUExecutor,
        output_processor: OutputProcessor,
        kv_bytes_per_token: int,
        parts: Mapping[str, Any],
        tracer: Tracer,
        encoder: Encoder,
        weight_loader: WeightLoader,
    ) -> None:
        super().__init__(
            input_processor=input_processor,
            scheduler=scheduler,
            executor=executor,
            output_processor=output_processor,
            kv_bytes_per_token=kv_bytes_per_token,
            parts=parts,
            tracer=tracer,
        )
        self._intake = self.families = self.media_intake = MediaIntake(
            scheduler=scheduler, tracer=tracer, input_processor=input_processor
        )
        self.encoder, self.weight_loader, self.profiler = encoder, weight_loader, StepProfiler()
        self._encoder_totals = encoder.totals  # up to the last finished step

    def add_request(self, request: Request) -> None:
        """Queue a checked request, and trace its images; it runs in later steps, after its images are read."""
        super().add_request(request)
        for child in children_of(request):
            if child.multimodal_inputs is not None:
                child.multimodal_inputs.trace_arrival(child.request_id, self.tracer)

    def update_weights(self, model: str) -> None:
        """Forget all KV and load other weights. Raises `EngineUsageError` while requests are unfinished, and the errors
        of `WeightLoader`: those of its check change nothing, and after `EngineDeadError` the engine is dead."""
        if self.has_unfinished_requests():
            raise EngineUsageError("weights are exchanged between requests, and some are unfinished")
        check_loader(self._parts)
        checkpoint = self.weight_loader.check(model)
        with self.changing():
            try:
                self.weight_loader.load(checkpoint, self._forget_kv)
            except EngineDeadError as error:
                self.dead = error
                raise

    def _forget_kv(self, model: str) -> None:
        """Forget the KV of the weights of before; the pages on a disk are those of `model` from now on. An error of the
        directory comes while nothing has changed."""
        cache = self.scheduler.tree_cache
        disk = cache.open_disk(model) if isinstance(cache, DiskRadixCache) else None
        self._forget_all(FinishAbort())
        if isinstance(cache, DiskRadixCache) and disk is not None:
            cache.disk.close()
            cache.disk = disk

    def close(self) -> None:
        """Stop a profile that is being recorded, and close as in m4."""
        self.profiler.drop()
        try:
            super().close()
        finally:
            self.media_intake.close()
            self.encoder.close()

    def clear_kv_caches(self) -> None:
        """Remove all embeddings; the scheduler has freed the KV."""
        self.encoder.clear()

    def stats(self) -> EngineStats:
        """Return the totals up to the last finished step, and the state of both caches."""
        totals = vars(super().stats()) | self._encoder_totals
        totals["num_waiting"] += len(self.media_intake.reading)
        return EngineStats(**totals, embedding_cache_bytes=self.encoder.cache.used_bytes)

    def _execute(self, batch: PlainModelWorkerBatch) -> ModelRunnerOutput:
        """Run a batch, with the images of its requests."""
        return super()._execute(self.with_images(batch))

    def with_images(self, batch: PlainModelWorkerBatch) -> PlainModelWorkerBatch:
        """Return a batch with the images of its requests."""
        requests: Any = self.scheduler.requests
        inputs = [requests[rid].multimodal_inputs for rid in batch.rids]
        return ModelWorkerBatch(**vars(batch), multimodal_inputs=inputs) if any(inputs) else batch

    def run_step(self) -> dict[str, RequestOutput]:
        """Queue the requests whose images were read, run one step, and add it to the totals. While all requests wait
        for images there is no step."""
        intake = self.media_intake
        if intake.reading and self.dead is None and not intake.begin_step(self.add_request):
            return {}
        outputs = super().run_step()
        self._encoder_totals = self.encoder.totals
        return outputs
