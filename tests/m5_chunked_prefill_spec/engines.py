"""Helpers of m5's engine tests: settings in a line, guesses of every quality, and what memory must look like.

What must hold of memory is what must hold in m4, so it is m4's helpers that look.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from m4_radix_cache.request import Req
from m5_chunked_prefill_spec import CostTable, LLMEngine, SamplingParams, SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.scheduler import Scheduler
from tests.m4_radix_cache.engines import (
    check_answers as check_answers,
    check_drained as check_drained,
    check_flushed as check_flushed,
    check_memory as check_memory,
    check_step as check_m4_step,
    ids as ids,
    run as run_m4,
    runner_of as runner_of,
    scheduler_of as scheduler_of,
    setting as m4_setting,
    submit as submit,
)
from tests.support.engines import (
    MakeEngine as MakeEngine,
    Recorder as Recorder,
    Remembered as Remembered,
    greedy as greedy,
)

VOCAB_SIZE = 4096
COSTS = CostTable((1, 16, 256), (1.0, 1.5, 8.0), context_ms=0.1)
"""A table, so that engines of tests need not measure."""
SHARED = (
    *("tokens", "page_size", "cache", "eviction_policy", "policy", "conservativeness", "debug"),
    *("host_memory_bytes", "write_policy", "disk_path", "prefetch_policy"),
)
"""Arguments of m4's `setting`."""


def setting(
    max_num_seqs: int = 4,
    max_num_batched_tokens: int | None = None,
    *,
    method: Any = None,
    drafts: int = 4,
    draft_model: Any = None,
    **more: Any,
) -> dict[str, Any]:
    """The keywords of an engine with these limits, as m4's, and other fields of `SchedulerConfig`.

    `method`: who guesses, and at most so many `drafts`.
    """
    guesses: dict[str, Any] = {}
    if method is not None:
        guesses = {"num_speculative_tokens": drafts}
        if method == "draft_model":
            guesses["model"] = draft_model
        if method == "ngram":  # random models repeat little
            guesses["prompt_lookup_min"] = 1
    shared = {name: more.pop(name) for name in SHARED if name in more}
    costs = COSTS if more.get("target_gap_ms") else None
    scheduler_class = partial(SchedulerConfig, **{"cost_table": costs} | more)
    keywords = m4_setting(max_num_seqs, max_num_batched_tokens, scheduler_class=scheduler_class, **shared)
    return keywords | {"speculative_config": SpeculativeConfig(method=method, **guesses)}


def check_step(engine: Any) -> None:
    """What must hold after every step that was not interrupted."""
    check_m4_step(engine)
    scheduler: Scheduler = engine.engine_core.scheduler
    for req in scheduler.running:
        if req is not scheduler.chunked_req:
            assert req.kv_committed_len == len(req.origin_input_ids) + len(req.output_ids) - 1
        assert req.kv_allocated_len >= req.kv_committed_len


run = partial(run_m4, check=check_step)
"""Step until nothing is left, looking at the engine after every step; the last output of every request."""


# --- proposers --------------------------------------------------------------------------------------------------------


class Guessing:
    """Proposes random tokens, as many as it may, or fewer: none is ever right but by chance."""

    def __init__(self, config: Any = None) -> None:
        self.rng = Random(3)

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
        return [
            [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.randint(0, limit) if limit else 0)]
            for limit in limits
        ]


def knowing(answers: Mapping[tuple[int, ...], Sequence[int]], *, wrong_every: int = 0) -> Any:
    """A proposer that knows what will be said to each prompt; every so many tokens it errs."""

    class Knowing(Guessing):
        def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[list[int]]:
            return [self.next_of(req, limit) for req, limit in zip(reqs, limits, strict=True)]

        def next_of(self, req: Req, limit: int) -> list[int]:
            start = len(req.output_ids)
            known = list(answers.get(tuple(req.origin_input_ids), ()))
            found = known[start : start + limit]
            for offset in range(len(found)):
                if wrong_every and (start + offset) % wrong_every == wrong_every - 1:
                    found[offset] = (found[offset] + 1) % VOCAB_SIZE
            return found

    return Knowing


def guessing_engine(
    make_engine: MakeEngine,
    answers: Mapping[tuple[int, ...], Sequence[int]],
    drafts: int = 4,
    wrong_every: int = 3,
    **more: Any,
) -> LLMEngine:
    """An engine with mostly right guesses."""
    own = {name: more.pop(name) for name in ("max_model_len", "eos_token_ids") if name in more}
    parts = {"proposer": knowing(answers, wrong_every=wrong_every), **more.pop("parts", {})}
    return make_engine(parts, **own, **setting(8, method="ngram", drafts=drafts, **more))


def ask_all(engine: LLMEngine, asked: Iterable[tuple[list[int], SamplingParams]]) -> list[Any]:
    """The answers to all of these at once, in their order."""
    rids = [engine.add_request(prompt, params) for prompt, params in asked]
    outputs = run(engine)
    return [outputs[rid] for rid in rids]


def ask_in_turn(engine: LLMEngine, asked: Iterable[tuple[list[int], SamplingParams]]) -> list[Any]:
    """The same, if one more comes before each step."""
    rids, outputs = [], {}
    for prompt, params in asked:
        rids.append(engine.add_request(prompt, params))
        outputs |= engine.step()
        check_step(engine)
    outputs |= run(engine)
    return [outputs[rid] for rid in rids]
