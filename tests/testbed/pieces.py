"""The test-bed for a scheduler whose steps hold pieces of prompts, decodes and guesses at once.

bed = make_pieces_bed(max_num_batched_tokens=32, guesses=Guesses(4, right=0.5))
bed.add(100, max_tokens=9)           # runs in pieces of 32, 32, 32 and 4 tokens
bed.drain()                          # every answer is right, however much was guessed
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from m1_single_request import Tracer
from m1_single_request.stop_checker import StopChecker
from m3_paged_attention.outputs import ModelRunnerOutput
from m3_paged_attention.preemption import FewestOutputsFirst
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.config import SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.cost_table import CostTable
from m5_chunked_prefill_spec.outputs import ModelRunnerOutput as StepOutput
from m5_chunked_prefill_spec.prefill_adder import PrefillAdder
from m5_chunked_prefill_spec.req_to_token_pool import ReqToTokenPool
from m5_chunked_prefill_spec.request import Req as SpeculativeReq
from m5_chunked_prefill_spec.schedule_policy import SchedulePolicy
from m5_chunked_prefill_spec.scheduler import Scheduler
from m5_chunked_prefill_spec.speculative.speculation import Speculation
from m5_chunked_prefill_spec.wiring import chunk_alignment, make_composer
from tests.testbed.fakes import CPU, EOS, VOCAB_SIZE, letter
from tests.testbed.pieces_checks import PiecesChecks
from tests.testbed.pieces_runner import PiecesRunner
from tests.testbed.radix import CACHES, Decision, RadixBed, make_pools, on_bed
from tests.testbed.radix_runner import states_of


@dataclass(frozen=True)
class MixedDecision(Decision):
    """A step as it was decided."""

    num_prompts: int = 0
    """The first so many requests are prefilled."""
    chunked: str | None = None
    """The one whose prompt does not end in this step."""
    draft_lens: tuple[int, ...] = ()
    """Guesses, by request."""

    @property
    def prompts(self) -> dict[str, int]:
        """New tokens of those that are prefilled."""
        return dict(list(self.num_scheduled_tokens.items())[: self.num_prompts])

    @property
    def decodes(self) -> tuple[str, ...]:
        return self.rids[self.num_prompts :]

    @property
    def total(self) -> int:
        """New tokens of all."""
        return sum(self.extend_lens)

    @classmethod
    def of(cls, batch: Any) -> "MixedDecision":
        if batch is None:
            return cls()
        return cls(
            mode=batch.forward_mode.name.lower(),
            rids=tuple(batch.rids),
            extend_lens=tuple(batch.new_lens.tolist()),
            prefix_lens=tuple((batch.seq_lens - batch.new_lens).tolist()),
            num_prompts=batch.num_prompts,
            chunked=batch.chunked_req.rid if batch.chunked_req else None,
            draft_lens=tuple(map(len, batch.drafts)) or (0,) * len(batch.reqs),
        )


class Guesses:
    """A proposer that knows what the fake model will say, and errs: each guess is right with this probability."""

    def __init__(self, most: int, *, right: float = 0.5, seed: int = 0) -> None:
        self.most, self.right, self.random = most, right, Random(seed)

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
        return [self.guess(req, self.random.randint(0, limit)) for req, limit in zip(reqs, limits, strict=True)]

    def guess(self, req: Req, number: int) -> list[int]:
        tokens, guesses = req.origin_input_ids + req.output_ids, list[int]()
        for _ in range(number):
            token_id = letter(states_of(tokens + guesses, req.extra_key)[-1], req.seed)
            guesses.append(token_id if self.random.random() < self.right else 97 + (token_id + 4) % 26)
        return guesses


class PiecesBed(RadixBed):
    """m5's scheduler below its `RequestFamilies`, on simulated memory."""

    runner_class = PiecesRunner
    decision_class = MixedDecision
    req_class = SpeculativeReq

    def add(self, prompt: int | Sequence[int], max_tokens: int = 4, *, speculate: bool = True, **settings: Any) -> str:
        """Let a request arrive; with `speculate` its tokens may be guessed."""
        before = len(self.reqs)
        rid = super().add(prompt, max_tokens, **settings)
        for req in list(self.reqs.values())[before:]:
            assert isinstance(req, SpeculativeReq)
            req.speculate = speculate
        return rid

    def result_of(self, sampled: Any) -> ModelRunnerOutput | None:
        """A step's result; the log-probabilities of a piece come without a token."""
        output = super().result_of(sampled)
        if output is None:
            return None
        return StepOutput(
            output.req_ids,
            output.sampled_token_ids,
            output.logprobs,
            prompt_logprobs=output.prompt_logprobs | self.runner.of_pieces,
            draft_token_ids=self.runner.guesses,
        )

    @property
    def decisions(self) -> list[MixedDecision]:
        """What was decided, step by step."""
        return [step.output for step in self.steps]

    def pieces_of(self, request_id: str) -> list[int]:
        """How many tokens of its prompt ran in each step."""
        return [d.prompts[request_id] for d in self.decisions if request_id in d.prompts]

    def chunked(self) -> str | None:
        """The request that is in pieces now."""
        req = self.scheduler.chunked_req
        return None if req is None or req.req_pool_idx is None else req.rid


def make_pieces_bed(
    *,
    num_tokens: int = 512,
    page_size: int = 1,
    prefix_cache: str = "radix",
    schedule_policy: Any = "fcfs",
    eviction_policy: str = "lru",
    max_num_seqs: int = 4,
    max_num_batched_tokens: int | None = None,
    conservativeness: float = 1.0,
    max_model_len: int = 256,
    guesses: Guesses | None = None,
    costs: CostTable | None = None,
    scheduler_class: Callable[..., Any] = Scheduler,
    policy_class: Callable[..., Any] = SchedulePolicy,
    adder_class: Any = PrefillAdder,
    composer: Any = None,
    preemption: Any = None,
    trace: bool = False,
    checked: bool = True,
    tensors: bool = False,
    debug: bool = False,
    **limits: Any,
) -> PiecesBed:
    """m5's scheduler on a bed, with KV memory for `num_tokens`. `limits`: other fields of `SchedulerConfig`."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        schedule_policy=schedule_policy,
        schedule_conservativeness=conservativeness,
        **limits,
    ).resolved(max_model_len, "cpu")
    tracer = Tracer()
    pools = make_pools(
        ReqToTokenPool(size=max_num_seqs, max_context_len=max_model_len),
        num_tokens=num_tokens,
        page_size=page_size,
        cache_class=CACHES[prefix_cache],
        eviction_policy=eviction_policy,
        tracer=tracer,
        debug=debug,
    )
    alignment = chunk_alignment(config, page_size)
    scheduler = scheduler_class(
        scheduler_config=config,
        pools=pools,
        policy=policy_class(config.schedule_policy, tree_cache=pools.tree_cache, seed=0, tracer=tracer),
        prefill_adder=adder_class,
        composer=composer or make_composer(config, costs),
        speculation=speculation_of(guesses, max_model_len),
        chunk_alignment=alignment,
        preemption=preemption or FewestOutputsFirst(),
        stop_checker=StopChecker(eos_token_ids={EOS}, max_model_len=max_model_len),
        vocab_size=VOCAB_SIZE,
        device=CPU,
        tracer=tracer,
    )
    pools.running = lambda: running_of(scheduler)
    return on_bed(
        PiecesBed(scheduler, checks=None, tensors=tensors, max_model_len=max_model_len),
        PiecesChecks if checked else None,
        trace=trace,
        honest_policy=preemption is None,
        config=config,
        chunk_alignment=alignment,
    )


def speculation_of(guesses: Guesses | None, max_model_len: int) -> Speculation:
    """As many guesses as `guesses` may make, always."""
    config = SpeculativeConfig()
    if guesses is not None:
        config = SpeculativeConfig(method="ngram", num_speculative_tokens=guesses.most)
    return Speculation(proposer=guesses, config=config, max_model_len=max_model_len, vocab_size=VOCAB_SIZE)


def running_of(scheduler: Any) -> list[Req]:
    """Those who may have to go when memory is short."""
    chunked = scheduler.chunked_req
    is_held = chunked is not None and chunked.req_pool_idx is not None
    return [*scheduler.running_batch.reqs, *([chunked] if is_held else [])]
