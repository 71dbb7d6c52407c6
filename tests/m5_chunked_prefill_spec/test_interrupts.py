"""Ctrl-C in the middle of a step with pieces and guesses: nobody is lost, no token is doubled or wrong.

The crowd is m4's, in smaller steps and with guesses: prompts are cut, decodes share steps with pieces, guesses are
verified and rolled back, requests are retracted in the middle of their prompts. One of the steps is interrupted before
one of its lines, chosen at random; whoever called `step` goes on as if nothing had been.
"""

from types import ModuleType
from typing import Any

import pytest

from m1_single_request import engine_core_base, request as request_module, request_updater, stop_checker
from m3_paged_attention import output_processor, parallel_sampling
from m4_radix_cache import (
    engine_core,
    recovery,
    retraction,
    sampling_batch_info,
    schedule_batch as plain_batch,
    scheduler_base,
)
from m4_radix_cache.mem_cache import allocator, base_prefix_cache, radix_cache, req_to_token_pool as plain_pool
from m5_chunked_prefill_spec import (
    LLMEngine,
    SamplingParams,
    admission,
    batch_composer,
    forward_batch,
    model_runner,
    prefill_adder,
    req_to_token_pool,
    result_processor,
    schedule_batch,
    scheduler as scheduler_module,
)
from m5_chunked_prefill_spec.speculative import draft_runner, proposer, rejection_sampler, speculation, verify_rows
from tests.equivalence.forced_retraction import ForcedRetractionInPieces
from tests.m5_chunked_prefill_spec.engines import Guessing, MakeEngine, check_drained, check_flushed, greedy, setting
from tests.support.interrupts import Crowd, check_told_once

SCHEDULER: list[ModuleType] = [
    scheduler_module,
    admission,
    batch_composer,
    prefill_adder,
    result_processor,
    schedule_batch,
    req_to_token_pool,
    speculation,
    proposer,
    scheduler_base,
    plain_batch,
    plain_pool,
    retraction,
    recovery,
    base_prefix_cache,
    radix_cache,
    allocator,
    request_updater,
    request_module,
    stop_checker,
]
ENGINE = [
    *SCHEDULER,
    engine_core,
    engine_core_base,
    parallel_sampling,
    model_runner,
    forward_batch,
    sampling_batch_info,
    rejection_sampler,
    verify_rows,
    draft_runner,
    output_processor,
]
COMMON = [41, 42, 43, 44]
ASKED: dict[str, tuple[list[int], SamplingParams]] = {
    "a": ([*COMMON, 31, 32, 33], greedy(7)),
    "family": (COMMON, greedy(6, n=3, temperature=1.0, seed=4)),
    "b": ([51, 52], greedy(3, temperature=0.9, seed=9, repetition_penalty=1.3, min_tokens=2)),
    "gone": ([*COMMON, 61, 62, 63], greedy(9)),
    "c": ([*COMMON, *range(71, 84)], greedy(8, logprobs=1, prompt_logprobs=1)),
}
GREEDY = {rid: (prompt, greedy(params.max_tokens, n=params.n)) for rid, (prompt, params) in ASKED.items()}
CASES = 10


def check_end(engine: LLMEngine) -> None:
    check_drained(engine)
    check_flushed(engine)


def forget_denials(engine: LLMEngine) -> None:
    """Of a retraction that was forced and interrupted."""
    scheduler: Any = engine.engine_core.scheduler
    scheduler.short.num_denials = 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("modules", [SCHEDULER, ENGINE], ids=["scheduler", "engine"])
@pytest.mark.parametrize("guesses", ["random", "draft_model", "pieces of whole pages"])
def test_an_interrupt_anywhere_leaves_right_tokens_and_nothing_else(
    make_engine: MakeEngine, make_m1: Any, guesses: str, modules: list[ModuleType]
) -> None:
    parts: dict[str, Any] = {"scheduler": ForcedRetractionInPieces}
    own: dict[str, Any] = {"method": guesses}
    if guesses == "random":
        own, parts = {"method": "ngram"}, parts | {"proposer": Guessing}
    if guesses == "pieces of whole pages":
        own = {"schedule": "prefill_first"}
    limits = setting(4, 8, tokens=44, page_size=2, conservativeness=0, **own)
    crowd = Crowd(
        asked=GREEDY if guesses == "draft_model" else ASKED,
        make=lambda: make_engine(parts, **limits),
        check_end=check_end,
        after=forget_denials,
    )
    first = crowd.check_interrupts(make_m1(), modules, cases=CASES, seed=f"{guesses}{len(modules)}")
    stats: Any = first.stats()
    assert stats.num_retractions > 0
    assert (stats.num_draft_tokens > 0) == (guesses != "pieces of whole pages")


def test_who_was_told_of_its_end_is_not_told_again_if_the_next_step_is_interrupted_at_once(
    make_engine: MakeEngine,
) -> None:
    check_told_once(lambda: make_engine(**setting(4)), [engine_core, engine_core_base], check_drained)
