"""The test-bed for a scheduler whose steps hold pieces of prompts, decodes and guesses at once.

bed = make_pieces_bed(max_num_batched_tokens=32, guesses=Guesses(4, right=0.5))
bed.add(100, max_tokens=9)           # runs in pieces of 32, 32, 32 and 4 tokens
bed.drain()                          # every answer is right, however much was guessed
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.config import SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.outputs import ModelRunnerOutput as StepOutput
from m5_chunked_prefill_spec.prefill_adder import PrefillAdder
from m5_chunked_prefill_spec.req_to_token_pool import ReqToTokenPool
from m5_chunked_prefill_spec.request import Req as SpeculativeReq
from m5_chunked_prefill_spec.schedule_policy import SchedulePolicy
from m5_chunked_prefill_spec.scheduler import Scheduler
from m5_chunked_prefill_spec.speculative.speculation import Speculation
from m5_chunked_prefill_spec.wiring import chunk_alignment, make_composer
from tests.testbed.fakes import VOCAB_SIZE, letter
from tests.testbed.pieces_checks import PiecesChecks
from tests.testbed.pieces_runner import PiecesRunner
from tests.testbed.radix import Decision, RadixBed, make_radix_bed
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
    checks_class = PiecesChecks
    config_class = SchedulerConfig
    rows_class = ReqToTokenPool
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

    def possible_victims(self) -> list[Req]:
        chunked = self.chunked()
        return [*super().possible_victims(), *([] if chunked is None else [self.reqs[chunked]])]


def make_pieces_bed(*, max_model_len: int = 256, guesses: Guesses | None = None, **settings: Any) -> PiecesBed:
    """m5's scheduler on a bed, as m4's; each step has as many guesses as `guesses` may make."""
    speculative = SpeculativeConfig()
    if guesses is not None:
        speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=guesses.most)
    speculation = Speculation(proposer=guesses, config=speculative, max_model_len=max_model_len, vocab_size=VOCAB_SIZE)

    def make_scheduler(*, scheduler_config: SchedulerConfig, pools: Any, **parts: Any) -> Scheduler:
        return Scheduler(
            scheduler_config=scheduler_config,
            pools=pools,
            composer=make_composer(scheduler_config, None),
            speculation=speculation,
            chunk_alignment=chunk_alignment(scheduler_config, pools.tree_cache.page_size),
            **parts,
        )

    parts = {"scheduler_class": make_scheduler, "policy_class": SchedulePolicy, "adder_class": PrefillAdder}
    own: dict[str, Any] = {"bed_class": PiecesBed, "num_tokens": 512, "max_model_len": max_model_len}
    bed: PiecesBed = make_radix_bed(**parts | own | settings)
    return bed
