"""What guesses are worth: tokens/s against no guesses, for three kinds of text, one request at a time and eight.

The questions are drawn as training draws them, from a seed of their own: the answer to `repeat` stands in the prompt,
that to `recall` does in part, that to `explain` only in the weights. All sides answer the same questions, greedily, to
the end, from an empty cache; and all must give the same answers.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.m5_models import Engines
from m5_chunked_prefill_spec import LLMEngine, SamplingParams, SpeculativeConfig
from m5_chunked_prefill_spec.config import DEFAULT_DRAFT_MODEL
from training import skills
from training.draft_cost import measure_cost
from training.explain import questions

KINDS = ("repeat", "explain", "recall")
REPEATED, FACTS = (30, 45, 60), 20  # tokens of a text, facts of a list
NONE = "no guesses"
MAX_TOKENS = 160
Row = dict[str, Any]


def prompts(tokenizer: Any, number: int, seed: int) -> dict[str, list[list[int]]]:
    """So many questions of every kind, in the chat template."""
    rng = Random(f"benchmark/{seed}")
    asked = {
        "repeat": [skills.repeat_turn(rng, REPEATED[i % len(REPEATED)], tokenizer)[0] for i in range(number)],
        "explain": [skills.explain_turn(rng, question)[0] for question in rng.sample(questions(), number)],
        "recall": [],
    }
    for _ in range(number):
        [(question, _)], listed = skills.recall_turns(rng, FACTS, asked=1)
        asked["recall"].append(f"{listed} {question}")

    def ids(text: str) -> list[int]:
        messages = [{"role": "user", "content": text}]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(whole, add_special_tokens=False)["input_ids"])

    return {kind: [ids(text) for text in texts] for kind, texts in asked.items()}


def configs(draft: Any) -> dict[str, SpeculativeConfig]:
    """All ways to guess, by name. `draft`: the draft model; None leaves it out."""
    found = {NONE: SpeculativeConfig()}
    for k in (4, 8):
        found[f"ngram, k = {k}"] = SpeculativeConfig(method="ngram", num_speculative_tokens=k)
    for k in (2, 4) if draft is not None else ():
        found[f"draft_model, k = {k}"] = SpeculativeConfig(method="draft_model", num_speculative_tokens=k, model=draft)
    return found


class Answered(NamedTuple):
    """One run of one side."""

    seconds: float
    decode_seconds: float
    """Of them, those after everybody's first token."""
    decode_tokens: int
    """Tokens that came in these."""
    answers: list[tuple[int, ...]]


def answer(engine: LLMEngine, asked: Sequence[list[int]], batch: int) -> Answered:
    """Ask so many at a time, to the end."""
    answers: list[tuple[int, ...]] = []
    seconds, decode_seconds, decode_tokens = 0.0, 0.0, 0
    params = SamplingParams(max_tokens=MAX_TOKENS)
    for first in range(0, len(asked), batch):
        begin = time.perf_counter()
        ids = [engine.add_request(prompt, params) for prompt in asked[first : first + batch]]
        said: dict[str, tuple[int, ...]] = {}
        all_began, known = begin, 0
        while engine.has_unfinished_requests():
            is_late = len(said) == len(ids)
            said |= {rid: output.token_ids for rid, output in engine.step().items() if output.token_ids}
            if not is_late and len(said) == len(ids):
                all_began, known = time.perf_counter(), sum(map(len, said.values()))
        end = time.perf_counter()
        seconds, decode_seconds = seconds + end - begin, decode_seconds + end - all_began
        decode_tokens += sum(map(len, said.values())) - known
        answers += [said[rid] for rid in ids]
    return Answered(seconds, decode_seconds, decode_tokens, answers)


def measured(sides: Mapping[str, LLMEngine], asked: Sequence[list[int]], batch: int, rounds: int) -> Row:
    """All sides in turns, after a round that warms up."""
    found: dict[str, list[Answered]] = {name: [] for name in sides}
    before = {}
    for turn in range(rounds + 1):
        for name, engine in sides.items():
            before[name] = engine.stats()
            answered = answer(engine, asked, batch)
            if turn:
                found[name].append(answered)
    rows = {name: _row(found[name], before[name], engine.stats()) for name, engine in sides.items()}
    none = rows[NONE]
    for name, row in rows.items():
        row["times_none"] = row["tokens_per_second"] / none["tokens_per_second"]
        row["decode_times_none"] = row["decode_tokens_per_second"] / none["decode_tokens_per_second"]
        row["same_answers"] = sum(a == b for a, b in zip(found[name][-1].answers, found[NONE][-1].answers, strict=True))
    return rows


def _row(rounds: Sequence[Answered], before: Any, after: Any) -> Row:
    """Speeds are medians; the counts of every round are the same, so the last round's stand here."""
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    verified = after.num_verifications - before.num_verifications
    num_tokens = sum(map(len, rounds[-1].answers))
    return {
        "tokens_per_second": num_tokens / median(a.seconds for a in rounds),
        "decode_tokens_per_second": median(a.decode_tokens / a.decode_seconds for a in rounds),
        "tokens": num_tokens,
        "steps": after.num_steps - before.num_steps,
        "drafted": drafted,
        "accepted": accepted,
        "accept_length": 1 + accepted / verified if verified else 1.0,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
    }


def speculation(
    engines: Engines, *, number: int, batches: Sequence[int], rounds: int, seed: int, draft: Any = DEFAULT_DRAFT_MODEL
) -> Row:
    """Every kind of text in batches of every size. `draft`: a checkpoint; None: no draft model is measured."""
    sides = {name: engines.m5(config, prefix_cache="chunk") for name, config in configs(draft).items()}
    asked = prompts(sides[NONE].engine_core.input_processor.tokenizer, number, seed)
    part: Row = {
        "prompts": number,
        "prompt_tokens": {kind: median(map(len, asked[kind])) for kind in KINDS},
        "rounds": rounds,
        "draft": None,
        "kinds": {
            kind: {str(batch): measured(sides, asked[kind], batch, rounds) for batch in batches} for kind in KINDS
        },
    }
    if draft is not None:
        part["draft"] = draft_costs(engines, Path(draft), rounds)
    return part | {"best": {kind: best(by_batch) for kind, by_batch in part["kinds"].items()}}


def best(by_batch: Row) -> Row:
    """The fastest side of each method, by batch."""
    return {
        batch: {
            method: max(row["times_none"] for name, row in rows.items() if name.startswith(method))
            for method in ("ngram", "draft_model")
            if any(name.startswith(method) for name in rows)
        }
        for batch, rows in by_batch.items()
    }


def draft_costs(engines: Engines, draft: Path, rounds: int) -> Row:
    """The draft model beside its target: parameters, and what a token costs."""
    cost = measure_cost(draft, threads=[torch.get_num_threads()], rounds=80 * rounds)[0]
    seconds, sizes = {"target": cost.target, "draft": cost.draft}, engines.num_parameters()
    return {
        "parameters": {"target": sizes[0], "draft": sizes[-1]},
        "seconds": seconds,
        "parameter_share": sizes[-1] / sizes[0],
        "cost_share": cost.ratio,
    }
