"""Streams of text beside prompts with pictures: what the encoder's budget does to the gaps, and to throughput.

Two prompts of four large pictures each arrive whenever the streams have got so many tokens more. The budget of tokens
is large enough for both, so what cuts them is the encoder's budget alone. Prompts are made before the clock runs: what
is measured is steps.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.m3_workload import ORDINARY_TOKENS
from benchmarks.m5_gaps import ANSWER, STREAM_PROMPT, Served, summary
from benchmarks.m6_models import LARGE, QUESTION, Engines, Row, image, said
from m6_multimodal_pd import LLMEngine, SamplingParams

UNLIMITED = 2**20
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 32, 1024


@dataclass(frozen=True)
class Traffic:
    """Who comes, and when."""

    num_streams: int = 4
    stream_tokens: int = 100
    every: int = 12
    """Prompts arrive whenever every stream, on average, has got so many tokens more."""
    at_once: int = 2
    num_pictures: int = 4
    """In each of these prompts."""
    prompt_tokens: int = 0
    """Of each of them, pictures included; known when they are made."""
    seed: int = 0

    @property
    def num_prompts(self) -> int:
        """Prompts that arrive while the streams run; none at their very end."""
        return (self.stream_tokens // self.every - 1) * self.at_once

    @property
    def total_tokens(self) -> int:
        """Tokens of all prompts and answers."""
        streams = self.num_streams * (STREAM_PROMPT + self.stream_tokens)
        return streams + self.num_prompts * (self.prompt_tokens + ANSWER)


def serve(engine: LLMEngine, traffic: Traffic, prompts: Sequence[list[int]]) -> Served:
    """Run it until nobody is left, from cold caches."""
    rng, served, counts = Random(traffic.seed), Served(), dict[str, int]()
    engine.flush_cache()
    gc.collect()

    def add(request_id: str, prompt: list[int], num_tokens: int) -> None:
        engine.add_request(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True), request_id=request_id)

    begin = time.perf_counter()
    for number in range(traffic.num_streams):
        served.streams[f"stream-{number}"], counts[f"stream-{number}"] = [], 0
        add(f"stream-{number}", [rng.randrange(*ORDINARY_TOKENS) for _ in range(STREAM_PROMPT)], traffic.stream_tokens)
    while engine.has_unfinished_requests():
        turns = sum(counts.values()) // (traffic.num_streams * traffic.every)
        while len(served.arrived) < min(turns * traffic.at_once, traffic.num_prompts):
            name = f"prompt-{len(served.arrived)}"
            served.arrived[name] = time.perf_counter() - begin
            add(name, prompts[len(served.arrived) - 1], ANSWER)
        outputs = engine.step()
        now = time.perf_counter() - begin
        for name, output in outputs.items():
            if output.error is not None:
                raise output.error
            if name in counts:
                served.streams[name] += [now] * (len(output.token_ids) - counts[name])
                counts[name] = len(output.token_ids)
            elif output.token_ids:
                served.first_tokens.setdefault(name, now)
    served.seconds = time.perf_counter() - begin
    assert len(served.first_tokens) == traffic.num_prompts
    return served


def gaps(engines: Engines, *, budgets: Sequence[int], rounds: int, stream_tokens: int) -> Row:
    """Gaps and throughput by the encoder's budget; the last of the `budgets` is none."""
    limits: Row = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}
    sides = {named(budget): engines.seeing({"encoder_budget": budget}, **limits) for budget in budgets}
    traffic = Traffic(stream_tokens=stream_tokens)
    maker = next(iter(sides.values()))
    prompts = [maker.chat_prompt(question(number, traffic.num_pictures)) for number in range(traffic.num_prompts)]
    traffic = Traffic(stream_tokens=stream_tokens, prompt_tokens=len(prompts[0]))
    found = measured(sides, traffic, prompts, rounds)
    base = found[named(budgets[-1])]
    for (name, row), budget in zip(found.items(), budgets, strict=True):
        row["budget"] = budget
        row["p95_share"] = row["p95"] / base["p95"]
        row["longest_share"] = row["longest"] / base["longest"]
        row["throughput_share"] = row["tokens_per_second"] / base["tokens_per_second"]
        row["name"] = name
    return {
        "traffic": vars(traffic) | {"answer": ANSWER, "num_prompts": traffic.num_prompts, "size": LARGE},
        "rounds": rounds,
        "budgets": found,
    }


def question(number: int, num_pictures: int) -> list[Row]:
    """A question about so many pictures that nobody else has."""
    pictures = [image(1000 + number * num_pictures + place, LARGE) for place in range(num_pictures)]
    return [{"role": "user", "content": [*pictures, said(QUESTION)]}]


def named(budget: int) -> str:
    """A budget in words."""
    return "none" if budget == UNLIMITED else f"{budget:,} tokens"


def measured(sides: Mapping[str, LLMEngine], traffic: Traffic, prompts: Sequence[list[int]], rounds: int) -> Row:
    """All sides in turns, after a round that warms up."""
    runs: dict[str, list[Served]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, engine in sides.items():
            before: Any = engine.stats()
            served = serve(engine, traffic, prompts)
            after: Any = engine.stats()
            if turn:
                runs[name].append(served)
            assert after.num_encoded_items - before.num_encoded_items == traffic.num_prompts * traffic.num_pictures
    return {name: summary(served, traffic) for name, served in runs.items()}
