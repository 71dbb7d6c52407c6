"""Speculation against no guesses: tokens/s for three kinds of text, one request at a time and eight.

All sides answer the same questions, greedily, to the end, without a prefix cache; and all must give the same answers.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.engines import Engines
from benchmarks.lesson import SEED, Row
from benchmarks.serving import Served, num_same, serve
from benchmarks.texts import KINDS
from benchmarks.timing import in_turns, ratio
from benchmarks.workloads import Request, Workload, named
from m5_chunked_prefill_spec.config import DEFAULT_DRAFT_MODEL
from training.draft_cost import measure_cost

NONE = "no guesses"
METHODS = {
    "ngram, k = 4": {"method": "ngram", "num_speculative_tokens": 4},
    "ngram, k = 8": {"method": "ngram", "num_speculative_tokens": 8},
    "draft_model, k = 2": {"method": "draft_model", "num_speculative_tokens": 2, "model": DEFAULT_DRAFT_MODEL},
    "draft_model, k = 4": {"method": "draft_model", "num_speculative_tokens": 4, "model": DEFAULT_DRAFT_MODEL},
}


def requests(number: int) -> dict[str, Sequence[Request]]:
    """Return questions of every kind, each answered to its end."""
    return {kind: named(kind, number=number, rate=None, seed=SEED).requests for kind in KINDS}


def answers(engine: Any, asked: Sequence[Request], batch: int) -> list[Served]:
    """Answer so many requests at a time."""
    return [serve(engine, Workload(asked[first : first + batch])) for first in range(0, len(asked), batch)]


def measured(sides: Mapping[str, Any], asked: Sequence[Request], batch: int, rounds: int) -> Row:
    """Measure all sides in turns."""
    calls = {name: lambda engine=engine: answers(engine, asked, batch) for name, engine in sides.items()}
    runs = in_turns(calls, rounds=rounds)
    rows = {name: _row(own) for name, own in runs.items()}
    seconds = {name: [sum(served.seconds for served in one) for one in own] for name, own in runs.items()}
    none, expected = seconds[NONE], [served.answers for served in runs[NONE][-1]]
    for name, row in rows.items():
        row["times_none"] = ratio(none, seconds[name])
        found = [served.answers for served in runs[name][-1]]
        row["same_answers"] = sum(num_same(*pair) for pair in zip(found, expected, strict=True))
    return rows


def _row(rounds: Sequence[list[Served]]) -> Row:
    """Return medians of the speeds; the counts of every round are the same, so those of the last stand here."""

    def count(name: str) -> int:
        return int(sum(served.counts[name] for served in rounds[-1]))

    drafted, accepted, verified = map(count, ("num_draft_tokens", "num_accepted_tokens", "num_verifications"))
    num_tokens = sum(len(tokens) for served in rounds[-1] for tokens in served.answers)
    return {
        "tokens_per_second": num_tokens / median(sum(served.seconds for served in own) for own in rounds),
        "tokens": num_tokens,
        "steps": count("num_steps"),
        "drafted": drafted,
        "accepted": accepted,
        "accept_length": 1 + accepted / verified if verified else 1.0,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
    }


def speculation(engines: Engines, *, number: int, batches: Sequence[int], rounds: int) -> Row:
    """Measure every kind of text in batches of every size, and the costs of the draft model."""
    cache = {"prefix_cache": "chunk"}
    sides = {NONE: engines("m5", cache=cache)}
    sides |= {name: engines("m5", cache=cache, speculative=config) for name, config in METHODS.items()}
    asked = requests(number)
    return {
        "prompts": number,
        "rounds": rounds,
        "draft": draft_costs(engines, rounds),
        "kinds": {
            kind: {str(batch): measured(sides, asked[kind], batch, rounds) for batch in batches} for kind in KINDS
        },
    }


def draft_costs(engines: Engines, rounds: int) -> Row:
    """Measure the draft model beside its target: parameters, and the time of a token."""
    cost = measure_cost(DEFAULT_DRAFT_MODEL, threads=[torch.get_num_threads()], rounds=80 * rounds)[0]
    target, draft = sorted((loaded.num_parameters for loaded in engines.loaded.values()), reverse=True)[:2]
    return {
        "parameters": {"target": target, "draft": draft},
        "seconds": {"target": cost.target, "draft": cost.draft},
        "parameter_share": draft / target,
        "cost_share": cost.ratio,
    }
