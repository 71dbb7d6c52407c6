"""Part 3 of the demo's tour: what is known of a picture that was shown before, and what of one that was not.

Part of `python -m m6_multimodal_pd.demo`; nothing in the engine depends on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.events import some
from m1_single_request.outputs import RequestOutput
from m3_paged_attention.demo_parts.tour import bullets
from m4_radix_cache.demo_parts.stories import as_tokens
from m5_chunked_prefill_spec.demo_parts.stage import checked, headline
from m6_multimodal_pd.demo_parts.batch import answer_of, times
from m6_multimodal_pd.demo_parts.stage import CHANGED, Ask, Settings, about
from m6_multimodal_pd.llm_engine import LLMEngine
from m6_multimodal_pd.multimodal.prompt import ChatPrompt

CAPTION = (
    "prompt, reused, computed: tokens. runs: of the vision tower, and made: embeddings by it. hits: how often "
    "embeddings were found instead. TTFT: the time to the first token."
)
NEXT_QUESTION = "Where is the yellow star?"


@dataclass(frozen=True)
class Look:
    """One question, and what it took."""

    title: str
    question: str
    answer: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_runs: int
    num_hits: int
    num_embeddings: int
    """That the tower made for it."""
    seconds: float
    """To the first token."""

    @property
    def num_computed(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens


def show_second_turn(
    engine: LLMEngine, settings: Settings, ask: Ask, output: RequestOutput, console: Console
) -> list[str]:
    """The next question about a picture, the picture in another conversation, and a picture that is a little other."""
    prompt = as_tokens(engine, ask.messages())
    assert isinstance(prompt, ChatPrompt) and prompt.multimodal_inputs is not None
    made = prompt.multimodal_inputs.mm_items[0].num_tokens
    headline(
        console,
        "3. The same picture again",
        f"The second picture cost {some(made, 'embedding')} in part 1. Now there is a next question about "
        f"it; then somebody else shows it, behind other words; then a picture comes whose star is green.",
    )
    conversations: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "next turn": (NEXT_QUESTION, continued(ask, output)),
        "other conversation": (NEXT_QUESTION, Ask(NEXT_QUESTION, ask.parts).messages(question_first=True)),
        "other picture": (ask.question, about(CHANGED, ask.question).messages()),
    }
    looks = [look(engine, settings, title, *each) for title, each in conversations.items()]
    console.print(looks_table(looks))
    console.print(Text(CAPTION, style="dim"))
    console.print()
    for each in looks:
        console.print(Text.assemble((f"{each.title}: ", "bold"), f"{each.question} ", (each.answer, "green")))
    console.print()
    console.print(bullets([told(each) for each in looks]))
    return [fact(looks)]


def continued(ask: Ask, output: RequestOutput) -> list[dict[str, Any]]:
    """The conversation up to the next question."""
    answered = {"role": "assistant", "content": output.text}
    return [*ask.messages(), answered, {"role": "user", "content": NEXT_QUESTION}]


def look(engine: LLMEngine, settings: Settings, title: str, question: str, messages: Sequence[dict[str, Any]]) -> Look:
    """Ask, and take down what the engine's totals say of it. Raises `EngineError`."""
    before: Any = engine.stats()
    options = settings.options_of(Ask(question, ({},)))
    output = checked(engine.generate(as_tokens(engine, messages), settings.params, **options))
    after: Any = engine.stats()
    return Look(
        title=title,
        question=question,
        answer=answer_of(output),
        num_prompt_tokens=output.metrics.num_prompt_tokens,
        num_cached_tokens=output.metrics.cached_tokens,
        num_runs=after.num_encoder_runs - before.num_encoder_runs,
        num_hits=after.num_encoder_hits - before.num_encoder_hits,
        num_embeddings=after.num_encoded_tokens - before.num_encoded_tokens,
        seconds=output.metrics.time_to_first_token or 0.0,
    )


def looks_table(looks: Sequence[Look]) -> Table:
    """A line for each."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "prompt", "reused", "computed", "runs", "hits", "made", "TTFT"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for each in looks:
        counts = (
            each.num_prompt_tokens, each.num_cached_tokens, each.num_computed,
            each.num_runs, each.num_hits, each.num_embeddings,
        )  # fmt: skip
        table.add_row(each.title, *(f"{count:,}" for count in counts), f"{each.seconds * 1e3:.1f} ms")
    return table


def told(each: Look) -> str:
    """What one of them needed, in a sentence."""
    reused = f"{each.num_cached_tokens:,} of {some(each.num_prompt_tokens, 'prompt token')} had their KV in the cache"
    if each.num_runs:
        return (
            f"{_capital(each.title)}: {reused}; its content is new, so the tower ran "
            f"{times(each.num_runs)} and made {some(each.num_embeddings, 'embedding')}."
        )
    if each.num_hits:
        return (
            f"{_capital(each.title)}: {reused}, so the picture was read again; {some(each.num_hits, 'encoder hit')} "
            f"and 0 encoder runs: its embeddings were there already."
        )
    return (
        f"{_capital(each.title)}: {reused}, all of the picture among them: 0 encoder runs, and not even its embeddings "
        f"were needed."
    )


def fact(looks: Sequence[Look]) -> str:
    """What came of all of them."""
    known = looks[:2]
    runs, hits = sum(each.num_runs for each in known), sum(each.num_hits for each in known)
    cached = sum(each.num_cached_tokens for each in known)
    return (
        f"A known picture came {len(known)} times more: {some(runs, 'encoder run')}, {some(hits, 'encoder hit')}, and "
        f"{some(cached, 'prompt token')} not computed again. A picture with another star cost "
        f"{some(looks[-1].num_embeddings, 'embedding')}: what is known is known by its content."
    )


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
