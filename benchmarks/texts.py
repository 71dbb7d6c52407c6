"""Questions and pictures that the embedded models were trained on, drawn from seeds that training does not use."""

import math
from random import Random
from typing import Any

import numpy as np

from training import skills
from training.explain import questions
from training.scenes import CELLS, draw_scene, random_thing

KINDS = ("repeat", "explain", "recall")
REPEATED, FACTS = (30, 45, 60), 20
"""Tokens of a text to be repeated; number of facts in a list."""
SMALL, LARGE = (96, 96), (256, 256)
"""Width and height in pixels: 9 tokens, and 64, the largest that the model's processor does not resize."""


def all_questions(number: int, seed: int) -> dict[str, list[str]]:
    """Draw questions of every kind. The answer to `repeat` stands in the prompt, that to `recall` does in part, that to
    `explain` only in the weights; beyond the number of questions to explain, some of them come again."""
    from transformers import AutoTokenizer

    from m1_single_request import DEFAULT_MODEL

    rng, tokenizer = Random(f"benchmark/{seed}"), AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    explained = questions() * math.ceil(number / len(questions()))
    asked = {
        "repeat": [skills.repeat_turn(rng, REPEATED[i % len(REPEATED)], tokenizer)[0] for i in range(number)],
        "explain": [skills.explain_turn(rng, question)[0] for question in rng.sample(explained, number)],
        "recall": list[str](),
    }
    for _ in range(number):
        [(question, _)], listed = skills.recall_turns(rng, FACTS, asked=1)
        asked["recall"].append(f"{listed} {question}")
    return asked


def pixels(number: int, size: tuple[int, int] = LARGE) -> np.ndarray:
    """Draw a picture of this width and height, a different one for every number: uint8 `[height, width, 3]`."""
    rng = Random(f"picture/{number}")
    cells = rng.sample(CELLS, 3)
    drawn = draw_scene(rng, [random_thing(rng, cell) for cell in cells], size).pixels.copy()
    drawn[0, :4, 0] = [number >> shift & 255 for shift in (0, 8, 16, 24)]  # never twice the same content
    return drawn


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    """Return a message of texts and pictures, uint8 `[height, width, 3]`; a text alone is its content."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return {"role": role, "content": parts[0] if isinstance(parts[0], str) and len(parts) == 1 else content}


def picture_message(number: int, question: str, *, count: int = 1) -> list[dict[str, Any]]:
    """Return a conversation of one question about `count` pictures, of which no two numbers share one."""
    return [message(*[pixels(number * count + place) for place in range(count)], question)]
