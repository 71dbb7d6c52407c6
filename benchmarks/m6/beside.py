"""Pictures beside texts: the gaps of streams by the encoder's budget, and the cost of a decode step beside m5's."""

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from benchmarks import streams
from benchmarks.engines import EMBEDDED, Engines
from benchmarks.lesson import SEED, Row
from benchmarks.m6.answers import QUESTION
from benchmarks.texts import LARGE, picture_message
from benchmarks.timing import Clocks, in_turns, medians, ratio
from benchmarks.workloads import tokens
from m6_multimodal_pd import SamplingParams

UNLIMITED = 2**20
NUM_PICTURES = 4  # in each prompt that arrives
M5, M6, TEXTS, PICTURES = "m5", "m6", "m6 that sees, texts only", "m6 that sees, a picture in each prompt"
PHASES = ("schedule", "prepare", "forward", "step")


def gaps(engines: Engines, budgets: Sequence[int], *, rounds: int, stream_tokens: int) -> Row:
    """Measure gaps and throughput by the encoder's budget; the last of the `budgets` is no limit.

    Two prompts of four large pictures each arrive whenever the streams have got 12 tokens more. The budget of tokens is
    large enough for both, so the encoder's budget alone cuts them.
    """
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 1024}
    names = {budget: "none" if budget == UNLIMITED else f"{budget:,} tokens" for budget in budgets}
    sides = {
        name: engines("m6", multimodal={"encoder_budget": budget}, scheduler=limits) for budget, name in names.items()
    }
    traffic = streams.Traffic(num_streams=4, stream_tokens=stream_tokens, at_once=2)
    maker, numbers = sides[names[budgets[-1]]], range(1000, 1000 + traffic.num_prompts)
    prompts = [maker.chat_prompt(picture_message(number, QUESTION, count=NUM_PICTURES)) for number in numbers]
    found = streams.measured(sides, traffic.workload(prompts), traffic.num_streams, rounds)
    streams.compare(found, found[names[budgets[-1]]])
    for row, budget in zip(found.values(), budgets, strict=True):
        row["budget"] = budget
    described = traffic.describe() | {"num_pictures": NUM_PICTURES, "prompt_tokens": len(prompts[0]), "size": LARGE}
    return {"traffic": described, "rounds": rounds, "budgets": found}


def stepper(engine: Any, prompts: list[list[int]], num_tokens: int) -> Callable[[], Row]:
    """Return a function that makes a decode step of these requests, and returns seconds by phase."""
    params = SamplingParams(max_tokens=num_tokens + 16, ignore_eos=True)
    rids = [engine.add_request(prompt, params) for prompt in prompts]
    seen: set[str] = set()
    while len(seen) < len(rids):  # until all of them decode
        seen |= {rid for rid, output in engine.step().items() if output.token_ids}
    core = engine.engine_core
    runner = core.executor.worker.model_runner

    def step() -> Row:
        with Clocks(schedule=core.scheduler, prepare=runner, forward=runner) as clocks:
            began = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - began
        assert len(outputs) == len(prompts)
        return {**clocks.seconds, "step": seconds}

    return step


def steps(engines: Engines, num_requests: int, num_steps: int) -> Row:
    """Measure a decode step of m5, of m6 on the same text model, and of m6 on the model that sees, with and without
    pictures in the prompts. All decode behind prompts of the same length, one step each in turn."""
    rng, limits = Random(SEED), {"max_num_seqs": num_requests, "max_num_batched_tokens": 2048}
    seeing = engines("m6", scheduler=limits)
    other = engines("m6", scheduler=limits, multimodal={"max_items": 15})  # another engine; nothing reads the limit
    pictures = [seeing.chat_prompt(picture_message(2000 + number, QUESTION)) for number in range(num_requests)]
    texts = [tokens(rng, len(prompt)) for prompt in pictures]
    sides = {
        M5: stepper(engines("m5", EMBEDDED, scheduler=limits), texts, num_steps),
        M6: stepper(engines("m6", EMBEDDED, scheduler=limits), texts, num_steps),
        TEXTS: stepper(seeing, texts, num_steps),
        PICTURES: stepper(other, pictures, num_steps),
    }
    rows: Row = {}
    for name, taken in in_turns(sides, rounds=num_steps).items():
        phases = {phase: [step[phase] for step in taken] for phase in PHASES}
        rows[name] = medians(phases) | {"phases": phases}
    base = rows[M5]["phases"]
    for row in rows.values():
        row["times_m5"] = {phase: ratio(own, base[phase]) for phase, own in row.pop("phases").items()}
    return {"requests": num_requests, "steps": num_steps, "prompt_tokens": len(pictures[0]), "sides": rows}
