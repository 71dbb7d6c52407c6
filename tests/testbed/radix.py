"""The test-bed for a scheduler with a prefix cache: tiny pools, shared prompts, and the oracle that reads every slot.

    bed = make_radix_bed(num_tokens=12, page_size=4)
    bed.add(9, max_tokens=3)             # a prompt of 9 tokens
    bed.add(9, same_as="r0")             # the same 9 tokens
    bed.drain()                          # every answer is right, and all memory is free or evictable

A step does what the engine core's does, in the same order. Requests come in and go out through `RequestFamilies`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from m1_single_request import SamplingParams, Tracer
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m3_paged_attention.preemption import FewestOutputsFirst
from m4_radix_cache.config import SchedulerConfig
from m4_radix_cache.mem_cache.allocator import TokenToKVPoolAllocator
from m4_radix_cache.mem_cache.block_hash_cache import BlockHashCache
from m4_radix_cache.mem_cache.chunk_cache import ChunkCache
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.req_to_token_pool import ReqToTokenPool
from m4_radix_cache.prefill_adder import PrefillAdder
from m4_radix_cache.request import Req
from m4_radix_cache.schedule_batch import Pools, ScheduleBatch
from m4_radix_cache.schedule_policy import SchedulePolicy
from m4_radix_cache.scheduler import Scheduler
from tests.support.engines import Recorder
from tests.testbed.fakes import CPU, EOS, VOCAB_SIZE
from tests.testbed.families import FamiliesBed
from tests.testbed.radix_checks import RadixChecks
from tests.testbed.radix_runner import RadixRunner

CACHES: dict[str, Any] = {"radix": RadixCache, "hash": BlockHashCache, "chunk": ChunkCache}


@dataclass(frozen=True)
class Decision:
    """A step as it was decided; the batch itself lives on and changes."""

    mode: str = "none"
    """`extend`, `decode` or `none`."""
    rids: tuple[str, ...] = ()
    extend_lens: tuple[int, ...] = ()
    prefix_lens: tuple[int, ...] = ()
    """Tokens that have their KV."""

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """New tokens by request id."""
        return dict(zip(self.rids, self.extend_lens, strict=True))

    @property
    def hits(self) -> dict[str, int]:
        """Tokens that are not computed, by request id."""
        return dict(zip(self.rids, self.prefix_lens, strict=True))

    @classmethod
    def of(cls, batch: ScheduleBatch | None) -> "Decision":
        if batch is None:
            return cls()
        lens = batch.extend_lens or [1] * len(batch.reqs)
        starts = [after - new for after, new in zip(batch.seq_lens.tolist(), lens, strict=True)]
        rids = tuple(req.rid for req in batch.reqs)
        return cls(batch.forward_mode.name.lower(), rids, tuple(lens), tuple(starts))


class RadixBed(FamiliesBed):
    """m4's scheduler below its `RequestFamilies`, on simulated memory.

    Seams for a scheduler whose steps do several things at once: the classes of which the bed is made.
    """

    runner_class: type[RadixRunner] = RadixRunner
    decision_class: type[Decision] = Decision
    checks_class: type[RadixChecks] = RadixChecks
    config_class: type[SchedulerConfig] = SchedulerConfig
    rows_class: type[ReqToTokenPool] = ReqToTokenPool
    req_class: type[Req] = Req

    def __init__(self, scheduler: Any, *, tensors: bool = False, max_model_len: int, **settings: Any) -> None:
        super().__init__(scheduler, request_class=self.req_class, **settings)
        self.runner = self.runner_class(scheduler.pools, self.requests, tensors=tensors)  # type: ignore[arg-type]
        self.max_model_len = max_model_len
        self.pools: Any = scheduler.pools

    def add(
        self,
        prompt: int | Sequence[int],
        max_tokens: int = 4,
        *,
        same_as: str | None = None,
        n: int = 1,
        request_id: str | None = None,
        seed: int = 0,
        priority: int = 0,
        extra_key: str | None = None,
        **params: Any,
    ) -> str:
        """Let a request arrive. A number makes a prompt of so many tokens: those of `same_as`, and its own after them.

        With `n` > 1 its children are called `request_id/0` and so on.
        """
        length, (own, rid) = prompt, self.named(prompt, request_id)
        if isinstance(length, int) and same_as is not None:
            shared = self.reqs[same_as].origin_input_ids[:length]
            own = shared + own[len(shared) :]
        children = self.children(rid, own, SamplingParams(max_tokens=max_tokens, **params), n=n, seed=seed)
        room = min(self.max_model_len, self.pools.token_to_kv_pool_allocator.size - 1) - len(own)
        for req in children:  # as intake makes them
            req.priority, req.extra_key, req.max_new_tokens = priority, extra_key, min(max_tokens, room)
        return self.submit(rid, children)

    @property
    def reqs(self) -> dict[str, Req]:
        """All that ever arrived, in order of arrival."""
        return self.requests  # type: ignore[return-value]

    @property
    def memory(self) -> Any:
        """The pools, which preempt if a victim is due."""
        return self.pools

    # --- a step -------------------------------------------------------------------------------------------------------

    def execute(self, output: Any) -> dict[str, SampledTokens]:
        """Run a batch; returns the new tokens by request id."""
        return self.runner.run(output.get_model_worker_batch())  # type: ignore[no-any-return]

    def decision_of(self, output: Any) -> Decision:
        return self.decision_class.of(output)

    def check_kv(self) -> None:
        """The checks do it, with the rows of the scheduler."""

    # --- looking ------------------------------------------------------------------------------------------------------

    def mode(self) -> str:
        """Of the last step."""
        return str(self.steps[-1].output.mode)

    def retracted(self) -> list[str]:
        """The waiting requests that ran before, the oldest first."""
        return [req.rid for req in self.reqs.values() if req.is_retracted]

    def possible_victims(self) -> Sequence[Req]:
        """Those who may have to go when memory is short."""
        return self.scheduler.running_batch.reqs  # type: ignore[no-any-return]

    def flush(self) -> None:
        """Forget what is cached, as the engine does when it is idle."""
        assert not self.scheduler.requests
        self.pools.tree_cache.evict(self.pools.token_to_kv_pool_allocator.size)
        assert self.pools.token_to_kv_pool_allocator.available_size() == self.pools.token_to_kv_pool_allocator.size


class SqueezedPools(Pools):
    """Has no room for the next tokens, once for each victim that is `due`."""

    running: Callable[[], Sequence[Req]] = staticmethod(lambda: [])
    due = 0
    num_forced = 0
    _count: int | None = None

    def make_room(self, num_tokens: int, rids: Sequence[str]) -> bool:
        has_room = super().make_room(num_tokens, rids)
        count = len(self.running())
        if self._count is not None and count < self._count:
            self.due -= 1
            self.num_forced += 1
        self._count = count if self.due > 0 and count > 1 else None
        return has_room and self._count is None

    def relax(self) -> None:
        """No victim is due any more."""
        self.due, self._count = 0, None

    release = relax


def make_radix_bed(
    *,
    bed_class: type[RadixBed] = RadixBed,
    num_tokens: int = 256,
    page_size: int = 1,
    prefix_cache: str = "radix",
    schedule_policy: Any = "fcfs",
    eviction_policy: str = "lru",
    max_num_seqs: int = 4,
    max_num_batched_tokens: int | None = None,
    conservativeness: float = 1.0,
    max_model_len: int = 128,
    scheduler_class: Callable[..., Any] = Scheduler,
    cache_class: Any = None,
    policy_class: Callable[..., Any] = SchedulePolicy,
    adder_class: Any = PrefillAdder,
    preemption: Any = None,
    trace: bool = False,
    checked: bool = True,
    tensors: bool = False,
    debug: bool = False,
    **limits: Any,
) -> Any:
    """m4's scheduler on a bed, with KV memory for `num_tokens`, less what fills no page, checked at every free.

    `limits`: other fields of the bed's `SchedulerConfig`.
    """
    config = bed_class.config_class(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        schedule_policy=schedule_policy,
        schedule_conservativeness=conservativeness,
        **limits,
    ).resolved(max_model_len)
    tracer = Tracer()
    rows = bed_class.rows_class(size=max_num_seqs, max_context_len=max_model_len)
    size = num_tokens // page_size * page_size
    allocator = TokenToKVPoolAllocator(size=size, page_size=page_size, checked=True)
    tree_cache = (cache_class or CACHES[prefix_cache])(
        req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, eviction_policy=eviction_policy, tracer=tracer
    )
    pools = SqueezedPools(rows, allocator, tree_cache, debug=debug)
    scheduler = scheduler_class(
        scheduler_config=config,
        pools=pools,
        policy=policy_class(config.schedule_policy, tree_cache=tree_cache, seed=0, tracer=tracer),
        prefill_adder=adder_class,
        preemption=preemption or FewestOutputsFirst(),
        stop_checker=StopChecker(eos_token_ids={EOS}, max_model_len=max_model_len),
        vocab_size=VOCAB_SIZE,
        device=CPU,
        tracer=tracer,
    )
    recorder = Recorder(tracer) if trace else None
    bed = bed_class(scheduler, checks=None, tensors=tensors, max_model_len=max_model_len, recorder=recorder)
    pools.running = bed.possible_victims
    if checked:
        bed.checks = bed_class.checks_class(
            scheduler, bed.runner, config=config, max_model_len=max_model_len, honest_policy=preemption is None
        )
    return bed
