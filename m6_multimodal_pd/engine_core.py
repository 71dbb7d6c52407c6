"""m4's engine core, whose weights can be exchanged and whose steps can be profiled.

Neither changes the step, so the step is m4's. SGLang: `SchedulerUpdateWeightsMixin` and `SchedulerProfilerMixin`; vLLM:
`reload_weights` and `start_profile` of its workers.
"""

from m1_single_request.errors import EngineUsageError
from m1_single_request.request import FinishAbort
from m4_radix_cache.engine_core import EngineCore as RadixEngineCore
from m6_multimodal_pd.operations import Operations


class EngineCore(RadixEngineCore):
    """Adds `operations`, `update_weights`, and their end in `close`."""

    operations: Operations

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
        super().close()
