"""The vision tower alone, before it meets the language model: it learns to say what lies in each square of a picture.

A picture becomes one embedding for each square of 32x32 pixels, so every embedding can be asked by itself what has its
middle there. That teaches far more per second than an answer in words behind a language model. And it is asked in the
language model's own terms: of all sizes, the embedding of the word " small" must be nearest to that of a square in
which a small thing lies, and so for its colour, its shape, and where in the picture it is. So the language model, which
knows how to copy a word that it looks at, finds words in the picture. What DeepStack takes from the middle layers is
asked the same.
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
from training.scenes import CELLS, COLORS, PICTURE_SIZES, SHAPES, SIZES, Scene, draw_scene, random_thing
from training.vision_recipe import grid
from training.vision_skills import MERGE, PATCH, patches, still

SEED = 20261123
STEPS = 800
PICTURES = 32  # of a step
SHOWN = tuple(dict.fromkeys(PICTURE_SIZES))  # sizes of pictures, here all equally often
THINGS = (3, 9)  # in a picture: more than in any dialogue, for every cell teaches
ASKED = (tuple(SIZES), tuple(COLORS), tuple(SHAPES), ("top", "bottom"), ("left", "right"))
NOTHING = "none"  # the word for what a square has not got


@dataclass(frozen=True)
class Squares:
    """Pictures, and what is in their squares."""

    pixels: Tensor  # [patches, patch values]
    grids: Tensor  # [pictures, 3]
    answers: Tensor  # [squares, questions]: 0 for none, names count from 1


class SquareNamer(nn.Module):
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

    def forward(self, squares: Squares) -> Tensor:
        """The loss: the cross entropies of all questions to all outputs, and how far these are from a word's size."""
        seen = self.tower(squares.pixels, grid_thw=squares.grids, return_dict=True)
        losses = []
        for feature, sharpness in zip([seen.pooler_output, *seen.deepstack_features], self.sharpness, strict=True):
            size = feature.pow(2).mean(-1).sqrt()
            losses.append(((size / self.typical - 1) ** 2).mean())
            direction = functional.normalize(feature, dim=1)
            for question, words in enumerate(self.words):
                logits = sharpness[question] * direction @ words.to(direction.device).T
                losses.append(functional.cross_entropy(logits, squares.answers[:, question]))
        return torch.stack(losses).sum()


def squares_of(step: int) -> list[Squares]:
    """What the tower looks at in a step."""
    rng = Random(f"{SEED}/{step}")
    drawn, grids, answers = [], [], []
    for _ in range(PICTURES):
        chosen = sorted(rng.sample(range(len(CELLS)), rng.randint(*THINGS)))
        scene = draw_scene(rng, [random_thing(rng, CELLS[cell]) for cell in chosen], rng.choice(SHOWN))
        frames = still(scene.pixels)
        drawn.append(patches(frames))
        grids.append(grid(frames))
        answers.append(answers_of(scene))
    return [Squares(torch.from_numpy(np.concatenate(drawn)), torch.stack(grids), torch.cat(answers))]


def answers_of(scene: Scene) -> Tensor:
    """What is true of the thing whose middle lies in a square, question by question: `[squares, questions]`."""
    side = PATCH * MERGE
    height, width = (pixels // side for pixels in scene.pixels.shape[:2])
    found = torch.zeros(height, width, len(ASKED), dtype=torch.long)
    for thing, (x, y) in zip(scene.things, scene.middles, strict=True):
        said = {thing.size, thing.color, thing.shape, *thing.cell.split()}
        numbers = [next((number for number, name in enumerate(names, 1) if name in said), 0) for names in ASKED]
        found[int(y) // side, int(x) // side] = torch.tensor(numbers)
    return found.flatten(0, 1)


def teach(model: SquareNamer, batches: Sequence[Squares], device: torch.device) -> float:
    """Accumulate the gradient of a step's loss; returns it."""
    total = 0.0
    for squares in batches:
        loss = model(Squares(squares.pixels.to(device), squares.grids.to(device), squares.answers.to(device)))
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
    """Teach the tower its squares, in place; goes on where a run in `config.run_dir` stopped."""
    return train(SquareNamer(tower, embedding, tokenizer), squares_of, config, device=device, learn=teach)
