"""m4's engine core with an encoder, whose embeddings outlive requests; weights can be exchanged and steps profiled.

The step is m4's. SGLang: `SchedulerUpdateWeightsMixin` and `SchedulerProfilerMixin`; vLLM:
`reload_weights` and `start_profile` of its workers.
"""

from typing import Any

from m1_single_request.errors import EngineUsageError
from m1_single_request.outputs import RequestOutput
from m1_single_request.request import FinishAbort
from m4_radix_cache.engine_core import EngineCore as RadixEngineCore
from m6_multimodal_pd.multimodal.encoder import Encoder
from m6_multimodal_pd.operations import Operations
from m6_multimodal_pd.outputs import EngineStats


class EngineCore(RadixEngineCore):
    """Engine core whose model sees pictures: `clear_kv_caches` and `close` also clear the encoder's cache, and `stats`
    and `run_step` add its totals. `close` also ends the profile."""

    def __init__(self, *, encoder: Encoder, operations: Operations, **others: Any) -> None:
        """`others`: as m4's."""
        super().__init__(**others)
        self.encoder, self.operations = encoder, operations
        self._encoder_counters = encoder.counters()  # up to the last finished step

    def update_weights(self, model: str) -> None:
        """Load other weights and forget all KV. Raises `EngineUsageError` while requests are unfinished."""
        if self.has_unfinished_requests():
            raise EngineUsageError("weights are exchanged between requests, and some are unfinished")
        with self.changing():
            self.operations.update_weights(model)
            self._forget_all(FinishAbort())

    def close(self) -> None:
        """Stop a profile that is being recorded, and close as in m4."""
        self.operations.close()
        try:
            super().close()
        finally:
            self.encoder.close()

    def clear_kv_caches(self) -> None:
        """Remove all embeddings; the scheduler has freed the KV."""
        self.encoder.clear()

    def stats(self) -> EngineStats:
        """Return the totals up to the last finished step, and the state of both caches."""
        return EngineStats(
            **vars(super().stats()), **self._encoder_counters, embedding_cache_bytes=self.encoder.cache.used_bytes
        )

    def run_step(self) -> dict[str, RequestOutput]:
        """Run one step and add it to the totals."""
        outputs = super().run_step()
        self._encoder_counters = self.encoder.counters()
        return outputs
