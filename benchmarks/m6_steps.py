"""A decode step of many requests: m5, m6 on the same text model, and m6 on the model that sees, with and without
pictures in the prompts.

All four decode behind prompts of the same length, one step each in turn. Whoever pays for pictures that nobody brought
would show it here.
"""

import statistics
import time
from collections.abc import Callable
from random import Random
from typing import Any

from benchmarks.m3_workload import ORDINARY_TOKENS
from benchmarks.m6_models import LARGE, QUESTION, Clocks, Engines, Row, image, said
from m6_multimodal_pd import SamplingParams

M5, M6, TEXTS, PICTURES = "m5", "m6", "m6 that sees, texts only", "m6 that sees, a picture in each prompt"
PHASES = ("schedule", "prepare", "forward", "step")


def stepper(engine: Any, prompts: list[list[int]], num_tokens: int) -> Callable[[], Row]:
    """Makes a decode step of these requests whenever it is called: seconds by phase."""
    params = SamplingParams(max_tokens=num_tokens + 16, ignore_eos=True)
    rids = [engine.add_request(prompt, params) for prompt in prompts]
    seen: dict[str, int] = {}
    while len(seen) < len(rids):  # until everybody decodes
        seen |= {rid: 1 for rid, output in engine.step().items() if output.token_ids}

    def step() -> Row:
        with Clocks(engine) as clocks:
            began = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - began
        assert len(outputs) == len(prompts)
        return {**clocks.seconds, "step": seconds}

    return step


def steps(engines: Engines, *, num_requests: int, num_steps: int, seed: int) -> Row:
    """Medians over the steps, which the sides take in turn, in seconds; and the ratios to m5."""
    rng, limits = Random(seed), {"max_num_seqs": num_requests, "max_num_batched_tokens": 2048}
    seeing = engines.seeing(**limits)
    pictures = [
        seeing.chat_prompt([{"role": "user", "content": [image(2000 + number, LARGE), said(QUESTION)]}])
        for number in range(num_requests)
    ]
    texts = [[rng.randrange(*ORDINARY_TOKENS) for _ in prompt] for prompt in pictures]
    other = engines.seeing({"max_items": 15}, **limits)  # another engine, for the other side; nothing reads the limit
    sides = {
        M5: stepper(engines.m5(**limits), texts, num_steps),
        M6: stepper(engines.text(**limits), texts, num_steps),
        TEXTS: stepper(seeing, texts, num_steps),
        PICTURES: stepper(other, pictures, num_steps),
    }
    found: dict[str, list[Row]] = {name: [] for name in sides}
    for _ in range(num_steps):
        for name, step in sides.items():
            found[name].append(step())
    rows: Row = {
        name: {phase: statistics.median(row[phase] for row in taken) for phase in PHASES}
        for name, taken in found.items()
    }
    for row in rows.values():
        row["times_m5"] = {phase: row[phase] / rows[M5][phase] for phase in PHASES}
    return {"requests": num_requests, "steps": num_steps, "prompt_tokens": len(pictures[0]), "sides": rows}
