"""The test-bed for a scheduler with a prefix cache: tiny pools, shared prompts, and the oracle that reads every slot.

    bed = make_radix_bed(num_tokens=12, page_size=4)
    bed.add(9, max_tokens=3)             # a prompt of 9 tokens
    bed.add(9, same_as="r0")             # the same 9 tokens
    bed.drain()                          # everybody has said what it had to, and all memory is free or evictable

A step does what the engine core's does, in the same order. Requests come in and go out through `RequestFamilies`.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from m1_single_request import SamplingParams, Tracer
from m1_single_request.sampler import SampledTokens
from m1_single_request.stop_checker import StopChecker
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.parallel_sampling import RequestFamilies
from m3_paged_attention.preemption import FewestOutputsFirst
from m3_paged_attention.request import ParentRequest
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
from tests.testbed.bed import SchedulerBed, Step
from tests.testbed.fakes import CPU, EOS, VOCAB_SIZE, make_request
from tests.testbed.radix_checks import RadixChecks
from tests.testbed.radix_runner import RadixRunner

MANY_STEPS = 3000
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


class RadixBed(SchedulerBed):
    """m4's scheduler below its `RequestFamilies`, on simulated memory.

    Seams for a scheduler whose steps do several things at once: `runner_class`, `decision_class`, `req_class`.
    """

    runner_class: type[RadixRunner] = RadixRunner
    decision_class: type[Decision] = Decision
    req_class: type[Req] = Req

    def __init__(self, scheduler: Any, *, tensors: bool = False, max_model_len: int, **settings: Any) -> None:
        super().__init__(scheduler, request_class=self.req_class, **settings)
        self.runner = self.runner_class(scheduler.pools, self.requests, tensors=tensors)  # type: ignore[arg-type]
        self.max_model_len = max_model_len
        self.pools: Any = scheduler.pools
        self.families = RequestFamilies(scheduler=scheduler, tracer=scheduler.tracer)
        self.parents: dict[str, ParentRequest] = {}
        self.reported_ends: list[str] = []

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
        number = len({(request.parent_id or rid) for rid, request in self.reqs.items()})
        if isinstance(prompt, int):
            own = [33 + (number * 7 + place) % 90 for place in range(prompt)]
            shared = [] if same_as is None else self.reqs[same_as].origin_input_ids[:prompt]
            prompt = shared + own[len(shared) :]
        rid = f"r{number}" if request_id is None else request_id
        settings = SamplingParams(max_tokens=max_tokens, **params)

        def make(child_id: str, settings: SamplingParams, seed: int) -> Req:  # as intake makes it
            request = make_request(child_id, prompt, settings, request_class=self.req_class, seed=seed)
            assert isinstance(request, Req)
            request.priority = priority
            request.extra_key = extra_key
            room = min(self.max_model_len, self.pools.token_to_kv_pool_allocator.size - 1) - len(prompt)
            request.max_new_tokens = min(max_tokens, room)
            return request

        reqs = [make(rid, settings, seed)]
        request: Any = reqs[0]
        if n > 1:
            others = replace(settings, prompt_logprobs=None)
            reqs = [make(f"{rid}/{i}", others if i else settings, seed + i) for i in range(n)]
            request = self.parents[rid] = ParentRequest(reqs, request_id=rid)
        for req in reqs:
            self.requests[req.rid] = req
        self.families.add_request(request)
        for req in reqs:
            if self.checks:
                self.checks.added(req)
        return rid

    @property
    def reqs(self) -> dict[str, Req]:
        """All that ever arrived, in order of arrival."""
        return self.requests  # type: ignore[return-value]

    # --- a step -------------------------------------------------------------------------------------------------------

    def execute(self, output: Any) -> dict[str, SampledTokens]:
        """Run a batch; returns the new tokens by request id."""
        return self.runner.run(output.get_model_worker_batch())  # type: ignore[no-any-return]

    def result_of(self, sampled: dict[str, SampledTokens] | None) -> ModelRunnerOutput | None:
        if sampled is None:
            return None
        prompt_logprobs = {rid: one.prompt_logprobs for rid, one in sampled.items() if one.prompt_logprobs is not None}
        return ModelRunnerOutput(
            req_ids=list(sampled),
            sampled_token_ids=[list(one.token_ids) for one in sampled.values()],
            logprobs=[one.logprobs for one in sampled.values()],
            prompt_logprobs=prompt_logprobs,
        )

    def step(
        self, *, between: Callable[[Any], object] | None = None, failing: Collection[str] = (), crash: bool = False
    ) -> Step:
        """One step. `between` is called with the decision when the model has run, as a trace reader may be.

        `failing` requests get no token but an error; with `crash` the model raises and all of the step fail.
        """
        if self.recorder:
            self.scheduler.tracer.step += 1
        batch = self.schedule()
        decision = self.decision_class.of(batch)
        sampled = None if crash or batch is None else self.execute(batch)
        if crash:
            self.fail(decision.rids, RuntimeError("the model crashed"))
        failed = [rid for rid in failing if sampled is not None and rid in decision.rids]
        for rid in failed:
            assert sampled is not None
            sampled.pop(rid, None)
        self.fail(failed, ValueError("no token can be sampled"))
        if between:
            between(decision)
        return self.update(batch, sampled, decision)

    def update(self, output: Any, sampled: dict[str, SampledTokens] | None, decision: Decision | None = None) -> Step:
        """The second verb, and what callers hear of it."""
        decision = decision or self.decision_class.of(output)
        if self.checks:
            self.checks.nothing_is_freed()
        changed = self.scheduler.update_from_output(output, self.result_of(sampled))
        ended = {req.rid: req.finish_reason.reason for req in changed if req.finish_reason is not None}
        if self.checks:
            assert self.checks.updated(sampled or {}, changed) == ended
        self.scheduler.check_invariants()
        self.ended |= ended
        self.steps.append(Step(decision, [req.rid for req in changed], ended))
        assert len(self.steps) < MANY_STEPS, "a test of so many steps goes in circles"
        reported = self.families.reported(changed)
        self.reported_ends += [request.request_id for request in reported if request.is_finished]
        return self.steps[-1]

    # --- looking ------------------------------------------------------------------------------------------------------

    def mode(self) -> str:
        """Of the last step."""
        return str(self.steps[-1].output.mode)

    def retracted(self) -> list[str]:
        """Who waits after having run, the oldest first."""
        return [req.rid for req in self.reqs.values() if req.is_retracted]

    def error_of(self, request_id: str) -> BaseException:
        """What a failed request ended with."""
        return self.requests[request_id].finish_reason.error  # type: ignore[union-attr,no-any-return]

    def flush(self) -> None:
        """Forget what is cached, as the engine does when it is idle."""
        assert not self.scheduler.requests
        self.pools.tree_cache.evict(self.pools.token_to_kv_pool_allocator.size)
        assert self.pools.token_to_kv_pool_allocator.available_size() == self.pools.token_to_kv_pool_allocator.size

    def _mark(self, request_ids: Collection[str], reason: Any) -> list[str]:
        children = {rid: [child.request_id for child in parent.children] for rid, parent in self.parents.items()}
        ids = list(dict.fromkeys(one for rid in request_ids for one in children.get(rid, [rid])))
        before = {rid for rid in ids if rid in self.scheduler.requests and self.requests[rid].to_finish is None}
        marked = self.families.finish_requests(request_ids, reason)
        if self.checks:
            self.checks.marked(ids, [rid for rid in ids if rid in before and self.requests[rid].to_finish is not None])
        return marked


class SqueezedPools(Pools):
    """Says, when told to, that there is no room for the next tokens: once for each victim that is `due`."""

    running: Callable[[], Sequence[Req]] = staticmethod(lambda: [])
    due = 0
    num_forced = 0
    _count: int | None = None

    def make_room(self, num_tokens: int) -> bool:
        has_room = super().make_room(num_tokens)
        count = len(self.running())
        if self._count is not None and count < self._count:
            self.due -= 1
            self.num_forced += 1
        self._count = count if self.due > 0 and count > 1 else None
        return has_room and self._count is None

    def release(self) -> None:
        """Nobody is due any more."""
        self.due, self._count = 0, None


def make_pools(
    rows: Any,
    *,
    num_tokens: int,
    page_size: int,
    cache_class: Any,
    eviction_policy: str,
    tracer: Tracer,
    debug: bool,
) -> SqueezedPools:
    """Memory for so many tokens, less what fills no page, checked at every free."""
    size = num_tokens // page_size * page_size
    allocator = TokenToKVPoolAllocator(size=size, page_size=page_size, checked=True)
    tree_cache = cache_class(
        req_to_token_pool=rows, token_to_kv_pool_allocator=allocator, eviction_policy=eviction_policy, tracer=tracer
    )
    return SqueezedPools(rows, allocator, tree_cache, debug=debug)


def make_radix_bed(
    *,
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
) -> RadixBed:
    """m4's scheduler on a bed, with KV memory for `num_tokens`."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        schedule_policy=schedule_policy,
        schedule_conservativeness=conservativeness,
    ).resolved(max_model_len)
    tracer = Tracer()
    pools = make_pools(
        ReqToTokenPool(size=max_num_seqs, max_context_len=max_model_len),
        num_tokens=num_tokens,
        page_size=page_size,
        cache_class=cache_class or CACHES[prefix_cache],
        eviction_policy=eviction_policy,
        tracer=tracer,
        debug=debug,
    )
    scheduler = scheduler_class(
        scheduler_config=config,
        pools=pools,
        policy=policy_class(config.schedule_policy, tree_cache=pools.tree_cache, seed=0, tracer=tracer),
        prefill_adder=adder_class,
        preemption=preemption or FewestOutputsFirst(),
        stop_checker=StopChecker(eos_token_ids={EOS}, max_model_len=max_model_len),
        vocab_size=VOCAB_SIZE,
        device=CPU,
        tracer=tracer,
    )
    pools.running = lambda: scheduler.running_batch.reqs
    bed = RadixBed(
        scheduler,
        checks=None,
        tensors=tensors,
        max_model_len=max_model_len,
        recorder=Recorder(tracer) if trace else None,
    )
    if checked:
        checks: Any = RadixChecks(scheduler, bed.runner, max_model_len=max_model_len, honest_policy=preemption is None)
        bed.checks = checks
    return bed


def run_all(bed: RadixBed, prompts: Iterable[int], max_tokens: int = 4) -> dict[str, str]:
    """Add prompts of these lengths, and step until all have ended."""
    for prompt in prompts:
        bed.add(prompt, max_tokens)
    return bed.drain()
