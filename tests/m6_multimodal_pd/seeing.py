"""A tiny random model that sees, pictures and clips for it, conversations about them, and transformers' answers.

Everything that an engine is asked here goes in as chat messages, as from a user. The reference is transformers' model
on the same tokens and the same patches, alone and in one piece; what the patches are is held to transformers elsewhere
(`test_vision_processor.py`), and the positions, too (`test_mrope.py`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image

from m6_multimodal_pd import SamplingParams
from m6_multimodal_pd.multimodal.inputs import Modality
from m6_multimodal_pd.multimodal.prompt import ChatPrompt
from tests.equivalence.harness import Reference
from tests.equivalence.traffic import Ask, cut_to
from tests.m6_multimodal_pd.vl_models import MERGE, PATCH, TEMPORAL_PATCH, save_random_vl_model, theirs
from training.vision_checkpoint import CHAT_TEMPLATE, IMAGE_PROCESSOR, VIDEO_PROCESSOR

SIDE = PATCH * MERGE  # pixels of a token
MOST_TOKENS = 10
EOS = range(0, 4096, 40)


def save_seeing_model(directory: Path, **overrides: Any) -> Path:
    """A random Qwen3-VL with everything that an engine reads: chat template and processors, for its small patches."""
    save_random_vl_model(directory, **overrides)
    sizes = {"patch_size": PATCH, "temporal_patch_size": TEMPORAL_PATCH, "merge_size": MERGE}
    image = IMAGE_PROCESSOR | sizes | {"size": {"shortest_edge": SIDE**2, "longest_edge": 64 * SIDE**2}}
    video = VIDEO_PROCESSOR | sizes | {"size": {"shortest_edge": 4 * SIDE**2, "longest_edge": 512 * SIDE**2}}
    for name, config in (("preprocessor", image), ("video_preprocessor", video)):
        (directory / f"{name}_config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return directory


# --- what is shown ----------------------------------------------------------------------------------------------------


def picture(name: str, rows: int, columns: int) -> Image.Image:
    """A picture that becomes so many rows and columns of tokens, another one for each name."""
    rng = np.random.default_rng(list(name.encode()))
    return Image.fromarray(rng.integers(0, 256, (rows * SIDE, columns * SIDE, 3), dtype=np.uint8))


def clip(name: str, frames: int, rows: int, columns: int) -> list[Image.Image]:
    """A clip of so many frames."""
    return [picture(f"{name}/{number}", rows, columns) for number in range(frames)]


SHOWN: dict[str, dict[str, Any]] = {
    "a": {"type": "image", "image": picture("a", 3, 3)},
    "b": {"type": "image", "image": picture("b", 2, 5)},
    "c": {"type": "image", "image": picture("c", 5, 4)},
    "d": {"type": "image", "image": picture("d", 1, 1)},
    "v": {"type": "video", "video": clip("v", 4, 2, 3), "video_fps": 2.0},
    "w": {"type": "video", "video": clip("w", 7, 1, 2), "video_fps": 4.0, "num_frames": 5},
}
"""Pictures of 9, 10, 20 and 1 tokens; clips of 2 frames of 6 tokens and of 3 frames of 2."""

WORDS = ("red", "blue", "circle", "left", "how many", "what is", "describe", "and then", "nothing", "compare")


def text(number: int, words: int = 4) -> dict[str, Any]:
    """One of many short texts."""
    rng = Random(f"text/{number}")
    return {"type": "text", "text": " ".join(rng.choice(WORDS) for _ in range(words)) + "?"}


def parts(*named: str | int) -> list[dict[str, Any]]:
    """Pictures and clips by name, texts by number."""
    return [SHOWN[part] if isinstance(part, str) else text(part) for part in named]


def user(*named: str | int) -> dict[str, Any]:
    """A user's message of these parts."""
    return {"role": "user", "content": parts(*named)}


def asking(*named: str | int) -> list[dict[str, Any]]:
    """A conversation of one question."""
    return [user(*named)]


# --- transformers -----------------------------------------------------------------------------------------------------


class Theirs:
    """transformers' answers, each computed once."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = theirs(directory).eval()
        self._answers: dict[Any, tuple[tuple[int, ...], tuple[float, ...]]] = {}

    def arguments(self, prompt: Sequence[int]) -> dict[str, Any]:
        """What its model takes for a prompt."""
        inputs = prompt.multimodal_inputs if isinstance(prompt, ChatPrompt) else None
        found: dict[str, Any] = {"input_ids": torch.tensor([list(prompt)])}
        if inputs is None:
            return found
        image, video = self.model.config.image_token_id, self.model.config.video_token_id
        kinds = [(i == image) + 2 * (i == video) for i in prompt]
        found["mm_token_type_ids"] = torch.tensor([kinds], dtype=torch.int32)
        for modality, values, grids in (
            (Modality.IMAGE, "pixel_values", "image_grid_thw"),
            (Modality.VIDEO, "pixel_values_videos", "video_grid_thw"),
        ):
            items = [item for item in inputs.mm_items if item.modality is modality]
            if items:
                found[values] = torch.cat([torch.from_numpy(item.feature) for item in items])
                found[grids] = torch.tensor([item.grid_thw for item in items])
        return found

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int]) -> torch.Tensor:
        """`[tokens, vocabulary]` of a prompt."""
        return self.model(**self.arguments(prompt)).logits[0]

    def answer(self, prompt: Sequence[int], max_tokens: int = MOST_TOKENS) -> Reference:
        """Greedy, on past every end."""
        inputs = prompt.multimodal_inputs if isinstance(prompt, ChatPrompt) else None
        key = tuple(prompt), tuple(item.hash for item in inputs.mm_items) if inputs is not None else ()
        known, gaps = self._answers.get(key, ((), ()))
        if len(known) < max_tokens:
            known, gaps = self._answers[key] = self._generate(prompt, max_tokens)
        return Reference(tuple(prompt), known[:max_tokens], gaps[:max_tokens])

    @torch.inference_mode()
    def _generate(self, prompt: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        made = self.model.generate(
            **self.arguments(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [row[0].topk(2).values.tolist() for row in made.logits]
        return tuple(made.sequences[0, len(prompt) :].tolist()), tuple(first - second for first, second in best)


# --- traffic ----------------------------------------------------------------------------------------------------------

Conversation = tuple[tuple[str | int, ...], ...]
"""Turns of a user, each of parts; what the assistant said in between is a text of its own."""


@dataclass
class PromptBook:
    """Conversations as prompts, each made once."""

    make: Callable[[Sequence[Mapping[str, Any]]], list[int]] | None = None
    prompts: dict[Conversation, list[int]] = field(default_factory=dict)

    def __getitem__(self, conversation: Conversation) -> list[int]:
        assert self.make is not None
        if conversation not in self.prompts:
            self.prompts[conversation] = self.make(messages(conversation))
        return self.prompts[conversation]


def messages(conversation: Conversation) -> list[dict[str, Any]]:
    """The same as chat messages."""
    found: list[dict[str, Any]] = []
    for number, turn in enumerate(conversation):
        if number:
            found.append({"role": "assistant", "content": text(100 + number)["text"]})
        found.append(user(*turn))
    return found


BOOK = PromptBook()
"""Of the session: a fixture gives it an engine that makes prompts."""


@dataclass(frozen=True)
class SeeingAsk(Ask):
    """A request with pictures."""

    conversation: Conversation = ()
    cache_salt: str | None = None

    @property
    def prompt(self) -> list[int]:
        return BOOK[self.conversation]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, n=self.n, ignore_eos="past" in self.setting)

    @property
    def options(self) -> Mapping[str, Any]:
        return {"cache_salt": self.cache_salt}


class AloneInTheirs:
    """`alone(ask, child)`: transformers' answer as a reference, and how it ends in an engine that knows `EOS`."""

    def __init__(self, model: Theirs) -> None:
        self.model = model

    def __call__(self, ask: SeeingAsk, child: int) -> tuple[Reference, str]:
        whole = self.model.answer(ask.prompt)
        if "past" not in ask.setting:
            ends = [i + 1 for i, token in enumerate(whole.token_ids[: ask.max_tokens]) if token in EOS]
            if ends:
                return cut_to(whole, ends[0]), "stop"
        return cut_to(whole, ask.max_tokens), "length"
