"""Measures the three skills of a checkpoint by greedy generation: `python -m training.evaluate [path]`.

Independent of the engine: transformers loads the saved bf16 file and generates. Lists and texts are drawn from a seed
that training never uses; of every question the trained wordings and the one that was held out are asked.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from training import skills
from training.explain import questions

CHECKPOINT = Path(__file__).parent.parent / "m1_single_request" / "checkpoints" / "tiny-qwen3"
SEED = "evaluate"  # training steps are seeded "<number>/<step>"
PER_SIZE = 50  # instances of every list length and text length
RECALL_SIZES = (1, 3, 10, 20, 30, 40, 44)  # facts; 44 of them are close to 500 tokens
REPEAT_SIZES = (3, 10, 20, 30, 45, 60)  # tokens
REQUIRED = {"explain, trained wordings": 0.95, "explain, unseen wording": 0.50, "recall": 0.95, "repeat": 0.95}


@dataclass(frozen=True)
class Case:
    """One question with the only answer that counts."""

    skill: str
    size: str
    messages: tuple[dict[str, str], ...]
    answer: str


@dataclass(frozen=True)
class Score:
    """How often the whole answer was exactly right."""

    skill: str
    size: str
    right: int
    total: int

    @property
    def share(self) -> float:
        return self.right / self.total


def cases(tokenizer) -> list[Case]:
    """All questions of the evaluation."""
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


def evaluate(path: Path, *, batch_size: int = 50, show_wrong: int = 0) -> list[Score]:
    """Ask everything; returns a score per skill and size. `show_wrong` prints that many wrong answers per skill."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    everything = cases(tokenizer)
    order = sorted(range(len(everything)), key=lambda i: _prompt_length(everything[i], tokenizer))
    right: dict[tuple[str, str], list[bool]] = {(c.skill, c.size): [] for c in everything}
    shown: dict[str, int] = {}
    for first in track(range(0, len(order), batch_size), description="evaluate"):
        batch = [everything[i] for i in order[first : first + batch_size]]
        for case, answer in zip(batch, _answers(model, tokenizer, batch), strict=True):
            right[case.skill, case.size].append(answer == case.answer)
            if answer != case.answer and shown.get(case.skill, 0) < show_wrong:
                shown[case.skill] = shown.get(case.skill, 0) + 1
                Console().print(
                    f"{case.messages[-1]['content']!r}\n  wanted {case.answer!r}\n  got    {answer!r}", markup=False
                )
    return [Score(skill, size, sum(hits), len(hits)) for (skill, size), hits in right.items()]


def _prompt_length(case: Case, tokenizer) -> int:
    return len(tokenizer.encode(case.messages[-1]["content"]))


@torch.inference_mode()
def _answers(model, tokenizer, batch: Sequence[Case]) -> list[str]:
    texts = [
        tokenizer.apply_chat_template(list(case.messages), tokenize=False, add_generation_prompt=True) for case in batch
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False)
    longest = max(len(tokenizer.encode(case.answer)) for case in batch)
    ids = model.generate(**inputs, max_new_tokens=longest + 4, do_sample=False)
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def summary(scores: Sequence[Score]) -> list[Score]:
    """The scores of each skill over all sizes."""
    names = dict.fromkeys(score.skill for score in scores)
    return [
        Score(
            name,
            "all",
            sum(s.right for s in scores if s.skill == name),
            sum(s.total for s in scores if s.skill == name),
        )
        for name in names
    ]


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 if a skill is below what the course needs."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?", default=CHECKPOINT, help="checkpoint directory")
    parser.add_argument("--json", type=Path, help="also write the scores to this file")
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print N wrong answers per skill")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    scores = evaluate(args.path, show_wrong=args.show_wrong)
    table = Table("skill", "size", "exactly right", "share", "needed", title=f"greedy, {args.path.name}")
    for score in [*scores, *(s for s in summary(scores) if s.skill in ("recall", "repeat"))]:
        needed = REQUIRED[score.skill]
        table.add_row(score.skill, score.size, f"{score.right}/{score.total}", f"{score.share:.1%}", f"{needed:.0%}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(score) for score in scores], indent=1) + "\n", encoding="utf-8")
    return int(any(score.share < REQUIRED[score.skill] for score in summary(scores)))


if __name__ == "__main__":
    raise SystemExit(main())
