"""What prefill-or-decode does to whoever is being answered: the gaps between the tokens of one stream.

In m4 a step runs prompts or decodes, and prompts go first. So a stream gets nothing while prompts arrive: one long
prompt stops it for as long as it takes, and prompts that follow each other step by step stop it as long as they come.
m3 runs both in one step: there every step gives a token, and takes as long as the prompts in it. Arrivals are counted
in steps, so both engines get the same prompts at the same places; the prompts have nothing in common.
"""

import statistics
import time
from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import Any

from benchmarks.m3_workload import ORDINARY_TOKENS
from benchmarks.m4_models import Engines
from m3_paged_attention import SamplingParams

STREAM = "stream"
STREAM_PROMPT = 64
ANSWER = 8  # tokens of everybody else
FIRST_STEP = 20  # when the first prompt arrives; before that the stream runs alone
Arrivals = Mapping[int, int]  # step: length of the prompt that arrives before it
Row = dict[str, Any]


def every(interval: int, length: int, num_steps: int) -> Arrivals:
    """A prompt every so many steps."""
    return {step: length for step in range(FIRST_STEP, num_steps, interval)}


def in_a_row(number: int, length: int) -> Arrivals:
    """So many prompts, one before each of the next steps."""
    return {step: length for step in range(FIRST_STEP, FIRST_STEP + number)}


class Listener:
    """One stream on one engine, and the prompts that arrive while it runs."""

    def __init__(self, engine: Any, *, num_tokens: int, arrivals: Arrivals, seed: int) -> None:
        self.engine, self.num_tokens, self.arrivals, self.seed = engine, num_tokens, arrivals, seed
        self.times: list[float] = []
        """When each token of the stream came, in seconds since the first."""
        self.arrived: list[float] = []
        """When each prompt came."""

    def run(self) -> list[float]:
        """Serve everybody; returns the seconds between the stream's tokens."""
        engine, rng = self.engine, Random(self.seed)
        times: list[float] = []
        arrived: list[float] = []
        if hasattr(engine, "flush_cache"):  # m3 has no cache
            engine.flush_cache()

        def add(request_id: str, length: int, num_tokens: int) -> None:
            prompt = [rng.randrange(*ORDINARY_TOKENS) for _ in range(length)]
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            engine.add_request(prompt, params, request_id=request_id)

        add(STREAM, STREAM_PROMPT, self.num_tokens)
        step = 0
        while engine.has_unfinished_requests():
            if step in self.arrivals:
                arrived.append(time.perf_counter())
                add(f"prompt-{step}", self.arrivals[step], ANSWER)
            outputs = engine.step()
            output = outputs.get(STREAM)
            if output is not None and len(output.token_ids) > len(times):
                times.append(time.perf_counter())
            step += 1
        self.times, self.arrived = [t - times[0] for t in times], [t - times[0] for t in arrived]
        return [after - before for before, after in pairwise(times)]


def gaps(engines: Engines, *, num_tokens: int, lengths: list[int], counts: list[int], rounds: int, seed: int) -> Row:
    """The gaps of a stream in four situations, and the longest one by length and by number of prompts."""
    middle, longest = lengths[len(lengths) // 2], lengths[-1]
    sides = {"m3": engines.m3(max_num_seqs=64), "m4": engines.m4(max_num_seqs=64)}
    situations: dict[str, Arrivals] = {
        "alone": {},
        f"a prompt of {middle:,} tokens every 10 steps": every(10, middle, num_tokens),
        f"a prompt of {longest:,} tokens every 50 steps": every(50, longest, num_tokens),
        f"{counts[-1]} prompts of {middle:,} tokens, step after step": in_a_row(counts[-1], middle),
    }

    def measured(arrivals: Arrivals, number: int) -> Row:
        listeners = {
            name: Listener(engine, num_tokens=number, arrivals=arrivals, seed=seed) for name, engine in sides.items()
        }
        found: dict[str, list[list[float]]] = {name: [] for name in sides}
        for turn in range(rounds + 1):
            for name, listener in listeners.items():
                gaps = listener.run()
                if turn:
                    found[name].append(gaps)
        return {
            name: summary(found[name]) | {"times": listener.times, "arrived": listener.arrived}
            for name, listener in listeners.items()
        }

    short = FIRST_STEP + max(counts) + 10
    return {
        "stream": num_tokens,
        "answer": ANSWER,
        "situations": {name: measured(arrivals, num_tokens) for name, arrivals in situations.items()},
        "by_length": {str(n): _brief(measured(in_a_row(1, n), short)) for n in lengths},
        "by_count": {str(n): _brief(measured(in_a_row(n, middle), short)) for n in counts},
        "by_count_length": middle,
    }


def summary(rounds: list[list[float]]) -> Row:
    """Medians over the rounds, in seconds."""

    def of(statistic: Any) -> float:
        return statistics.median([statistic(gaps) for gaps in rounds])

    return {
        "median": of(statistics.median),
        "p99": of(lambda gaps: sorted(gaps)[min(len(gaps) - 1, int(0.99 * len(gaps)))]),
        "longest": of(max),
        "total": of(sum),
    }


def _brief(sides: Row) -> Row:
    return {name: {key: side[key] for key in ("median", "longest")} for name, side in sides.items()}
