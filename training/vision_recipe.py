"""What tiny-qwen3-vl reads, step by step: dialogues about drawn scenes, and the text skills so that they stay.

A dialogue about a picture asks several things, as one about a list of facts does: the picture is encoded once, and
every answer teaches. Text is a quarter of the tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from training import skills, vision_skills
from training.explain import questions
from training.loop import IGNORE, Batch
from training.recipe import SYSTEM_PROMPTS, TARGET_PLAN, Recipe, Row, encode, of_similar_length, pad
from training.scenes import Clip, Scene
from training.vision_skills import PATCH, Looked, still

SEED = 20261122
VISION_DIALOGUES = 32  # of a step
TEXT_TOKENS = 1024  # of a step
TEXT = replace(TARGET_PLAN, recall=0.22, repeat=0.50, spans=0.05, explain=0.23)  # to repeat is forgotten first
DIALOGUES = (vision_skills.picture_dialogue, vision_skills.compare_dialogue, vision_skills.clip_dialogue)
WEIGHTS = (0.5, 0.3, 0.2)
VIDEO = ("pixel_values_videos", "video_grid_thw")


class VisionRecipe:
    """Makes the batches of any step: `VisionRecipe(tokenizer, steps)(step)`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, steps: int) -> None:
        self.tokenizer = tokenizer
        self.text = Recipe(tokenizer, steps, TEXT)

    def __call__(self, step: int) -> list[Batch]:
        """The step's dialogues about pictures and clips, and its text, in batches of rows of similar length."""
        rng = Random(f"{SEED}/{step}")
        dialogues = [self._vision(rng) for _ in range(VISION_DIALOGUES)]
        looked = {id(row): what for what, row in dialogues}
        texts: list[Row] = []
        while sum(map(len, texts)) < TEXT_TOKENS:
            texts.append(self.text.dialogue(rng, grown=1.0))
        groups = of_similar_length([row for _, row in dialogues])
        seen = [see(self.tokenizer, [(looked[id(row)], row) for row in similar]) for similar in groups]
        return [*seen, *(pad(similar) for similar in of_similar_length(texts))]

    def text_share(self, steps: Iterable[int]) -> float:
        """Of the tokens that are learned in these steps, the share that is text without anything to look at."""
        learned = [(bool(batch.vision), int((batch.labels != IGNORE).sum())) for step in steps for batch in self(step)]
        return sum(tokens for sees, tokens in learned if not sees) / sum(tokens for _, tokens in learned)

    def _vision(self, rng: Random) -> tuple[Looked, Row]:
        looked, turns = rng.choices(DIALOGUES, weights=WEIGHTS)[0](rng)
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.1 else None
        asked = [(turn.question, turn.answer) for turn in turns]
        if rng.random() < 0.1:  # and now for something that was not seen
            asked.append(skills.explain_turn(rng, rng.choice(questions())))
        pieces = vision_skills.vision_chat(looked, asked, system, question_first=rng.random() < 0.15)
        return looked, encode(self.tokenizer, pieces)


def see(tokenizer: PreTrainedTokenizerBase, dialogues: Sequence[tuple[Looked, Row]]) -> Batch:
    """Dialogues with what they look at as one batch for a `Qwen3VLForConditionalGeneration`."""
    input_ids, labels, _ = pad([row for _, row in dialogues])
    seen = [item for looked, _ in dialogues for item in looked.seen]
    pictures = [still(item.pixels) for item in seen if isinstance(item, Scene)]
    clips = [item.frames for item in seen if isinstance(item, Clip)]
    vision = {"mm_token_type_ids": token_types(tokenizer, input_ids)}
    for frames, values, grids in ((pictures, "pixel_values", "image_grid_thw"), (clips, *VIDEO)):
        if frames:
            vision |= {values: torch.from_numpy(np.concatenate([vision_skills.patches(f) for f in frames]))}
            vision |= {grids: torch.stack([grid(f) for f in frames])}
    return Batch(input_ids, labels, vision)


def token_types(tokenizer: PreTrainedTokenizerBase, input_ids: Tensor) -> Tensor:
    """0 where a token is text, 1 where it stands for a part of a picture, 2 for a part of a clip; as `input_ids`."""
    image, video = tokenizer.convert_tokens_to_ids([vision_skills.IMAGE_PAD, vision_skills.VIDEO_PAD])
    return (input_ids == image).int() + 2 * (input_ids == video).int()


def grid(frames: np.ndarray) -> Tensor:
    """Patches of frames `[count, height, width, 3]` along time, height and width."""
    count, height, width = frames.shape[:3]
    return torch.tensor([count // vision_skills.TEMPORAL_PATCH, height // PATCH, width // PATCH])
