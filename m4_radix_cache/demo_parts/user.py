"""The engine as one user of the demo sees it: every request has the user's options, and says what it reused.

Part of `python -m m4_radix_cache.demo`; nothing in the engine depends on it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from m1_single_request.events import some
from m1_single_request.input_processor import Message, Prompt
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m4_radix_cache.llm_engine import LLMEngine
from m4_radix_cache.outputs import EngineStats


class User:
    """What `--prompt` and `--chat` of m1's demo call of an engine."""

    def __init__(self, engine: LLMEngine, options: Mapping[str, Any], console: Console) -> None:
        self.engine = engine
        self.options = options
        self.console = console

    @property
    def engine_core(self) -> Any:
        return self.engine.engine_core

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """As the engine's."""
        return self.engine.chat_prompt(messages)

    def generate(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """As the engine's; says what was reused."""
        before = self.engine_core.stats()
        output = self.engine.generate(prompt, params, **self.options)
        self._say_reuse(before)
        return output

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
        """As the engine's; says what was reused on a line of its own, when the answer is complete."""
        before = self.engine_core.stats()
        with self.engine.stream(prompt, params, **self.options) as outputs:
            yield from outputs
        self.console.print()
        self._say_reuse(before, end="")

    def _say_reuse(self, before: EngineStats, end: str = "\n") -> None:
        stats: EngineStats = self.engine_core.stats()
        reused = stats.num_cached_tokens - before.num_cached_tokens
        computed = stats.num_prompt_tokens - before.num_prompt_tokens
        self.console.print(
            f"[dim]{some(reused + computed, 'prompt token')}: {reused:,} reused, {computed:,} computed[/dim]", end=end
        )
