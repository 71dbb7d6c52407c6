"""What an evaluation is made of: questions with the only answer that counts, a saved model that answers, the scores.

Independent of the engine: transformers loads the saved bf16 file, computes in fp32, and generates greedily.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class Case:
    """One question with the only answer that counts."""

    skill: str
    size: str
    messages: tuple[dict[str, Any], ...]
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


class Answering:
    """A saved text model that answers cases, many at once."""

    auto_model: Any = AutoModelForCausalLM

    def __init__(self, path: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.model = self.auto_model.from_pretrained(path, dtype=torch.float32).eval()

    def inputs(self, batch: Sequence[Case]) -> dict[str, Tensor]:
        """What the model is given: prompts padded on the left, and the mask that hides the padding."""
        return self.padded([self.prompt(case) for case in batch])

    def prompt(self, case: Case) -> str:
        """The text of a case as the chat template has it."""
        messages = list(case.messages)
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def padded(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        return dict(
            self.tokenizer(
                list(prompts), return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False
            )
        )

    @torch.inference_mode()
    def answers(self, batch: Sequence[Case]) -> list[str]:
        """Greedy answers, with a little more room than the right ones need."""
        inputs = self.inputs(batch)
        longest = max(len(self.tokenizer.encode(case.answer)) for case in batch)
        ids = self.model.generate(**inputs, max_new_tokens=longest + 4, do_sample=False)
        return self.tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def ask(
    answering: Answering, cases: Sequence[Case], *, batch_size: int = 50, show_wrong: int = 0, what: str = "evaluate"
) -> list[Score]:
    """Ask everything; returns a score per skill and size. `show_wrong` prints that many wrong answers per skill."""
    order = sorted(cases, key=lambda case: len(answering.tokenizer.encode(answering.prompt(case))))
    right: dict[tuple[str, str], list[bool]] = {(case.skill, case.size): [] for case in cases}
    shown: dict[str, int] = {}
    for first in track(range(0, len(order), batch_size), description=what):
        batch = order[first : first + batch_size]
        for case, answer in zip(batch, answering.answers(batch), strict=True):
            right[case.skill, case.size].append(answer == case.answer)
            if answer != case.answer and shown.get(case.skill, 0) < show_wrong:
                shown[case.skill] = shown.get(case.skill, 0) + 1
                asked = answering.prompt(case)
                Console().print(f"{asked!r}\n  wanted {case.answer!r}\n  got    {answer!r}", markup=False)
    return [Score(skill, size, sum(hits), len(hits)) for (skill, size), hits in right.items()]


def summary(scores: Iterable[Score]) -> list[Score]:
    """The scores of each skill over all sizes."""
    scores = list(scores)
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
