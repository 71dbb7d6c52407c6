"""What tiny-qwen3 reads, step by step: first random spans said twice, then the three skills mixed.

The copying circuit (an induction head) must exist before recall and repeat can be learned, and it forms fastest on
dense material: a random span said twice, loss on the second saying. With spans over all 4,096 tokens nothing happened
in 2.5 M tokens; over 400 tokens the circuit formed within 1 M, and the rest of the vocabulary follows quickly. So the
spans begin narrow. Lengths grow over the run.
"""

from dataclasses import dataclass
from random import Random

import torch
from transformers import PreTrainedTokenizerBase

from training import skills
from training.explain import questions
from training.loop import IGNORE, Batch
from training.skills import Piece
from training.words import all_words

Row = list[tuple[int, bool]]  # tokens of a dialogue, and whether each is learned

SEED = 20261120
TOKENS_PER_STEP = 4096
KINDS = ("recall", "repeat", "spans", "explain")
SPAN_LENGTHS = (8, 32)  # tokens
PLAIN_SHARE = 0.12  # share of dialogues without the chat template
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about LLM inference.",
    "Be brief and exact.",
)


@dataclass(frozen=True)
class Plan:
    """How a run is divided. The defaults made tiny-qwen3."""

    seed: int = SEED
    tokens_per_step: int = TOKENS_PER_STEP
    spans_only: float = 0.22  # share of the run that reads nothing but spans
    first_span_tokens: int = 400  # different tokens in the first spans
    span_growth: float = 10.5  # between 50 and 90 % of `spans_only`, they become so many times as many
    first_span_lengths: tuple[int, int] = SPAN_LENGTHS  # of the first spans; grow between 20 and 60 % of `spans_only`
    recall: float = 0.30  # shares of the dialogues after that
    repeat: float = 0.22
    spans: float = 0.06
    explain: float = 0.42


TARGET_PLAN = Plan()


class Recipe:
    """Makes the batches of any step: `Recipe(tokenizer, steps)(step)`."""

    def __init__(self, tokenizer, steps: int, plan: Plan = TARGET_PLAN) -> None:
        self.tokenizer = tokenizer
        self.steps = steps
        self.plan = plan
        words = dict.fromkeys(tokenizer.encode(f" {word}")[0] for word in all_words())
        ordinary = range(len(tokenizer) - len(tokenizer.all_special_tokens))
        self.span_tokens = [*Random(SEED).sample(list(words), len(words)), *(t for t in ordinary if t not in words)]

    def __call__(self, step: int) -> list[Batch]:
        """Dialogues until `tokens_per_step` are full, in batches of rows of similar length."""
        rng = Random(f"{self.plan.seed}/{step}")
        progress = step / self.steps
        after_spans = max(0.0, progress - self.plan.spans_only)
        grown = min(1.0, 0.1 + 3 * after_spans)  # from 0.1 to 1.0 in the 30 % of the run that follow the spans
        rows: list[Row] = []
        while sum(map(len, rows)) < self.plan.tokens_per_step:
            rows.append(self._spans(rng, progress) if progress < self.plan.spans_only else self.dialogue(rng, grown))
        return [pad(similar) for similar in of_similar_length(rows)]

    def dialogue(self, rng: Random, grown: float) -> Row:
        """One dialogue of a skill; `grown` from 0.1 to 1 is how long lists and texts may be."""
        kind = rng.choices(KINDS, weights=[getattr(self.plan, kind) for kind in KINDS])[0]
        if kind == "spans":
            return self._spans(rng, progress=1.0)
        pieces = {"recall": self._recall, "repeat": self._repeat, "explain": self._explain}[kind](rng, grown)
        return encode(self.tokenizer, pieces)

    def _spans(self, rng: Random, progress: float) -> Row:
        """A span of random tokens said twice, loss on the second saying."""
        done = progress / self.plan.spans_only
        width = int(self.plan.first_span_tokens * self.plan.span_growth ** _ramp(done, 0.5, 0.9))
        shortest, longest = (
            round(first + (last - first) * _ramp(done, 0.2, 0.6))
            for first, last in zip(self.plan.first_span_lengths, SPAN_LENGTHS, strict=True)
        )
        tokens = self.span_tokens[:width]
        span = [tokens[rng.randrange(len(tokens))] for _ in range(rng.randint(shortest, longest))]
        return [(t, False) for t in span] + [(t, True) for t in span]

    def _recall(self, rng: Random, grown: float) -> list[Piece]:
        """Six questions about one list, which stands in the first question or in the system prompt."""
        turns, listed = skills.recall_turns(rng, rng.randint(1, max(2, int(46 * grown))), asked=6)
        if rng.random() < PLAIN_SHARE:
            question, answer = turns[0]
            return skills.plain(f"{listed} {question}", answer)
        if rng.random() < 0.25:
            return skills.chat(turns, system=listed)
        turns[0] = (f"{listed} {turns[0][0]}", turns[0][1])
        if rng.random() < 0.25:
            turns[rng.randrange(1, 6)] = skills.explain_turn(rng, rng.choice(questions()))
        return skills.chat(turns, self._system(rng))

    def _repeat(self, rng: Random, grown: float) -> list[Piece]:
        lengths = [rng.randint(1, max(6, int(64 * grown))) for _ in range(rng.randint(1, 4))]
        turns = [skills.repeat_turn(rng, length, self.tokenizer) for length in lengths]
        if rng.random() < PLAIN_SHARE:
            return skills.plain(*turns[0])
        return skills.chat(turns, self._system(rng))

    def _explain(self, rng: Random, grown: float) -> list[Piece]:
        turns = [skills.explain_turn(rng, rng.choice(questions())) for _ in range(rng.choice((1, 1, 2, 3, 4)))]
        if rng.random() < PLAIN_SHARE:
            return skills.plain(*turns[0])
        if grown > 0.5 and rng.random() < 0.1:
            turns.insert(rng.randrange(len(turns) + 1), skills.repeat_turn(rng, rng.randint(2, 30), self.tokenizer))
        return skills.chat(turns, self._system(rng))

    def _system(self, rng: Random) -> str | None:
        return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None


def encode(tokenizer: PreTrainedTokenizerBase, pieces: list[Piece]) -> Row:
    """The tokens of a dialogue, each with whether it is learned."""
    ids = tokenizer([piece.text for piece in pieces], add_special_tokens=False)["input_ids"]
    return [(t, piece.learned) for piece, tokens in zip(pieces, ids, strict=True) for t in tokens]


def _ramp(at: float, start: float, end: float) -> float:
    """0 up to `start`, 1 from `end` on, a straight line between them."""
    return min(1.0, max(0.0, at - start) / (end - start))


def of_similar_length(rows: list[Row]) -> list[list[Row]]:
    """The rows in groups, longest first, so that little is padded."""
    rows = sorted(rows, key=len, reverse=True)
    groups = []
    while rows:
        groups.append([row for row in rows if len(row) >= 0.6 * len(rows[0])])
        rows = rows[len(groups[-1]) :]
    return groups


def pad(rows: list[Row]) -> Batch:
    """Rows of (token, whether it is learned) as one batch."""
    length = max(len(row) for row in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), IGNORE)
    for i, row in enumerate(rows):
        tokens = torch.tensor([t for t, _ in row])
        learned = torch.tensor([learned for _, learned in row])
        input_ids[i, : len(row)] = tokens
        labels[i, : len(row)] = torch.where(learned, tokens, IGNORE)
    return Batch(input_ids, labels)
