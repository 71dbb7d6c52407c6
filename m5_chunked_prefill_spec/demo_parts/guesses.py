"""Part 2 of the demo's tour: two ways to guess, on three kinds of text.

Part of `python -m m5_chunked_prefill_spec.demo`; nothing in the engine depends on it.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.config import TraceConfig
from m1_single_request.events import some
from m5_chunked_prefill_spec.config import SpeculativeConfig
from m5_chunked_prefill_spec.demo_parts.notes import Notes, coloured, legend
from m5_chunked_prefill_spec.demo_parts.stage import ROUNDS, Settings, checked, headline, kinds_of_text
from m5_chunked_prefill_spec.llm_engine import LLMEngine

NOBODY = "nobody"
WHOLE_PROMPT = 256  # tokens of a step, enough for each prompt here: so every step brings tokens


@dataclass(frozen=True)
class Answered:
    """One kind of text, guessed in one way."""

    token_ids: tuple[int, ...]
    num_steps: int
    num_drafted: int
    num_accepted: int
    num_verifications: int
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return len(self.token_ids) / self.seconds


def show_guesses(settings: Settings, parts: Any, readers: Sequence[Any], console: Console) -> list[str]:
    """Who guessed what, what it saved, and how fast that was."""
    methods = {NOBODY: SpeculativeConfig(), **settings.speculators}
    headline(
        console,
        "2. Two ways to guess, on three kinds of text",
        "A text is to be said again, a term to be explained, a code to be looked up. Without guesses every token takes "
        "a step. ngram looks further up for the last tokens and guesses what followed there; draft_model lets a small "
        "model say it. All guesses of a step are verified by one forward of the model; what it would not have said "
        "itself is thrown away, so a greedy answer is the same.",
    )
    with ExitStack() as stack:
        notes = {name: Notes() for name in methods}
        traced = {
            name: stack.enter_context(_engine(settings, own, parts, (*readers, notes[name])))
            for name, own in methods.items()
        }
        quiet = {name: stack.enter_context(_engine(settings, own, parts, ())) for name, own in methods.items()}
        prompts = kinds_of_text(quiet[NOBODY])
        with console.status("measuring", refresh_per_second=2):
            answers = {kind: measure(quiet, prompt, settings) for kind, prompt in prompts.items()}
        console.print(speed_table(answers))
        console.print(
            Text(
                "brought: tokens that a verification brought, on average. tokens/s: the median of "
                f"{ROUNDS} rounds, which take turns, without a trace.",
                style="dim",
            )
        )
        with_marks = console.no_color or not console.is_terminal
        console.print()
        console.print(legend(with_marks=with_marks))
        for kind, prompt in prompts.items():
            for name, engine in traced.items():
                output = checked(engine.generate(prompt, settings.params, **settings.options))
                if name != NOBODY:
                    tokenizer = engine.engine_core.input_processor.tokenizer
                    rid = output.request_id
                    text = coloured(notes[name].tokens[rid], _decoder(tokenizer), with_marks=with_marks)
                    console.print(Text(f"\n{kind}, {name}: ", style="bold").append(text))
    return facts(answers)


def _decoder(tokenizer: Any) -> Any:
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)


def _engine(settings: Settings, guesses: SpeculativeConfig, parts: Any, readers: Sequence[Any]) -> LLMEngine:
    budget = max(WHOLE_PROMPT, settings.scheduler.max_num_seqs)
    return LLMEngine(
        model_config=settings.model,
        scheduler_config=replace(settings.scheduler, max_num_batched_tokens=budget, target_gap_ms=None),
        cache_config=replace(settings.cache, prefix_cache="chunk", eviction_policy="lru", debug=bool(readers)),
        speculative_config=guesses,
        trace_config=TraceConfig(readers=tuple(readers)),
        parts=parts,
    )


def measure(engines: Mapping[str, LLMEngine], prompt: list[int], settings: Settings) -> dict[str, Answered]:
    """One prompt on all engines, in turn; the first round does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    found = {}
    for number in range(ROUNDS + 1):
        for name, engine in engines.items():
            before, began = engine.engine_core.stats(), time.perf_counter()
            output = checked(engine.generate(prompt, settings.params, **settings.options))
            lap, after = time.perf_counter() - began, engine.engine_core.stats()
            if number:
                seconds[name].append(lap)
            found[name] = Answered(
                output.token_ids,
                after.num_steps - before.num_steps,
                after.num_draft_tokens - before.num_draft_tokens,
                after.num_accepted_tokens - before.num_accepted_tokens,
                after.num_verifications - before.num_verifications,
                lap,
            )
    return {name: replace(own, seconds=median(seconds[name])) for name, own in found.items()}


def speed_table(answers: Mapping[str, Mapping[str, Answered]]) -> Table:
    """A line for each kind of text and way to guess."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("text", "who guesses", "tokens", "steps", "guesses right", "brought", "tokens/s", ""):
        table.add_column(name, justify="left" if name in ("text", "who guesses") else "right")
    for kind, own in answers.items():
        for name, answered in own.items():
            guessed = brought = ""
            if answered.num_verifications:
                guessed = f"{answered.num_accepted:,} of {answered.num_drafted:,}"
                brought = f"{1 + answered.num_accepted / answered.num_verifications:.1f}"
            ratio = answered.speed / own[NOBODY].speed
            table.add_row(
                kind if name == NOBODY else "",
                name,
                f"{len(answered.token_ids):,}",
                f"{answered.num_steps:,}",
                guessed,
                brought,
                f"{answered.speed:,.0f}",
                "" if name == NOBODY else f"x {ratio:.1f}",
            )
    return table


def facts(answers: Mapping[str, Mapping[str, Answered]]) -> list[str]:
    """What there is to see in it."""
    said = []
    pairs = [(kind, name, own[name], own[NOBODY]) for kind, own in answers.items() for name in own if name != NOBODY]
    if not pairs:
        return []
    kind, name, best, without = max(pairs, key=_gain)
    said.append(
        f"Most was gained by {name} on {kind}: {some(len(best.token_ids), 'token')} in "
        f"{some(best.num_steps, 'step')} instead of {without.num_steps:,}, {_gain((kind, name, best, without)):.1f} "
        f"times as fast."
    )
    kind, name, worst, without = min(pairs, key=_gain)
    said.append(
        f"Least by {name} on {kind}: {worst.num_accepted:,} of {worst.num_drafted:,} were right, and it was "
        f"{_gain((kind, name, worst, without)):.2f} times as fast."
    )
    same = sum(own.token_ids == without.token_ids for _, _, own, without in pairs)
    said.append(f"{same} of {some(len(pairs), 'answer')} are those without guesses, token for token.")
    return said


def _gain(pair: tuple[str, str, Answered, Answered]) -> float:
    """How many times as fast as without guesses."""
    _, _, own, without = pair
    return own.speed / without.speed
