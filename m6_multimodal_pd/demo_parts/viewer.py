"""The engine as a user with pictures sees it: what waits to be shown goes with the next question, and is drawn.

Part of `python -m m6_multimodal_pd.demo`; nothing in the engine depends on it. m1's demo knows texts only: it builds a
conversation of them, and here each message gets the pictures that came with it.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from PIL import Image
from rich.console import Console

from m1_single_request.errors import EngineError
from m1_single_request.events import some
from m1_single_request.input_processor import Message, Prompt
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m4_radix_cache.demo_parts.user import User
from m6_multimodal_pd.config import URL_SCHEMES
from m6_multimodal_pd.demo_parts.batch import MOST_COLUMNS, MOST_ROWS
from m6_multimodal_pd.demo_parts.picture_view import Shown
from m6_multimodal_pd.demo_parts.stage import Ask, Part, Settings, sees
from m6_multimodal_pd.errors import InvalidMediaError
from m6_multimodal_pd.llm_engine import LLMEngine
from m6_multimodal_pd.multimodal.decode_image import Picture
from m6_multimodal_pd.multimodal.fetch import scheme_of


class Viewer:
    """What `--prompt` and `--chat` of m1's demo call of an engine, for prompts with pictures."""

    def __init__(
        self, engine: LLMEngine, settings: Settings, console: Console, video_options: Mapping[str, Any] | None = None
    ) -> None:
        """`video_options`: of each video that `/video` names."""
        self.engine, self.settings, self.console = engine, settings, console
        self.video_options = dict(video_options or {})
        self.user = User(cast(Any, engine), settings.options, console)
        self._waiting: list[Part] = []  # for the next question
        self._shown: dict[int, list[Part]] = {}  # by message of the conversation

    @property
    def engine_core(self) -> Any:
        return self.engine.engine_core

    @property
    def commands(self) -> dict[str, Callable[[str], str]]:
        """Those of the conversation."""
        return {
            "/image": partial(self._command, "image"),
            "/video": partial(self._command, "video"),
            "/reset": self._forget,
        }

    def show(self, part: Part) -> None:
        """Draw an image or a video now, and show it to the model with the next question.

        Raises `InvalidMediaError`.
        """
        kind, name = part["type"], part[part["type"]]
        if not sees(self.engine):
            raise InvalidMediaError(f"{self.engine.config.model.model} takes texts only: it cannot see {name}")
        scheme = scheme_of(name)
        if scheme in URL_SCHEMES and scheme not in self.settings.multimodal.allowed_url_schemes:
            raise InvalidMediaError(f"{kind} {name}: {scheme}: URLs are refused; --allow-url {scheme} allows them")
        media = self.engine_core.input_processor.prompts.media.loader.load(part, f"{kind} {name}")
        frames = [media.pixels] if isinstance(media, Picture) else list(media.pixels)
        height, width = frames[0].shape[:2]
        more = "" if isinstance(media, Picture) else f", {some(len(frames), 'frame')} of {media.total:,}"
        shown = Shown(tuple(map(Image.fromarray, frames)), f"{kind} {name}: {width} x {height} pixels{more}")
        self.console.print(shown.view(self.console, MOST_COLUMNS, MOST_ROWS))
        self._waiting.append({"type": "image", "image": media.pixels} if isinstance(media, Picture) else part)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """As the engine's, with what waits for this question and with what was shown before in the conversation."""
        last = len(messages) - 1
        self._shown = {i: parts for i, parts in self._shown.items() if i < last}
        if self._waiting:
            self._shown[last], self._waiting = self._waiting, []
        seen = tuple(part for parts in self._shown.values() for part in parts)
        self.user.options = self.settings.options_of(Ask("", seen))
        return self.engine.chat_prompt([self._with_parts(i, message) for i, message in enumerate(messages)])

    def generate(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """As the engine's; says what was reused."""
        return self.user.generate(prompt, params)

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
        """As the engine's; says what was reused when the answer is complete."""
        return self.user.stream(prompt, params)

    def _with_parts(self, index: int, message: Message) -> Message:
        parts = self._shown.get(index)
        if not parts:
            return message
        return {**message, "content": [*parts, {"type": "text", "text": message["content"]}]}

    def _forget(self, _: str) -> str:
        """Also what waits for a question."""
        self._waiting, self._shown = [], {}
        return "forgotten"

    def _command(self, kind: str, path: str) -> str:
        """Take a picture in a conversation; a bad one does not end it."""
        path = os.path.expanduser(path.strip("'\""))  # behind a flag the shell does it
        if not path:
            return f"/{kind} needs a path"
        try:
            self.show({"type": kind, kind: path, **(self.video_options if kind == "video" else {})})
        except EngineError as error:
            return f"{type(error).__name__}: {error}"
        return "it goes with the next question"
