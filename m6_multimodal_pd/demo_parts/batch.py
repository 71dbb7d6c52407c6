"""Part 1 of the demo's tour: pictures, a clip and texts in one batch, with the answers beside what they are about.

Part of `python -m m6_multimodal_pd.demo`; nothing in the engine depends on it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from m1_single_request.events import some
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m4_radix_cache.demo_parts.stories import as_tokens
from m4_radix_cache.demo_parts.users import several
from m5_chunked_prefill_spec.demo_parts.stage import checked, headline
from m5_chunked_prefill_spec.events import Batch
from m6_multimodal_pd.demo_parts.notes import Notes
from m6_multimodal_pd.demo_parts.picture_view import NO_COLOURS, draws
from m6_multimodal_pd.demo_parts.stage import Ask, Settings
from m6_multimodal_pd.llm_engine import LLMEngine
from m6_multimodal_pd.multimodal.prompt import ChatPrompt

MOST_COLUMNS, MOST_ROWS = 32, 16
"""Of a picture, in characters."""
MOST_STEPS = 3  # that are told one by one
LINES_OF_WORDS = 5  # below a picture: its question and answer
CARD = 40  # columns at most
PACE = 0.05  # seconds a step is shown: without, all would be over before it is seen
Answers = Mapping[int, RequestOutput]
"""By the place of the question."""


def show_batch(engine: LLMEngine, settings: Settings, asks: Sequence[Ask], console: Console) -> list[RequestOutput]:
    """Ask everything at once and show what is said, as it comes if there is a terminal to watch."""
    prompts = [as_tokens(engine, ask.messages()) for ask in asks]
    shows = any(ask.shown for ask in asks)
    title = "Pictures, a clip and texts" if shows else "Texts"
    headline(console, f"1. {title} in one batch", introduction(asks, prompts))
    if shows and not draws(console):
        console.print(Text(NO_COLOURS, style="dim"))
        console.print()
    live = settings.live and console.is_terminal and not console.is_dumb_terminal and draws(console)
    with live_cards(asks, console) if live else quiet() as said:
        outputs = run_batch(engine, settings, asks, prompts, said)
    answers = dict(enumerate(outputs))
    if not live:
        console.print(cards(asks, answers, console, 1000) if draws(console) else sheet(asks, answers))
    console.print(batch_table(asks, prompts, outputs))
    return outputs


def introduction(asks: Sequence[Ask], prompts: Sequence[Sequence[int]]) -> str:
    """Who asks what."""
    blocks = sum(_num_seen(prompt) for prompt in prompts)
    total = sum(map(len, prompts))
    if not blocks:
        return f"{some(len(asks), 'request')}, handed in at the same time: {some(total, 'token')}."
    texts = sum(not ask.parts for ask in asks)
    clips = sum(part["type"] == "video" for ask in asks for part in ask.parts)
    return (
        f"{some(len(asks), 'request')}, handed in at the same time: {some(len(asks) - texts - clips, 'picture')} and "
        f"{some(clips, 'clip')}, each with a question, and {some(texts, 'question')} without one. A picture is cut "
        f"into patches; the vision tower makes embeddings of them, which stand in the prompt as tokens: {blocks:,} of "
        f"the {total:,} tokens here. The scheduler treats them like all others."
    )


def run_batch(
    engine: LLMEngine,
    settings: Settings,
    asks: Sequence[Ask],
    prompts: Sequence[list[int]],
    said: Callable[[Answers], None],
) -> list[RequestOutput]:
    """Hand everything in and step until all is answered; `said` hears of every step. Raises `EngineError`."""
    places = {
        engine.add_request(prompt, own, request_id=f"req-{place}", **settings.options_of(ask)): place
        for place, (ask, prompt, own) in enumerate(zip(asks, prompts, params_of(asks, settings), strict=True))
    }
    answers: dict[int, RequestOutput] = {}
    while engine.has_unfinished_requests():
        answers |= {places[rid]: checked(output) for rid, output in engine.step().items()}
        said(answers)
    return [answers[place] for place in range(len(asks))]


def params_of(asks: Sequence[Ask], settings: Settings) -> list[SamplingParams]:
    """For each question: the first has as many answers as were asked for."""
    return [several(settings.params, settings.num_answers)] + [settings.params] * (len(asks) - 1)


def same_alone(
    engine: LLMEngine, settings: Settings, asks: Sequence[Ask], outputs: Sequence[RequestOutput]
) -> str | None:
    """Whether a mixed batch changes an answer; nothing where they are drawn without a seed."""
    params = params_of(asks, settings)
    if not all(own.is_greedy or own.seed is not None for own in params):
        return None
    same = 0
    for ask, own, output in zip(asks, params, outputs, strict=True):
        alone = engine.generate(as_tokens(engine, ask.messages()), own, **settings.options_of(ask))
        ids = [[answer.token_ids for answer in each.outputs] for each in (checked(alone), output)]
        same += ids[0] == ids[1]
    return (
        f"{same} of {some(len(asks), 'request')} got the same answer, token for token, when they were asked once more, "
        f"one after the other, of an engine that had seen none of them."
    )


def facts(notes: Notes, asks: Sequence[Ask]) -> list[str]:
    """What there is to see in it; to be called before anything else is asked."""
    steps = [(step, batch) for step, batch in notes.batches if batch.num_prompts]
    blind = ", and did not ask which of them are pictures" if any(ask.parts for ask in asks) else ""
    said = [f"{prompt_steps(steps)}. A step had room for {some(steps[0][1].budget, 'token')}{blind}.", *pieces(steps)]
    if notes.runs:
        kinds = [notes.modality[content] for run in notes.runs for content in run.hashes]
        made, patches = sum(run.num_tokens for run in notes.runs), sum(run.num_patches for run in notes.runs)
        said.append(
            f"The vision tower ran {times(len(notes.runs))}, for {some(kinds.count('image'), 'picture')} and "
            f"{some(kinds.count('video'), 'clip')}: all that are new in a step go through it together. {patches:,} "
            f"patches became {some(made, 'embedding')} in {sum(run.milliseconds for run in notes.runs):.1f} ms."
        )
    return said


def pieces(steps: Sequence[tuple[int, Batch]]) -> list[str]:
    """The prompt that was cut most often, if one was."""
    found: dict[str, list[tuple[int, int, Batch]]] = {}
    for step, batch in steps:
        for rid, length in zip(batch.rids[: batch.num_prompts], batch.extend_lens, strict=False):
            found.setdefault(rid, []).append((step, length, batch))
    rid, own = max(found.items(), key=lambda item: len(item[1]))
    if len(own) == 1:
        return []
    lengths = [f"{length:,}" for _, length, _ in own]
    beside = sum(len(batch.rids) - batch.num_prompts for _, _, batch in own)
    said = (
        f"The prompt of {rid} was cut: {', '.join(lengths[:-1])} and {lengths[-1]} tokens of it went through the model "
        f"in steps {own[0][0]} to {own[-1][0]}"
    )
    others = f"; in the same steps answers that had begun went on, {times(beside)} by a token or more"
    return [f"{said}{others if beside else ''}."]


def guesses(settings: Settings, stats: Any, asks: Sequence[Ask], outputs: Sequence[RequestOutput]) -> list[str]:
    """How tokens that were guessed fared, in all and where it went best."""
    if not stats.num_draft_tokens:
        return []
    right = f"{stats.num_accepted_tokens:,} of {some(stats.num_draft_tokens, 'guessed token')} were right"
    said = (
        f"{right}, in {some(stats.num_verifications, 'verification')}: each brought its request "
        f"{stats.accept_length:.1f} tokens on average, where a step without guesses brings one."
    )
    ask, output = max(zip(asks, outputs, strict=True), key=lambda pair: pair[1].metrics.num_accepted_tokens)
    metrics = output.metrics
    if metrics.num_accepted_tokens:
        said += f" {metrics.num_accepted_tokens:,} of the right ones are in the answer of {output.request_id}, to "
        said += f"{ask.words!r}."
    if settings.speculative.method == "ngram":
        said += " What is guessed stood further up, in the prompt or the answer."
    return [said]


def prompt_steps(steps: Sequence[tuple[int, Batch]]) -> str:
    """Which prompts shared a step, and with whom."""
    told = []
    for step, batch in steps:
        decodes = len(batch.rids) - batch.num_prompts
        beside = f" beside the next token of {some(decodes, 'answer')}" if decodes else ""
        told.append(
            f"step {step} computed {batch.num_prompt_tokens:,} tokens of {some(batch.num_prompts, 'prompt')}{beside}"
        )
    more = len(told) - MOST_STEPS
    sentence = "; ".join(told[:MOST_STEPS]) + (f"; {some(more, 'step')} more had prompts in them" if more > 0 else "")
    return f"{sentence[0].upper()}{sentence[1:]}"


def times(count: int) -> str:
    """Once, twice, ..."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


# --- how it looks -----------------------------------------------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[Callable[[Answers], None]]:
    """Nothing is shown before all is there."""
    yield lambda answers: None


@contextmanager
def live_cards(asks: Sequence[Ask], console: Console) -> Iterator[Callable[[Answers], None]]:
    """The answers as they come, each below its picture; they stay."""
    status = Text("slowed down to be watched", style="dim")
    with Live(console=console, auto_refresh=False) as live:
        last: Answers = {}

        def said(answers: Answers) -> None:
            nonlocal last
            last = answers
            live.update(Group(cards(asks, answers, console, console.height), status), refresh=True)
            time.sleep(PACE)

        yield said
        live.update(cards(asks, last, console, console.height), refresh=True)


def cards(asks: Sequence[Ask], answers: Answers, console: Console, height: int) -> RenderableType:
    """Pictures side by side, as large as the screen allows, each with question and answer; texts below them."""
    seen = [place for place, ask in enumerate(asks) if ask.shown is not None]
    blind = [place for place, ask in enumerate(asks) if ask.shown is None]
    columns, per_row = layout(console.width, height, len(seen), len(blind))
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(per_row):
        table.add_column(width=min(console.width // per_row - 2, CARD))
    for first in range(0, len(seen), per_row):
        table.add_row(*(_card(asks[i], answers.get(i), console, columns) for i in seen[first : first + per_row]))
    if not blind:
        return table
    below = sheet([asks[i] for i in blind], {row: answers[i] for row, i in enumerate(blind) if i in answers})
    return Group(table, below) if seen else below


def layout(width: int, height: int, num_seen: int, num_blind: int) -> tuple[int, int]:
    """Columns of a picture, and how many stand side by side: what makes pictures largest on this screen."""
    found = [(2, 1)]
    for per_row in {max(num_seen, 1), 2, 1}:
        lines = -(-num_seen // per_row) or 1
        rows = min((height - 4 * num_blind - 2) // lines - LINES_OF_WORDS - 1, MOST_ROWS)
        found.append((min(width // per_row - 2, 2 * rows, MOST_COLUMNS), per_row))
    return max(found)


def _card(ask: Ask, output: RequestOutput | None, console: Console, columns: int) -> Group:
    assert ask.shown is not None
    drawn = ask.shown.view(console, columns, columns // 2)
    return Group(drawn, Text(ask.words, style="bold"), Text(answer_of(output), style="green"), Text())


def sheet(asks: Sequence[Ask], answers: Answers) -> Table:
    """What was shown, in words; what was asked, and what was said."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for place, ask in enumerate(asks):
        if ask.shown is not None:
            table.add_row(Text("clip" if len(ask.shown.frames) > 1 else "picture"), Text(f"[{ask.shown.words}]"))
        table.add_row(Text("question", style="bold"), Text(ask.words))
        table.add_row(Text("answer", style="bold"), Text(answer_of(answers.get(place)), style="green"))
        table.add_row()
    return table


def answer_of(output: RequestOutput | None) -> str:
    """All answers, a line each."""
    if output is None:
        return ""
    return "\n".join(" ".join(answer.text.split()) for answer in output.outputs)


def batch_table(asks: Sequence[Ask], prompts: Sequence[Sequence[int]], outputs: Sequence[RequestOutput]) -> Table:
    """A line for each request: what it brought, in tokens."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "brings", "prompt", "of pictures", "answer"):
        table.add_column(name, justify="left" if name in ("", "brings") else "right")
    for ask, prompt, output in zip(asks, prompts, outputs, strict=True):
        kinds = " and ".join("a clip" if part["type"] == "video" else "a picture" for part in ask.parts)
        told = sum(len(answer.token_ids) for answer in output.outputs)
        seen = _num_seen(prompt)
        table.add_row(output.request_id, kinds or "text", f"{len(prompt):,}", f"{seen or ''}", f"{told:,}")
    return table


def _num_seen(prompt: Sequence[int]) -> int:
    """Tokens of a prompt that are pictures."""
    inputs = prompt.multimodal_inputs if isinstance(prompt, ChatPrompt) else None
    return 0 if inputs is None else sum(inputs.image_pad_len)
