"""A scheduler for m4 that retracts a running request every three steps, whether there is need or not.

Its memory reports that there is no room, so that the scheduler does what it always does then: it retracts a request,
each time another one. A request that runs alone stays, for no other would gain by its going.
"""

from collections.abc import Sequence
from typing import Any

from m4_radix_cache.schedule_batch import Pools, ScheduleBatch
from m4_radix_cache.scheduler import Scheduler
from m5_chunked_prefill_spec.batch_composer import Work
from m5_chunked_prefill_spec.scheduler import Scheduler as SchedulerOfPieces
from m6_multimodal_pd.disaggregation.decode_scheduler import DecodeScheduler
from tests.support.victims import InTurn as InTurn

EVERY = 3


class ShortPools(Pools):
    """Pools that deny `num_denials` times that there is room."""

    num_denials = 0

    @classmethod
    def of(cls, pools: Pools) -> "ShortPools":
        return cls(pools.req_to_token_pool, pools.token_to_kv_pool_allocator, pools.tree_cache, debug=pools.debug)

    def make_room(self, num_tokens: int, rids: Sequence[str]) -> bool:
        if self.num_denials:
            self.num_denials -= 1
            return False
        return super().make_room(num_tokens, rids)


class ForcedRetraction(Scheduler):
    """m4's, in less memory than it seems to have."""

    def __init__(self, *, pools: Pools, **parts: Any) -> None:
        self.short = ShortPools.of(pools)
        super().__init__(pools=self.short, **parts | {"preemption": InTurn()})
        self.num_steps_since = 0

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        self.num_steps_since += 1
        return super().get_next_batch_to_run()

    def _update_running_batch(self) -> ScheduleBatch | None:
        if self.num_steps_since >= EVERY and len(self.running_batch.reqs) > 1:
            self.num_steps_since = 0
            self.short.num_denials = 2  # one for whether there is room, one for how many must go
        batch = super()._update_running_batch()
        assert not self.short.num_denials
        return batch


class ForcedRetractionInPieces(SchedulerOfPieces):
    """m5's, likewise; a request in the middle of its prompt may be the victim, too."""

    def __init__(self, *, pools: Pools, **parts: Any) -> None:
        self.short = ShortPools.of(pools)
        super().__init__(pools=self.short, **parts | {"preemption": InTurn()})
        self.num_steps_since = 0

    def get_next_batch_to_run(self) -> Any:
        """m5's, whose composer asks for `ShortWork`."""
        self.num_steps_since += 1
        self.merge_last_batch()
        self.prompts.check_chunked()
        return self.composer.compose(ShortWork(self, self.prompts, speculation=self.speculation, cuts=self.cuts))


class ForcedRetractionAfterTransfer(DecodeScheduler, ForcedRetractionInPieces):
    """That of a decode engine, likewise."""


class ShortWork(Work):
    """m5's, which denies that there is room every few steps."""

    def update_running_batch(self, max_draft_tokens: int) -> Any:
        scheduler: Any = self.scheduler
        reqs = scheduler.running_batch.reqs
        if scheduler.num_steps_since >= EVERY and reqs and len(reqs) + (scheduler.chunked_req is not None) > 1:
            scheduler.num_steps_since = 0
            scheduler.short.num_denials = 2  # one for whether there is room, one for how many must go
        batch = super().update_running_batch(max_draft_tokens)
        assert not scheduler.short.num_denials
        return batch
