"""One step of the engine, with a batch that lives and a cache that outlives requests.

    schedule -> execute ( prepare -> forward -> sample ) -> update -> make outputs

m3 released what ended requests had held as a last step. Here the update leaves it to the cache, so there is nothing to
release; `flush_cache` forgets it. `n > 1` stands outside, as in m3. SGLang: `Scheduler.event_loop_normal`; vLLM:
`v1/engine/core.py`.
"""

import time
from typing import Protocol

import torch

from m1_single_request.engine_core_base import EngineCoreBase
from m1_single_request.input_processor import InputProcessor
from m1_single_request.output_processor import OutputProcessor
from m1_single_request.outputs import EngineStats as SingleRequestStats, RequestOutput
from m1_single_request.tracer import Tracer
from m3_paged_attention.executor import GPUExecutor
from m3_paged_attention.outputs import ModelRunnerOutput, checked
from m3_paged_attention.parallel_sampling import RequestFamilies
from m4_radix_cache.recovery import Phase, forget_everything
from m4_radix_cache.scheduler import Scheduler


class Companion(Protocol):
    """What else outlives requests, besides KV: nothing before m6, which keeps what it has seen of pictures."""

    def clear(self) -> None:
        """Forget it."""
        ...

    def close(self) -> None:
        """Forget it, and let go of what made it."""
        ...

    def add_to(self, stats: SingleRequestStats) -> SingleRequestStats:
        """The engine's totals, with its own."""
        ...


class NoCompanion:
    """There is nothing else."""

    def clear(self) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to let go of."""

    def add_to(self, stats: SingleRequestStats) -> SingleRequestStats:
        """Nothing to add."""
        return stats


class EngineCore(EngineCoreBase):
    """Turns the crank."""

    def __init__(
        self,
        *,
        input_processor: InputProcessor,
        scheduler: Scheduler,
        executor: GPUExecutor,
        output_processor: OutputProcessor,
        kv_bytes_per_token: int,
        tracer: Tracer,
        companion: Companion | None = None,
    ) -> None:
        self.companion = NoCompanion() if companion is None else companion
        self.families = RequestFamilies(scheduler=scheduler, tracer=tracer)
        super().__init__(
            input_processor=input_processor,
            unfinished=self.families,
            kv_holder=KVView(scheduler, kv_bytes_per_token, self.companion),
            output_processor=output_processor,
            tracer=tracer,
        )
        self.scheduler = scheduler
        self.executor = executor

    def step(self) -> dict[str, RequestOutput]:
        """Run one step; returns the new state of every request that changed. `{}` on an idle engine.

        An exception in the model fails the requests of this step, and only them; a row of logits that cannot be used
        fails its own request; a lost device (`EngineDeadError`) fails all, and the engine with them.
        """
        if not self._begin_step():
            return {}
        times = [time.perf_counter()]
        try:
            batch = self.scheduler.schedule()  # 1 schedule
        except (torch.AcceleratorError, torch.OutOfMemoryError) as error:  # the tensors of sampling are made there
            batch = None
            self._fail(self.scheduler.give_up(), error)
        times.append(time.perf_counter())
        output: ModelRunnerOutput | None = None
        num_tokens = num_prompt_tokens = 0
        if batch is not None:
            worker_batch = batch.get_model_worker_batch()
            num_tokens = len(worker_batch.input_ids)
            try:
                said = self.executor.execute_model(worker_batch)  # 2 execute
                output = checked(said, worker_batch.num_samples)
                num_prompt_tokens = worker_batch.num_prompt_tokens
                self._fail_each(output.errors)
            except Exception as error:
                self._fail(worker_batch.rids, error)
        executed = time.perf_counter()
        times += [executed - (output.sample_seconds if output else 0.0), executed]
        updated = self.scheduler.update_from_output(batch, output)  # 3 update
        changed = self._and_unreported(self.families.reported(updated))
        outputs = self._make_outputs(changed)  # 4 make outputs
        self._end_step(times, num_tokens=num_tokens, num_prompt_tokens=num_prompt_tokens, changed=changed)
        return outputs

    def close(self) -> None:
        """Forget all KV, then let go of the KV memory and the model: the engine object may live on."""
        super().close()
        self.executor.shutdown()
        self.companion.close()

    def is_unfinished(self, request_id: str) -> bool:
        """As m1's. If a parent's arrival was interrupted, only its family knows it, until its children have ended."""
        return super().is_unfinished(request_id) or self.families.is_unfinished(request_id)

    def stats(self) -> SingleRequestStats:
        """Totals so far, and the state of the cache."""
        totals, uncounted = vars(super().stats()), [r for rid, r in self._open.items() if rid not in self._counted]
        totals["num_output_tokens"] = self._num_output_tokens + sum(r.num_output_tokens for r in uncounted)
        return self.companion.add_to(self.scheduler.stats(totals))


class KVView:
    """What requests hold, seen from above. What only the cache holds counts as nobody's."""

    def __init__(self, scheduler: Scheduler, kv_bytes_per_token: int, companion: Companion) -> None:
        self.scheduler, self.companion = scheduler, companion
        self.kv_bytes_per_token = kv_bytes_per_token

    def free_request_cache(self, request_id: str) -> None:
        """Release the KV of a request; nothing happens if it holds none."""
        req = self.scheduler.requests.get(request_id)
        if req is not None and req.req_pool_idx is not None:
            self.scheduler.tree_cache.cache_finished_req(req, is_insert=False)

    def clear_kv_caches(self) -> None:
        """Forget all KV, cached or in use."""
        self.scheduler.phase = Phase.DECIDING  # interrupted, it leaves books that the next step makes anew
        forget_everything(self.scheduler)
        self.companion.clear()
        if not self.scheduler.requests:
            self.scheduler.phase = Phase.IDLE

    def held_request_ids(self) -> list[str]:
        """The requests that hold KV: none but those that the scheduler knows."""
        return [req.rid for req in self.scheduler.requests.values() if req.req_pool_idx is not None]

    def num_kv_tokens(self) -> int:
        """Slots that requests hold, shared ones once."""
        pools = self.scheduler.pools
        allocator, cache = pools.token_to_kv_pool_allocator, pools.tree_cache
        return allocator.size - allocator.available_size() - cache.evictable_size()
