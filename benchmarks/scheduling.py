"""What scheduling costs in a decode step of many requests: the one method of all milestones.

Real engines, whose model is replaced: a step is scheduled, its tensors are made, every request gets the same token, and
the step is committed. No trace has a reader. The engines take turns, step by step.
"""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.engines import EMBEDDED, Engines
from benchmarks.serving import request_params
from benchmarks.timing import Clocks, in_turns
from benchmarks.workloads import Request
from m3_paged_attention.outputs import ModelRunnerOutput
from m4_radix_cache.forward_batch import ForwardBatch

NUM_SEQUENCES = 256
PROMPT_LENS = range(10, 50)
TOKEN = 1000
FIRST_NEW = 2000
"""Tokens from here on are in no prompt."""
Row = dict[str, Any]
TokensOf = Callable[[int], list[int]]
"""The tokens that every request gets in a step, by the step's number."""


class WithoutModel:
    """An engine of m3 or later whose steps compute nothing. Calling it makes a step and returns seconds by phase."""

    def __init__(self, engine: Any, num_tokens: int, tokens_of: TokensOf = lambda number: [TOKEN]) -> None:
        self.engine, self.tokens_of, self.number = engine, tokens_of, 0
        core = engine.engine_core
        self.runner, self.decide = core.executor.worker.model_runner, core.scheduler.schedule
        core.scheduler.schedule, core.executor.execute_model = lambda: self.schedule(), self.execute
        self.watched = {"schedule": self, "make_tensors": self, "update_from_output": core.scheduler}
        for number in range(NUM_SEQUENCES):
            length = PROMPT_LENS[number % len(PROMPT_LENS)]
            prompt = [number + 300, *range(FIRST_NEW - length + 1, FIRST_NEW)]
            engine.add_request(prompt, request_params(engine, Request(prompt, num_tokens)))

    def schedule(self) -> Any:
        """Decide on a step, and complete its batch (m4 and later)."""
        batch = self.decide()
        if hasattr(batch, "get_model_worker_batch"):
            batch.get_model_worker_batch()
        return batch

    def execute(self, batch: Any) -> ModelRunnerOutput:
        """Make the tensors of a step, and return the same tokens for all its requests."""
        self.make_tensors(batch)
        ids, tokens = list(getattr(batch, "rids", None) or batch.num_scheduled_tokens), self.tokens_of(self.number)
        assert len(ids) == NUM_SEQUENCES, f"a step of {len(ids)} requests"
        return ModelRunnerOutput(ids, [list(tokens) for _ in ids], [[None] * len(tokens)] * len(ids))

    def make_tensors(self, batch: Any) -> Any:
        """Prepare the inputs of a forward, as the runner does."""
        if hasattr(self.runner, "input_batch"):  # m3
            return self.runner.prepare_inputs(self.runner.input_batch.update(batch))
        if hasattr(self.runner, "prepare"):  # from m5 on
            return self.runner.prepare(*self.runner.drafted(batch))
        return ForwardBatch.init_new(batch, self.runner)

    def __call__(self) -> Row:
        with Clocks(**self.watched) as clocks:
            self.engine.step()
        self.number += 1
        names = {"schedule": "schedule", "update": "update_from_output", "prepare": "make_tensors"}
        return {phase: clocks.seconds[name] for phase, name in names.items()}


def scheduling(sides: Mapping[str, Callable[[], Row]], *, num_steps: int) -> Row:
    """Return medians over the decode steps, which the sides take in turn, in seconds per sequence."""
    steps = in_turns(sides, rounds=num_steps - 1)  # without the first one, which has the prompts
    found = {name: _medians(own) for name, own in steps.items()}
    return {"sequences": NUM_SEQUENCES, "steps": num_steps - 1, "sides": found}


def _medians(steps: list[Row]) -> Row:
    def of(*phases: str) -> float:
        return statistics.median(sum(step[phase] for phase in phases) for step in steps) / NUM_SEQUENCES

    both = of("schedule", "update")
    return {"schedule": of("schedule"), "update": of("update"), "prepare": of("prepare")} | {
        "schedule_and_update": both,
        "schedule_and_update_us": both * 1e6,
    }


def engines_without_model(num_steps: int) -> Engines:
    """Return engines with room for all sequences and `num_steps` tokens of each."""
    max_model_len = PROMPT_LENS.stop + num_steps + 2
    return Engines(EMBEDDED, max_model_len=max_model_len, kv_bytes=NUM_SEQUENCES * (max_model_len + 32) * 4096)


def milestones(*names: str, num_steps: int) -> Row:
    """Measure the engines of milestones as they are."""
    with engines_without_model(num_steps) as engines:
        sides = {name: WithoutModel(engines(name, scheduler=LIMITS), num_steps + 1) for name in names}
        return scheduling(sides, num_steps=num_steps)


LIMITS = {"max_num_seqs": NUM_SEQUENCES, "max_num_batched_tokens": NUM_SEQUENCES * PROMPT_LENS.stop}
