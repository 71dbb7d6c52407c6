"""What the parts of the demo's tour work with: the flags, what is asked, and how two engines take turns.

Part of `python -m m5_chunked_prefill_spec.demo`; nothing in the engine depends on it. The texts are made of what the
model that ships can do: it explains terms, says texts again, and restates codes from its prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from m1_single_request.config import TraceConfig
from m1_single_request.errors import EngineError
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m3_paged_attention.config import ModelConfig
from m4_radix_cache.config import CacheConfig
from m4_radix_cache.demo_parts.stories import NOUNS, as_tokens
from m5_chunked_prefill_spec.config import SchedulerConfig, SpeculativeConfig
from m5_chunked_prefill_spec.llm_engine import LLMEngine

ROUNDS = 3
"""Of every measurement; the engines take turns, so that a slow moment of the machine meets all of them."""
MORE_NOUNS = (
    "acorn", "basket", "camel", "donkey", "engine", "feather", "guitar", "helmet", "igloo", "jungle", "kettle", "lemon",
    "magnet", "noodle",
)  # fmt: skip
STREAMS = (
    "What is continuous batching?",
    "What is paged attention?",
    "What is prefix caching?",
    "What is the token budget per step?",
    "What is a radix cache?",
    "What is cache eviction?",
)
TEXT = (
    "Seven boats cross under the bridge; people wave, 37 of them. ship lemon sugar paper 48 kite lamp, garden table "
    "warm winter jacket! river stone 905 forest candle: clock window / little green bird song"
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the flags say."""

    model: ModelConfig
    scheduler: SchedulerConfig
    """Of part 1: its budget is small, so that there is something to see."""
    cache: CacheConfig
    speculators: Mapping[str, SpeculativeConfig]
    """Of part 2, by method."""
    trace: TraceConfig
    params: SamplingParams
    num_streams: int
    """In part 1."""
    num_answers: int
    """To the long prompt."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of every request."""


def headline(console: Console, title: str, introduction: str) -> None:
    """Begin a part."""
    console.rule(f"[bold]{title}")
    console.print(Text(introduction, style="italic"))
    console.print()


def ask(engine: LLMEngine, text: str) -> list[int]:
    """A user's message as the model gets it."""
    return as_tokens(engine, [{"role": "user", "content": text}])


def long_question(engine: LLMEngine) -> list[int]:
    """A list of codes, and a question about one of them; as long as the engine takes it, up to about 500 tokens."""
    nouns = [*NOUNS, *MORE_NOUNS]
    intake: Any = engine.engine_core.input_processor
    most = min(intake.max_model_len, intake.max_total_tokens, intake.max_num_batched_tokens or intake.max_model_len)
    for count in range(len(nouns), 0, -1):
        facts = " ".join(f"The code of {noun} is {code_of(i)}." for i, noun in enumerate(nouns[:count]))
        prompt = ask(engine, f"{facts} What is the code of {nouns[count // 2]}?")
        if len(prompt) <= most // 2:
            return prompt
    return ask(engine, STREAMS[0])


def code_of(index: int) -> str:
    """Four digits."""
    return f"{(index * 2377 + 4821) % 10_000:04d}"


def kinds_of_text(engine: LLMEngine) -> dict[str, list[int]]:
    """A text to be said again, a term to be explained, a code to be looked up."""
    facts = " ".join(f"The code of {noun} is {code_of(i)}." for i, noun in enumerate(NOUNS[:12]))
    return {
        "repeat": ask(engine, f"Repeat this text:\n{TEXT}"),
        "explain": ask(engine, "Why does multi-turn chat benefit from cached KV?"),
        "recall": ask(engine, f"{facts} What is the code of {NOUNS[5]}?"),
    }


def checked(output: RequestOutput) -> RequestOutput:
    """The same output, if it did not fail; otherwise raises `EngineError`."""
    if output.error is not None:
        raise EngineError(f"{output.request_id} failed: {output.error}") from output.error
    return output
