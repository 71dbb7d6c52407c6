"""The vision tower alone, before it meets the language model: it learns to say what lies in each cell of a picture.

A picture of 96x96 pixels becomes nine embeddings, one for each of its nine cells, so every embedding can be asked by
itself what is there. That teaches far more per second than an answer in words behind a language model. And it is asked
in the language model's own terms: of all sizes, the embedding of the word " small" must be nearest to that of a cell in
which a small thing lies, and so for colour, shape, and where the cell is. So the language model, which knows how to
copy a word that it looks at, finds words in the picture. What DeepStack takes from the middle layers is asked the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from training.loop import LoopConfig, Progressing, train
from training.scenes import CELLS, COLORS, SHAPES, SIZES, Thing, draw_scene, random_thing
from training.vision_skills import MERGE, patches, still

SEED = 20261123
STEPS = 600
PICTURES = 32  # of a step
THINGS = (3, 9)  # in a picture: more than in any dialogue, for every cell teaches
ASKED = (tuple(SIZES), tuple(COLORS), tuple(SHAPES), ("top", "bottom"), ("left", "right"))
NOTHING = "none"  # the word for what a cell has not got


@dataclass(frozen=True)
class Cells:
    """Pictures, and what is in their cells."""

    pixels: Tensor  # [pictures * 36, patch values]
    grids: Tensor  # [pictures, 3]
    answers: Tensor  # [pictures * 9, questions]: 0 for none, names count from 1


class CellNamer(nn.Module):
    """A vision tower whose outputs are compared with the embeddings of words."""

    def __init__(self, tower: nn.Module, embedding: Tensor, tokenizer: PreTrainedTokenizerBase) -> None:
        """`embedding`: the language model's, `[vocabulary, width]`; it stays as it is."""
        super().__init__()
        self.tower = tower
        self.typical = embedding.pow(2).mean(-1).sqrt().mean().item()  # root mean square of a word's embedding
        words = [[tokenizer.encode(f" {name}")[0] for name in (NOTHING, *names)] for names in ASKED]
        self.words = [functional.normalize(embedding[ids].detach(), dim=1) for ids in words]
        outputs = 1 + len(tower.config.deepstack_visual_indexes)
        self.sharpness = nn.Parameter(torch.full((outputs, len(ASKED)), 8.0))

    def forward(self, cells: Cells) -> Tensor:
        """The loss: the cross entropies of all questions to all outputs, and how far these are from a word's size."""
        seen = self.tower(cells.pixels, grid_thw=cells.grids, return_dict=True)
        losses = []
        for feature, sharpness in zip([seen.pooler_output, *seen.deepstack_features], self.sharpness, strict=True):
            size = feature.pow(2).mean(-1).sqrt()
            losses.append(((size / self.typical - 1) ** 2).mean())
            direction = functional.normalize(feature, dim=1)
            for question, words in enumerate(self.words):
                logits = sharpness[question] * direction @ words.to(direction.device).T
                losses.append(functional.cross_entropy(logits, cells.answers[:, question]))
        return torch.stack(losses).sum()


def cells_of(step: int) -> list[Cells]:
    """What the tower looks at in a step."""
    rng = Random(f"{SEED}/{step}")
    drawn, answers = [], []
    for _ in range(PICTURES):
        chosen = sorted(rng.sample(range(len(CELLS)), rng.randint(*THINGS)))
        scene = draw_scene(rng, [random_thing(rng, CELLS[cell]) for cell in chosen])
        drawn.append(patches(still(scene.pixels)))
        things = {thing.cell: thing for thing in scene.things}
        answers += [answers_of(things[cell]) if cell in things else [0] * len(ASKED) for cell in CELLS]
    grid = [1, 3 * MERGE, 3 * MERGE]
    return [Cells(torch.from_numpy(np.concatenate(drawn)), torch.tensor([grid] * PICTURES), torch.tensor(answers))]


def answers_of(thing: Thing) -> list[int]:
    """What is true of a thing, question by question."""
    said = {thing.size, thing.color, thing.shape, *thing.cell.split()}
    return [next((number for number, name in enumerate(names, 1) if name in said), 0) for names in ASKED]


def teach(model: CellNamer, batches: Sequence[Cells], device: torch.device) -> float:
    """Accumulate the gradient of a step's loss; returns it."""
    total = 0.0
    for cells in batches:
        loss = model(Cells(cells.pixels.to(device), cells.grids.to(device), cells.answers.to(device)))
        loss.backward()
        total += loss.item()
    return total


def train_tower(
    tower: nn.Module,
    embedding: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    config: LoopConfig,
    *,
    device: torch.device,
) -> Progressing:
    """Teach the tower its cells, in place; goes on where a run in `config.run_dir` stopped."""
    return train(CellNamer(tower, embedding, tokenizer), cells_of, config, device=device, learn=teach)
