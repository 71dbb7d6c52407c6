"""Measures how well a draft model guesses its target: `python -m training.evaluate_draft [path]`.

Independent of the engine: transformers loads both saved bf16 files, computes in fp32, and the target answers greedily.
The draft then reads those answers once. Where it would have said the same token, it agrees. That is all that is needed:
as long as its guesses agree, guessing by itself is reading the target's answer; and after the first that does not, the
rest of them are thrown away.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from training.evaluate import CHECKPOINT as TARGET, cases
from training.scoring import Case

ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / "m5_chunked_prefill_spec" / "checkpoints" / "tiny-qwen3-draft"
NUM_DRAFTS = 4  # guesses per verification step
REQUIRED = {"explain, unseen wording": 3.5, "recall": 2.0, "repeat": 2.0}  # tokens per step; nothing else is asked
BATCH_SIZE = 50


@dataclass(frozen=True)
class Acceptance:
    """How often the draft agreed with the target, in one skill."""

    skill: str
    num_answers: int
    tokens: int
    agreed: int
    """Tokens of the answers that the draft would have said, too."""
    drafted_tokens: int
    """The same tokens without the first of each answer: the prompt's own forward gives it, before any guess."""
    steps: int
    """Verification steps in which they came, with `NUM_DRAFTS` guesses each."""
    fewest_steps: int
    """As many as a draft that is never wrong would need."""

    @property
    def share(self) -> float:
        return self.agreed / self.tokens

    @property
    def tokens_per_step(self) -> float:
        return self.drafted_tokens / self.steps

    @property
    def most_per_step(self) -> float:
        return self.drafted_tokens / self.fewest_steps


def verification_steps(agrees: Sequence[bool], num_drafts: int = NUM_DRAFTS) -> int:
    """The steps in which these tokens come: each accepts the guesses up to the first wrong one, and adds a token."""
    at = steps = 0
    while at < len(agrees):
        accepted = 0
        while accepted < num_drafts and at + accepted < len(agrees) and agrees[at + accepted]:
            accepted += 1
        at += accepted + 1
        steps += 1
    return steps


def measure(skill: str, rows: Sequence[Sequence[bool]]) -> Acceptance:
    """Add up the answers of a skill; each row says for every token of an answer whether the draft agrees."""
    return Acceptance(
        skill=skill,
        num_answers=len(rows),
        tokens=sum(map(len, rows)),
        agreed=sum(map(sum, rows)),
        drafted_tokens=sum(len(row) - 1 for row in rows),
        steps=sum(verification_steps(row[1:]) for row in rows),
        fewest_steps=sum(verification_steps([True] * (len(row) - 1)) for row in rows),
    )


def chosen_cases(tokenizer: PreTrainedTokenizerBase) -> list[Case]:
    """The cases that neither training has seen."""
    return [case for case in cases(tokenizer) if case.skill in REQUIRED]


@torch.inference_mode()
def answers(target: Any, tokenizer: Any, batch: Sequence[Case]) -> list[tuple[list[int], list[int]]]:
    """Prompt and greedy answer of every case, as token ids; the answer with its end token."""
    prompts = [
        tokenizer.apply_chat_template(list(case.messages), add_generation_prompt=True, return_dict=False)
        for case in batch
    ]
    inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    longest = max(len(tokenizer.encode(case.answer)) for case in batch)
    ids = target.generate(**inputs, max_new_tokens=longest + 4, do_sample=False)
    said = ids[:, inputs["input_ids"].shape[1] :].tolist()
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    lengths = [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in said]
    return [(prompt, row[:length]) for prompt, row, length in zip(prompts, said, lengths, strict=True)]


@torch.inference_mode()
def agreement(draft: Callable[..., Any], dialogues: Sequence[tuple[list[int], list[int]]]) -> list[list[bool]]:
    """For every token of every answer: would the draft have said it, having read what stands before it?"""
    rows = [torch.tensor(prompt + answer) for prompt, answer in dialogues]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # what stands behind a text does not change it
    guesses = draft(input_ids=ids, use_cache=False).logits.argmax(-1)
    return [
        (guesses[i, len(prompt) - 1 : len(prompt) - 1 + len(answer)] == torch.tensor(answer)).tolist()
        for i, (prompt, answer) in enumerate(dialogues)
    ]


def evaluate_draft(path: Path, target_path: Path = TARGET) -> list[Acceptance]:
    """Let the target answer every chosen case, and the draft read along; returns the acceptance of every skill."""
    tokenizer = AutoTokenizer.from_pretrained(target_path, padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()
    draft = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    chosen = sorted(chosen_cases(tokenizer), key=lambda case: len(case.messages[-1]["content"]))
    rows: dict[str, list[list[bool]]] = {skill: [] for skill in REQUIRED}
    for first in track(range(0, len(chosen), BATCH_SIZE), description="evaluate draft"):
        batch = chosen[first : first + BATCH_SIZE]
        for case, agrees in zip(batch, agreement(draft, answers(target, tokenizer, batch)), strict=True):
            rows[case.skill].append(agrees)
    return [measure(skill, agrees) for skill, agrees in rows.items()]


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 if a skill is below what the course needs."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate_draft", description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?", default=CHECKPOINT, help="checkpoint directory of the draft")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    found = evaluate_draft(args.path)
    columns = ("skill", "answers", "tokens agreed", "share", "tokens per step", "best possible", "needed")
    table = Table(*columns, title=f"greedy, {NUM_DRAFTS} guesses, {args.path.name}")
    for a in found:
        agreed, needed = f"{a.agreed}/{a.tokens}", f"{REQUIRED[a.skill]:.1f}"
        table.add_row(a.skill, str(a.num_answers), agreed, f"{a.share:.1%}",
                      f"{a.tokens_per_step:.2f}", f"{a.most_per_step:.2f}", needed)  # fmt: skip
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(a) for a in found], indent=1) + "\n", encoding="utf-8")
    return int(any(a.tokens_per_step < REQUIRED[a.skill] for a in found))


if __name__ == "__main__":
    raise SystemExit(main())
