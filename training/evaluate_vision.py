"""The questions about pictures and clips that `training.evaluate` asks, and a saved model that sees and answers them.

Scenes are drawn as training draws them, from a seed that it never uses. Pictures take the way that a user's pictures
take: the checkpoint's chat template and image processor. Clips are cut into patches by `training/vision_skills.py`,
because transformers' video processor needs torchvision.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from training import vision_skills
from training.scenes import Clip, Scene, random_change, random_clip, random_scene
from training.scoring import Answering, Case
from training.vision_recipe import VIDEO, grid, token_types
from training.vision_skills import IMAGE_PAD, MERGE, TEMPORAL_PATCH, VIDEO_PAD, VISION_END, VISION_START, Turn

CHECKPOINT = Path(__file__).parent.parent / "m6_multimodal_pd" / "checkpoints" / "tiny-qwen3-vl"
SEED = "evaluate vision"  # training steps are seeded "<number>/<step>"
REQUIRED = {"describe": 0.95, "what": 0.95, "where": 0.95, "how many": 0.95, "compare": 0.90, "motion": 0.90}
PLACEHOLDER = re.compile("|".join(map(re.escape, (IMAGE_PAD, VISION_START + VIDEO_PAD + VISION_END))))

Asked = tuple[Sequence[Scene | Clip], Turn]  # what is looked at, and a question about it


def _picture(turn: Callable[[Random, Scene], Turn]) -> Callable[[Random], Asked]:
    def make(rng: Random) -> Asked:
        scene = random_scene(rng)
        return [scene], turn(rng, scene)

    return make


def _pair(turn: Callable[[Random, Scene, Scene, str], Turn]) -> Callable[[Random], Asked]:
    def make(rng: Random) -> Asked:
        before, after, what = random_change(rng)
        return [before, after], turn(rng, before, after, what)

    return make


def _clip(turn: Callable[[Random, Clip], Turn]) -> Callable[[Random], Asked]:
    def make(rng: Random) -> Asked:
        clip = random_clip(rng)
        return [clip], turn(rng, clip)

    return make


# Skill, kind of question, how often it is asked, and what makes one.
ASKED: tuple[tuple[str, str, int, Callable[[Random], Asked]], ...] = (
    ("describe", "", 300, _picture(vision_skills.describe_turn)),
    ("what", "what is at a place", 120, _picture(vision_skills.what_turn)),
    ("what", "of what colour", 120, _picture(vision_skills.color_turn)),
    ("where", "", 240, _picture(vision_skills.where_turn)),
    ("how many", "", 240, _picture(vision_skills.how_many_turn)),
    ("compare", "what changed", 160, _pair(vision_skills.changed_turn)),
    ("compare", "which picture", 80, _pair(lambda rng, a, b, _: vision_skills.which_turn(rng, *a.things, *b.things))),
    ("compare", "describe one of two", 80, _pair(lambda rng, a, b, _: vision_skills.describe_one_turn(rng, (a, b)))),
    ("motion", "what happens", 120, _clip(vision_skills.happens_turn)),
    ("motion", "which way", 120, _clip(lambda _, clip: vision_skills.which_way_turn(clip))),
)  # fmt: skip


def cases() -> list[Case]:
    """All questions of the evaluation about pictures and clips. A description is told by the number of things in it."""
    found = []
    for skill, kind, times, make in ASKED:
        rng = Random(f"{SEED}/{skill}/{kind}")
        for _ in range(times):
            seen, turn = make(rng)
            size = things(seen[0]) if skill == "describe" else kind
            found.append(Case(skill, size, _user(seen, turn.question), turn.answer))
    return sorted(found, key=lambda case: (list(REQUIRED).index(case.skill), case.size))


def things(scene: Scene | Clip) -> str:
    """How many things a picture shows, in words."""
    count = len(scene.things) if isinstance(scene, Scene) else 1
    return f"{count} thing{'' if count == 1 else 's'}"


def _user(seen: Sequence[Scene | Clip], question: str) -> tuple[dict[str, Any], ...]:
    kinds = ["video" if isinstance(item, Clip) else "image" for item in seen]
    shown = [{"type": kind, kind: item} for kind, item in zip(kinds, seen, strict=True)]
    return ({"role": "user", "content": [*shown, {"type": "text", "text": question}]},)


def shown_in(case: Case) -> list[Scene | Clip]:
    """What a case looks at, in the order of its placeholders. Nothing in a case that is text."""
    parts = [p for message in case.messages if not isinstance(message["content"], str) for p in message["content"]]
    return [part[part["type"]] for part in parts if part["type"] != "text"]


class Seeing(Answering):
    """A saved Qwen3-VL that answers cases with pictures, with clips, and with neither."""

    auto_model: Any = AutoModelForImageTextToText

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.image_processor = AutoImageProcessor.from_pretrained(path, backend="pil")

    def inputs(self, batch: Sequence[Case]) -> dict[str, Tensor]:
        """Prompts padded on the left, the patches of everything they show, and which token stands for what."""
        seen = [item for case in batch for item in shown_in(case)]
        vision, tokens = self.look(seen)
        expanded = iter(tokens)
        prompts = [PLACEHOLDER.sub(lambda _: next(expanded), self.prompt(case)) for case in batch]
        inputs = self.padded(prompts)
        if seen:
            vision["mm_token_type_ids"] = token_types(self.tokenizer, inputs["input_ids"])
        return inputs | vision

    def look(self, seen: Sequence[Scene | Clip]) -> tuple[dict[str, Tensor], list[str]]:
        """Patches and grids of pictures and clips, and what their placeholders become in the prompt."""
        pictures = [Image.fromarray(item.pixels) for item in seen if isinstance(item, Scene)]
        clips = [item for item in seen if isinstance(item, Clip)]
        vision: dict[str, Tensor] = dict(self.image_processor(pictures, return_tensors="pt")) if pictures else {}
        images = iter([IMAGE_PAD * merged(image_grid) for image_grid in vision.get("image_grid_thw", ())])
        videos = iter([_frames(clip) for clip in clips])
        if clips:
            values, grids = VIDEO
            vision[values] = torch.from_numpy(np.concatenate([vision_skills.patches(clip.frames) for clip in clips]))
            vision[grids] = torch.stack([grid(clip.frames) for clip in clips])
        return vision, [next(videos if isinstance(item, Clip) else images) for item in seen]


def merged(patch_grid: Tensor) -> int:
    """Tokens that a grid of patches becomes."""
    return int(patch_grid.prod()) // MERGE**2


def _frames(clip: Clip) -> str:
    """The second in the middle of each pair of frames, and the tokens of the pair."""
    pairs = np.reshape(clip.seconds, (-1, TEMPORAL_PATCH)).mean(axis=1)
    frame = VISION_START + VIDEO_PAD * (merged(grid(clip.frames)) // len(pairs)) + VISION_END
    return "".join(f"<{second:.1f} seconds>{frame}" for second in pairs)
