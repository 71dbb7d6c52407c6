"""What the parts of the demo's tour work with: the flags, and what is asked about which picture.

Part of `python -m m6_multimodal_pd.demo`; nothing in the engine depends on it. The questions are of the kinds that the
model that ships has learned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from m1_single_request.config import TraceConfig
from m1_single_request.demo_tour import QUESTION
from m1_single_request.sampling_params import SamplingParams
from m3_paged_attention.config import ModelConfig
from m4_radix_cache.config import CacheConfig
from m4_radix_cache.demo_parts.stories import NOUNS
from m5_chunked_prefill_spec.config import SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.demo_parts.stage import STREAMS, TEXT, code_of
from m6_multimodal_pd.config import MultimodalConfig
from m6_multimodal_pd.demo_parts.drawing import FPS, Shape, clip, listed, picture
from m6_multimodal_pd.demo_parts.picture_view import Shown
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig
from m6_multimodal_pd.llm_engine import LLMEngine

Part = Mapping[str, Any]
LONGEST = 80
"""Characters of a question that are shown."""

ONE = (Shape("big", "red", "circle", "center"),)
TWO = (Shape("big", "blue", "square", "left"), Shape("big", "yellow", "star", "right"))
CHANGED = (TWO[0], Shape("big", "green", "star", "right"))
"""The second scene with another colour."""
THREE = (
    Shape("big", "purple", "cross", "top left"),
    Shape("big", "orange", "triangle", "top right"),
    Shape("big", "black", "circle", "bottom"),
)
MOVING = Shape("big", "green", "square")
FACTS = " ".join(f"The code of {noun} is {code_of(i)}." for i, noun in enumerate(NOUNS[:20]))
"""A prompt that is longer than a step."""
TEXTS = (QUESTION, f"{FACTS} What is the code of {NOUNS[5]}?", f"Repeat this text:\n{TEXT}", *STREAMS)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the flags say."""

    model: ModelConfig
    scheduler: SchedulerConfig
    cache: CacheConfig
    speculative: SpeculativeConfig
    multimodal: MultimodalConfig
    trace: TraceConfig
    disaggregation: DisaggregationConfig | None = None
    """Engines that share the work; None: one does everything."""
    params: SamplingParams
    num_texts: int
    """Requests without a picture in the batch."""
    num_answers: int
    """To the question about the first picture."""
    live: bool
    """Draw the answers as they come, where there is a terminal."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of every request."""

    def options_of(self, ask: "Ask") -> dict[str, Any]:
        """Of this request: a draft model cannot see, so it guesses for texts only."""
        blind = self.speculative.method == "draft_model" and ask.parts
        return {**self.options, "speculate": False} if blind else dict(self.options)


@dataclass(frozen=True)
class Ask:
    """A question, and what it is about."""

    question: str
    parts: tuple[Part, ...] = ()
    shown: Shown | None = None

    @property
    def words(self) -> str:
        """The question, without the middle of a long one."""
        line = " ".join(self.question.split())
        return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"

    def messages(self, *, question_first: bool = False) -> list[dict[str, Any]]:
        """As a conversation of one message."""
        text = {"type": "text", "text": self.question}
        content = [text, *self.parts] if question_first else [*self.parts, text]
        return [{"role": "user", "content": content if self.parts else self.question}]


def about(shapes: Sequence[Shape], question: str) -> Ask:
    """A question about a drawn picture."""
    image = picture(*shapes)
    return Ask(question, ({"type": "image", "image": image},), Shown((image,), listed(shapes)))


def scenes() -> list[Ask]:
    """The three pictures, and what is asked about them."""
    return [
        about(ONE, "Describe the picture."),
        about(TWO, "What is at the left?"),
        about(THREE, "How many shapes are there?"),
    ]


def moving() -> Ask:
    """The clip."""
    frames = clip(MOVING, frames=4)
    words = f"{len(frames)} frames: a {MOVING.name} moves from left to right"
    return Ask(
        "What happens in the clip?",
        ({"type": "video", "video": frames, "video_fps": FPS},),
        Shown(tuple(frames), words),
    )


def texts(count: int) -> list[Ask]:
    """Requests without a picture."""
    return [Ask(TEXTS[i % len(TEXTS)]) for i in range(count)]


def sees(engine: LLMEngine) -> bool:
    """Whether its model takes pictures."""
    return engine.engine_core.input_processor.prompts is not None
