"""Measures the skills of the shipped checkpoints by greedy generation: `python -m training.evaluate [path ...]`.

Independent of the engine: transformers loads the saved bf16 file and generates. Lists, texts and scenes are drawn from
seeds that training never uses; of every question the trained wordings and the one that was held out are asked. A model
that sees is asked about pictures and clips (`training/evaluate_vision.py`), and must not have forgotten its text
skills: those of tiny-qwen3 are measured beside them.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.table import Table

from training import evaluate_vision, skills
from training.explain import questions
from training.scoring import Answering, Case, Score, ask, summary

CHECKPOINT = Path(__file__).parent.parent / "m1_single_request" / "checkpoints" / "tiny-qwen3"
SEED = "evaluate"  # training steps are seeded "<number>/<step>"
PER_SIZE = 50  # instances of every list length and text length
RECALL_SIZES = (1, 3, 10, 20, 30, 40, 44)  # facts; 44 of them are close to 500 tokens
REPEAT_SIZES = (3, 10, 20, 30, 45, 60)  # tokens
REQUIRED = {"explain, trained wordings": 0.95, "explain, unseen wording": 0.50, "recall": 0.95, "repeat": 0.95}
MAY_FORGET = 0.03  # of the share of text answers that tiny-qwen3 has right, when it learns to see


def cases(tokenizer) -> list[Case]:
    """All questions of the evaluation that are text."""
    found = []
    for question in questions():
        for wording in question.asked:
            found.append(Case("explain, trained wordings", "", _user(wording), question.answer))
        found.append(Case("explain, unseen wording", "", _user(question.held_out), question.answer))
    for size in RECALL_SIZES:
        rng = Random(f"{SEED}/recall/{size}")
        for _ in range(PER_SIZE):
            [(question, answer)], listed = skills.recall_turns(rng, size, asked=1)
            found.append(Case("recall", f"{size} facts", _user(f"{listed} {question}"), answer))
    for size in REPEAT_SIZES:
        rng = Random(f"{SEED}/repeat/{size}")
        for _ in range(PER_SIZE):
            question, answer = skills.repeat_turn(rng, size, tokenizer)
            found.append(Case("repeat", f"up to {size} tokens", _user(question), answer))
    return found


def _user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def evaluate(path: Path, *, show_wrong: int = 0) -> list[Score]:
    """Ask everything that the model is for; returns a score per skill and size, those of vision first."""
    if not sees(path):
        answering = Answering(path)
        return ask(answering, cases(answering.tokenizer), show_wrong=show_wrong, what=path.name)
    seeing = evaluate_vision.Seeing(path)
    everything = (evaluate_vision.cases(), cases(seeing.tokenizer))
    return [score for some in everything for score in ask(seeing, some, show_wrong=show_wrong, what=path.name)]


def sees(path: Path) -> bool:
    """Whether the directory holds a model that is given pictures."""
    return "vision_config" in json.loads((path / "config.json").read_text(encoding="utf-8"))


def required(path: Path, text_model: Sequence[Score]) -> dict[str, float]:
    """The share of right answers that is needed in each skill. `text_model` is what tiny-qwen3 reaches."""
    if not sees(path):
        return REQUIRED
    kept = {score.skill: score.share - MAY_FORGET for score in summary(text_model) if score.skill in REQUIRED}
    return evaluate_vision.REQUIRED | kept


def below(scores: Sequence[Score], needed: Mapping[str, float]) -> list[str]:
    """The skills that are worse than they must be."""
    return [score.skill for score in summary(scores) if score.share < needed[score.skill] - 1e-9]


def table(name: str, scores: Sequence[Score], needed: Mapping[str, float]) -> Table:
    """Every score, and that of a whole skill below its sizes."""
    found = Table("skill", "size", "exactly right", "share", "needed", title=f"greedy, {name}")
    for total in summary(scores):
        sizes = [score for score in scores if score.skill == total.skill]
        for score in [*sizes, total] if len(sizes) > 1 else sizes:
            right = f"{score.right}/{score.total}"
            found.add_row(score.skill, score.size, right, f"{score.share:.1%}", f"{needed[score.skill]:.1%}")
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the tables; exit status 1 if a skill is below what the course needs."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__.splitlines()[0])
    shipped = (CHECKPOINT, evaluate_vision.CHECKPOINT)
    parser.add_argument("paths", type=Path, nargs="*", default=shipped, help="checkpoints; default: both that ship")
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print N wrong answers per skill")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    measured = {path: evaluate(path, show_wrong=args.show_wrong) for path in args.paths}
    text_model: Sequence[Score] = ()
    if any(sees(path) for path in args.paths):
        text_model = measured.get(CHECKPOINT) or evaluate(CHECKPOINT)
    failed = False
    for path, scores in measured.items():
        needed = required(path, text_model)
        Console().print(table(path.name, scores, needed))
        failed |= bool(below(scores, needed))
    if args.json:
        rows = [{"checkpoint": path.name, **asdict(score)} for path, scores in measured.items() for score in scores]
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
