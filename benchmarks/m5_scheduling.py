"""What scheduling costs in a decode step of many requests, without any model: m5 beside m4.

Three sides of m5 do what m4 does, and more and more besides: nothing is guessed; everybody looks for its last tokens in
vain; everybody has four guesses, all of them right, so that a step brings five tokens. The last one is to be read per
token. As in `m4_scheduling`, `prepare` makes the tensors of the forward.
"""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.m3_scheduling import NUM_SEQUENCES, TOKEN
from benchmarks.m4_scheduling import Times, compared, m4_stepper, make_scheduler, stepper
from m5_chunked_prefill_spec.batch_composer import DecodeFirst
from m5_chunked_prefill_spec.config import SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.forward_batch import ForwardBatch
from m5_chunked_prefill_spec.prefill_adder import PrefillAdder
from m5_chunked_prefill_spec.req_to_token_pool import ReqToTokenPool
from m5_chunked_prefill_spec.request import Req
from m5_chunked_prefill_spec.schedule_policy import SchedulePolicy
from m5_chunked_prefill_spec.scheduler import Scheduler
from m5_chunked_prefill_spec.speculative.proposer import Proposer, make_proposer
from m5_chunked_prefill_spec.speculative.speculation import Speculation

GUESSES = 4
FIRST_NEW = 2000  # tokens that no prompt has begin here
Row = dict[str, Any]


class AlwaysRight:
    """Proposes what will come."""

    def propose(self, reqs: Sequence[Any], limits: Sequence[int]) -> list[list[int]]:
        return [[TOKEN] * limit for limit in limits]


def never_twice(number: int, length: int) -> list[int]:
    """A prompt in which nothing comes twice."""
    return [number + 1, *range(FIRST_NEW - length + 1, FIRST_NEW)]


def m5_scheduler(num_sequences: int, num_tokens: int, config: SpeculativeConfig, proposer: Proposer | None) -> Any:
    """An m5 scheduler with so many requests, none of which ends within `num_tokens` tokens."""

    def made(*, scheduler_config: Any, prefill_adder: Any, **settings: Any) -> Scheduler:
        limits = SchedulerConfig(
            max_num_seqs=scheduler_config.max_num_seqs, max_num_batched_tokens=scheduler_config.max_num_batched_tokens
        )
        return Scheduler(
            composer=DecodeFirst(),
            speculation=Speculation(proposer=proposer, config=config, max_model_len=2**20, vocab_size=2**20),
            chunk_alignment=1,
            scheduler_config=limits,
            prefill_adder=PrefillAdder,
            **settings,
        )

    return make_scheduler(
        num_sequences,
        num_tokens,
        made_by=made,
        rows_class=ReqToTokenPool,
        prompt_of=never_twice,
        request_class=Req,
        policy_class=SchedulePolicy,
    )


def m5_stepper(
    num_sequences: int,
    num_steps: int,
    *,
    method: str | None = None,
    proposer: Proposer | None = None,
    num_guesses: int = 0,
) -> Callable[[], Times]:
    """Makes a step of m5. `num_guesses`: so many of everybody's are right in each step; 0 where there are none."""
    config = SpeculativeConfig() if method is None else SpeculativeConfig(method=method)  # type: ignore[arg-type]
    scheduler = m5_scheduler(num_sequences, num_steps * (1 + num_guesses), config, proposer or make_proposer(config))

    def tokens_of(number: int) -> list[int]:
        if num_guesses:
            return [TOKEN] * (1 + num_guesses if number else 1)  # the first step has the prompts
        return [FIRST_NEW + number]

    return stepper(scheduler, ForwardBatch.init_new, tokens_of)


def scheduling(*, num_steps: int, num_sequences: int = NUM_SEQUENCES) -> Row:
    """Medians over the decode steps, which the sides take in turn, in seconds per sequence; and the ratios to m4."""
    right = m5_stepper(num_sequences, num_steps, method="ngram", proposer=AlwaysRight(), num_guesses=GUESSES)
    part = compared(
        {
            "m4": m4_stepper(num_sequences, num_steps),
            "m5, no guesses": m5_stepper(num_sequences, num_steps),
            "m5, n-grams looked for in vain": m5_stepper(num_sequences, num_steps, method="ngram"),
            f"m5, {GUESSES} guesses, all right": right,
        },
        num_steps,
        num_sequences,
    )
    sides = part["sides"]
    for name, side in sides.items():
        side["tokens_per_step"] = 1 + GUESSES if "all right" in name else 1
        side["times_m4"] = side["schedule_and_update"] / sides["m4"]["schedule_and_update"]
        side["all_times_m4"] = side["all"] / sides["m4"]["all"]
    return part
