"""The questions about LLM inference and their answers, read from `data/explain_*.toml`.

Every question has several trained wordings (`asked`) and one that no training step ever sees (`held_out`).
"""

import tomllib
from dataclasses import dataclass
from functools import cache

from training.words import DATA


@dataclass(frozen=True)
class Question:
    """One thing the model can explain: its wordings and the one answer written for it."""

    id: str
    asked: tuple[str, ...]
    held_out: str
    answer: str


@cache
def questions() -> tuple[Question, ...]:
    """Every question of every file, in file order."""
    found = []
    for path in sorted(DATA.glob("explain_*.toml")):
        for row in tomllib.loads(path.read_text(encoding="utf-8"))["question"]:
            found.append(Question(row["id"], tuple(row["asked"]), row["held_out"], row["answer"]))
    return tuple(found)
