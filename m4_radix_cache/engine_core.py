"""One step of the engine, with a batch that is kept from step to step and a cache that outlives requests.

    schedule -> execute ( prepare -> forward -> sample ) -> update -> make outputs

m3 freed the blocks of ended requests in a last step. Here the update gives their KV to the cache, so this step is gone;
`flush_cache` empties the cache. `RequestFamilies` handles `n > 1`, as in m3. SGLang: `Scheduler.event_loop_normal`;
vLLM: `v1/engine/core.py`.
"""

from collections.abc import Mapping
from typing import Any

from m1_single_request.engine_core import EngineCoreBase
from m1_single_request.errors import EngineDeadError
from m1_single_request.input_processor import InputProcessor
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.outputs import EngineStats as SingleRequestStats, RequestOutput
from m1_single_request.request import FinishAbort
from m1_single_request.tracer import Tracer
from m3_paged_attention.executor import GPUExecutor, accepted, checked
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.parallel_sampling import RequestFamilies
from m4_radix_cache.model_worker_batch import ModelWorkerBatch
from m4_radix_cache.scheduler import Scheduler


class EngineCore(EngineCoreBase):
    """Runs one batch of requests per step. In debug mode `run_step` checks the invariants.

    `stats` adds the numbers of cache and retractions; `close` also shuts the executor down.
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
    ) -> None:
        self.families = RequestFamilies(scheduler=scheduler, tracer=tracer)
        super().__init__(input_processor, scheduler, output_processor, parts, tracer)
        self._intake = self.families
        self.scheduler = scheduler
        self.executor = executor
        self.kv_bytes_per_token = kv_bytes_per_token
        self._counters = scheduler.counters()  # up to the last finished step

    def step(self) -> dict[str, RequestOutput]:
        """Run one step; return the new output of every request that changed.

        An exception in the model ends the requests of this step, and only these; an unusable row of logits ends only
        its request; a lost device (`EngineDeadError`) ends all requests and the engine.
        """
        batch = self.scheduler.schedule()  # 1 schedule
        self._record.lap("schedule")
        worker_batch = None if batch is None else batch.get_model_worker_batch()
        output = self._run_or_fail("execute", self._execute, worker_batch)  # 2 execute
        changed = self.scheduler.update_from_output(batch, output)  # 3 update
        return self._make_outputs(self.families.reported(changed))  # 4 make outputs

    def run_step(self) -> dict[str, RequestOutput]:
        """Run one step and add it to the totals. With `CacheConfig.debug` raise `AssertionError` if queues and memory
        contradict each other."""
        outputs = super().run_step()
        self._counters = self.scheduler.counters()
        if self.scheduler.pools.debug:
            self.check_invariants()
        return outputs

    def check_invariants(self) -> None:
        """Raise `AssertionError` if queues and memory contradict each other."""
        self.scheduler.check_invariants()

    def clear_kv_caches(self) -> None:
        """Do nothing: the scheduler has freed the KV."""

    def num_kv_tokens(self) -> int:
        """Return the number of slots that requests hold, shared ones once; slots that only the cache holds excluded."""
        pools = self.scheduler.pools
        allocator, cache = pools.token_to_kv_pool_allocator, pools.tree_cache
        return allocator.size - allocator.available_size() - cache.evictable_size()

    def flush_cache(self, tier: str | None = None) -> bool:
        """Empty the prefix cache and return True. With unfinished requests, keep it and return False.

        `tier`: `device`, `host` or `disk` alone; None: device and host. Raises `ConfigError` for a tier that is not
        configured, `DiskError` for a disk that does not do it, and `EngineDeadError` if KV is lost meanwhile."""
        if self.has_unfinished_requests():
            return False
        with self.changing():
            if tier is None:
                self._forget_all(FinishAbort())
                return True
            try:
                self.scheduler.tree_cache.flush_tier(tier)
            except EngineDeadError as error:
                self.dead = error
                raise
        return True

    def close(self) -> None:
        """Free all KV, then release the KV memory and the model, even if the engine object stays referenced."""
        try:
            super().close()
        finally:
            self.scheduler.tree_cache.close()
            self.executor.shutdown()

    def stats(self) -> SingleRequestStats:
        """Return the totals up to the last finished step, and the state of the cache."""
        return self.scheduler.stats(vars(super().stats()) | self._counters)

    def _execute(self, batch: ModelWorkerBatch) -> ModelRunnerOutput:
        """Run a batch; a request without a token in the output ends with its error."""
        self._record.request_ids = batch.rids
        self._record.num_tokens = len(batch.input_ids)
        self._record.num_prompt_tokens = batch.num_prompt_tokens
        output = self.executor.execute_model(batch)
        self._record.lap("execute")
        output = checked(output, dict(zip(batch.rids, batch.sample_lens, strict=True)))
        return accepted(output, self._record, self._fail)
