"""Demo of m6, pictures and engines that share the work: `python -m m6_multimodal_pd.demo`.

Without --prompt and --chat: three pictures and a clip in one batch with texts, each beside its answer; the positions of
their tokens; a picture that comes again; then the same batch through a process that computes prompts and one that
answers, and the longest gap of a stream while long prompts arrive, with one engine and with two; and steps that are
launched before the one before is booked. With a --model of your own the parts with two engines need --pd, because each
engine loads the model.
"""

import argparse
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from m1_single_request import demo as m1
from m1_single_request.errors import ConfigError, EngineError
from m1_single_request.events import some
from m1_single_request.field_rules import PositiveInt
from m1_single_request.flags import config_of, given
from m1_single_request.input_processor import Message
from m3_paged_attention import demo as m3
from m3_paged_attention.demo_tour import with_room
from m4_radix_cache import demo as m4
from m5_chunked_prefill_spec import demo as m5
from m6_multimodal_pd import DisaggregationConfig, LLMEngine, ModelConfig, RequestOutput, SamplingParams
from m6_multimodal_pd.config import DEFAULT_MODEL, MultimodalConfig, SchedulerConfig
from m6_multimodal_pd.demo_terminal import loaded, shown
from m6_multimodal_pd.demo_tour import MOST_COLUMNS, Tour, options_for, starting
from m6_multimodal_pd.multimodal.decode_video import Frames

ROOM = 32_768
"""Tokens of KV memory in the tour."""
LARGEST_SEEN, PLAIN = 128, 0.5
"""Pixels of the longer side of the largest scenes on which the model that ships was trained; and a share of pixels that
their background, which has one colour, exceeds."""
NOTE = (
    "Note: tiny-qwen3-vl was trained on drawn scenes of at most 128 x 128 pixels, a few shapes on a background of one "
    "colour. It answers nonsense about other pictures, such as photographs."
)


@dataclass(frozen=True, kw_only=True)
class DemoConfig(m5.DemoConfig):
    """Settings of the tour."""

    num_prompts: PositiveInt = 3
    """Number of requests without a picture in the batch of the tour."""


@dataclass(frozen=True, kw_only=True)
class UserConfig:
    """Settings of a prompt or a chat."""

    image: Sequence[str] = ()
    """Picture for the prompt, or for the first line of a chat, where /image PATH takes others. May be repeated."""
    video: Sequence[str] = ()
    """Clip for the prompt or the chat: a GIF, APNG or WebP file, or a folder of frames. May be repeated."""
    video_fps: float | None = None
    """Frames per second of all clips, in place of the times in a file. Default for a folder: 24."""
    pd: bool = False
    """Use engines that share the work, each a process that loads the model. Implied by the next four flags."""


LIMITS = "allowed_url_schemes=--allow-url min_pixels max_pixels encoder_budget embedding_cache_bytes"
FLAGS: m1.Flags = {
    **m5.FLAGS,
    "batching": (SchedulerConfig, f"{m5.FLAGS['batching'][1]} enable_overlap"),
    "launches": (ModelConfig, "cuda_graphs"),
    "demo": (DemoConfig, m5.FLAGS["demo"][1]),
    "pictures": (UserConfig, "image video video_fps"),
    "limits of pictures": (MultimodalConfig, LIMITS),
    "prefill and decode apart": (UserConfig, "pd"),
    "engines that share the work": (DisaggregationConfig, "prefill decode devices transport"),
}

CLASSES = {**m5.CLASSES, "model": ModelConfig, "scheduler": SchedulerConfig, "multimodal": MultimodalConfig}
"""Configuration classes of an engine that have flags, besides that of drafts, by their fields in `EngineConfig`."""


def make_parser() -> argparse.ArgumentParser:
    """Return a parser of all flags."""
    return m1.make_parser("m6_multimodal_pd.demo", __doc__, FLAGS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    return m1.exit_status(run, make_parser().parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Run the tour, or answer the prompt or the chat that the flags request."""
    demo, user, params = config_of(args, DemoConfig), config_of(args, UserConfig), m3.answer_params(args)
    if user.video_fps is not None and not user.video and not args.chat:
        raise ConfigError(f"video_fps={user.video_fps} has no effect without a video")
    if m1.is_tour(args) and (user.image or user.video):
        args.prompt = "What happens in the clip?" if user.video else "Describe the picture."
    configs, group, options = configs_of(args, console), group_of(args), m4.request_options(args)
    if m1.is_tour(args):
        Tour(configs, params, options, console).run(demo.num_prompts, group)
        return
    with starting(group, console):
        engine = LLMEngine(disaggregation_config=group, **configs)
    with engine:
        Conversation(engine, params, console, options, user).run(args)


def configs_of(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Return the configurations of the flags, as keywords of an engine. A tour drafts with n-grams, or as requested."""
    configs = m1.configs_of(args, console, **CLASSES) | {"speculative_config": m5.speculative_configs(args)[0]}
    if m1.is_tour(args):
        configs["cache_config"] = with_room(configs["cache_config"], max_total_tokens=ROOM)
    return configs


def group_of(args: argparse.Namespace) -> DisaggregationConfig | None:
    """Return the group of engines that the flags request; None for one engine.

    The tour has a group, unless a model of the user would be loaded twice more.
    """
    flags, is_short = given(args, DisaggregationConfig), m1.is_tour(args) and config_of(args, ModelConfig).model is None
    return DisaggregationConfig(**flags) if flags or config_of(args, UserConfig).pd or is_short else None


class Conversation(m4.Conversation):
    """m4's conversation, with pictures: those that were shown go with the next question that is answered.

    It changes `message`, `stream`, `reset` and `_answer`.
    """

    def __init__(
        self, engine: LLMEngine, params: SamplingParams, console: Console, options: dict[str, Any], user: UserConfig
    ) -> None:
        super().__init__(engine, params, console, options)
        self.given, self.video_fps = options, user.video_fps
        self.waiting: list[dict[str, Any]] = []
        for kind in ("image", "video"):
            self.commands[f"/{kind}"] = partial(self.take, kind)
            for path in getattr(user, kind):
                self.show(kind, path)

    def take(self, kind: str, path: str) -> str:
        """Show a picture or a clip; return the line to print, also for an error."""
        try:
            self.show(kind, os.path.expanduser(path.strip("'\"")))
        except EngineError as error:
            return f"{type(error).__name__}: {error}"
        return "it goes with the next question"

    def show(self, kind: str, path: str) -> None:
        """Print a picture or a clip, and keep it for the next question. Raises `InvalidRequestError`."""
        fps = {} if self.video_fps is None or kind == "image" else {"video_fps": self.video_fps}
        part, name = {"type": kind, kind: path, **fps}, f"{kind} {path}"
        media = loaded(part, self.engine.config.multimodal, name)
        self.engine.chat_prompt([{"role": "user", "content": [part]}])  # a picture that it cannot take may not wait
        caption = f"{name}: {media.pixels.shape[-2]} x {media.pixels.shape[-3]} pixels"
        if isinstance(media, Frames):
            caption += f", {some(media.total, 'frame')}"
        self.console.print(shown(media, caption, self.console, MOST_COLUMNS))
        self.waiting.append(part)
        if self.engine.config.model.model == DEFAULT_MODEL and is_far_from_training(media.pixels):
            self.console.print(Text(NOTE, style="yellow"))

    def message(self, text: str) -> Message:
        """Return the message of a line, with the pictures that wait for it."""
        return {"role": "user", "content": [*self.waiting, {"type": "text", "text": text}] if self.waiting else text}

    def stream(self, prompt: str | list[int]) -> Iterable[RequestOutput]:
        """Run one request with its options; yield its output after each step."""
        self.options = options_for(self.engine, self.given, prompt)
        return super().stream(prompt)

    def reset(self, line: str) -> str:
        """Forget the conversation, and the pictures that wait."""
        self.waiting.clear()
        return super().reset(line)

    def _answer(self, question: Message) -> None:
        """Print an answer. The pictures of a question that failed wait for the next one, or for /reset."""
        num_messages = len(self.history)
        super()._answer(question)
        if len(self.history) > num_messages:
            self.waiting.clear()


def is_far_from_training(pixels: np.ndarray) -> bool:
    """Return whether a picture or a clip is unlike the scenes on which the model that ships was trained: it is larger,
    or no colour has half of its pixels."""
    if max(pixels.shape[-3:-1]) > LARGEST_SEEN:
        return True
    colours = pixels.reshape(-1, 3).astype(np.int64) @ (2**16, 2**8, 1)
    return bool(np.unique(colours, return_counts=True)[1].max() < PLAIN * len(colours))


if __name__ == "__main__":
    raise SystemExit(main())
