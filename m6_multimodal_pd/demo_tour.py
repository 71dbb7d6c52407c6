"""Tour of the demo: a batch of pictures and texts, the positions of a picture, a picture that comes again.

Part of `python -m m6_multimodal_pd.demo`; no part of the engine depends on it. `demo_two_engines.py` has the other
parts. The remark that opens a part is the docstring of its function. The model that ships has learned such questions.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image, ImageSequence
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from m1_single_request.config import TraceConfig
from m1_single_request.demo_tour import QUESTION, checked, headline
from m1_single_request.events import some
from m1_single_request.outputs import RequestOutput
from m1_single_request.sampling_params import SamplingParams
from m4_radix_cache.demo_tour import NOUNS, as_tokens, codes, several
from m5_chunked_prefill_spec.demo_tour import TEXT
from m6_multimodal_pd.demo_terminal import shown
from m6_multimodal_pd.llm_engine import LLMEngine
from m6_multimodal_pd.outputs import EngineStats
from m6_multimodal_pd.views.positions import KEY, PositionsView

MOST_COLUMNS = 32
"""Width of a picture, in characters."""
PACE = 0.05
"""Pause after each step on a terminal, in seconds: without it the answers could not be watched."""
PICTURES = Path(__file__).parent / "demo_pictures"
Outputs = dict[str, RequestOutput]
"""By request id."""
OptionsOf = Callable[[Any], Mapping[str, Any]]
"""Returns the options of a request with this prompt."""


@dataclass(frozen=True)
class Ask:
    """A question, and the file of the picture or the clip that it is about."""

    question: str
    file: str = ""
    kind: str = "image"

    def message(self, *, question_first: bool = False) -> dict[str, Any]:
        """Return the message of a user."""
        parts = [{"type": self.kind, self.kind: PICTURES / self.file}, {"type": "text", "text": self.question}]
        content = parts[::-1] if question_first else parts
        return {"role": "user", "content": content if self.file else self.question}

    @property
    def frames(self) -> list[np.ndarray]:
        """The pixels of the picture or the clip, uint8 `[height, width, 3]` each."""
        with Image.open(PICTURES / self.file) as image:
            return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]

    @property
    def words(self) -> str:
        """The picture or the clip in words."""
        return self.file.partition(".")[0].replace("_", " ")


SEEN = (
    Ask("Describe the picture.", "a_big_red_circle.png"),
    Ask("What is at the left?", "a_blue_square_and_a_yellow_star.png"),
    Ask("How many shapes are there?", "a_purple_cross_an_orange_triangle_and_a_black_circle.png"),
    Ask("What happens in the clip?", "a_green_square_moves_to_the_right.png", "video"),
)
READ = (Ask(QUESTION), Ask(f"{codes(range(20))} What is the code of {NOUNS[5]}?"), Ask(f"Repeat this text:\n{TEXT}"))
"""The second one is longer than a step; n-grams of its prompt draft the answer to the third one."""
NEXT = replace(SEEN[1], question="Where is the yellow star?")
OTHER = replace(SEEN[1], file="a_blue_square_and_a_green_star.png")


@dataclass(frozen=True)
class Tour:
    """Settings of all engines and requests of the tour, and the console where it is printed."""

    configs: Mapping[str, Any]
    """Keywords of an engine."""
    params: SamplingParams
    options_of: OptionsOf
    num_texts: int
    console: Console

    def headline(self, title: str, part: Any) -> None:
        """Print the title of a part, and the second paragraph of its docstring."""
        headline(self.console, title, " ".join((part.__doc__ or "").partition("\n\n")[2].split()))

    def run(self, engine: LLMEngine, batch: Mapping[str, Ask]) -> Iterator[Outputs]:
        """Add all requests, and yield their outputs after each step. The first one has `params.n` answers."""
        params = several(self.params, self.params.n)
        for rid, ask in batch.items():
            prompt = as_tokens(engine, [ask.message()])
            engine.add_request(prompt, params, request_id=rid, **self.options_of(prompt))
            params = replace(self.params, n=1)
        outputs: Outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {rid: checked(output) for rid, output in engine.step().items()}
            yield outputs


def show_pictures(tour: Tour, trace: TraceConfig) -> tuple[dict[str, Ask], Outputs]:
    """Run the parts that one engine shows. Return the requests of the batch by id, and their outputs."""
    positions = PositionsView()
    trace = replace(trace, readers=(*trace.readers, positions))
    with LLMEngine(trace_config=trace, **tour.configs) as engine:
        has_vision = engine.engine_core.input_processor.prompts is not None
        asks = [*(SEEN if has_vision else ()), *(READ[number % len(READ)] for number in range(tour.num_texts))]
        batch = {f"req-{number}": ask for number, ask in enumerate(asks)}
        outputs = show_batch(tour, engine, batch)
        stats = cast(EngineStats, engine.stats())
        items = some(stats.num_encoded_items, "item")
        tour.console.print(
            f"\nThe vision tower made {some(stats.num_encoded_tokens, 'token')} of {items} in "
            f"{stats.encoder_seconds * 1e3:.1f} ms; the prompts have {some(stats.num_prompt_tokens, 'token')} in all."
        )
        if has_vision:
            show_positions(tour, positions)
            show_again(tour, engine, outputs["req-1"].text)
        else:
            tour.console.print(f"{engine.config.model.model} has no vision tower: it takes texts only.", style="yellow")
    return batch, outputs


def show_batch(tour: Tour, engine: LLMEngine, batch: Mapping[str, Ask]) -> Outputs:
    """Run the batch, with the answers below their pictures, on a terminal as they come.

    All requests come at the same time. The vision tower makes embeddings of the patches of a picture. They stand in the
    prompt as tokens, and the scheduler treats them like all others.
    """
    tour.headline("1. Pictures, a clip and texts in one batch", show_batch)
    outputs: Outputs = {}
    with Live(get_renderable=lambda: cards(batch, outputs, tour.console), console=tour.console):
        for changed in tour.run(engine, batch):
            outputs |= changed
            time.sleep(PACE if tour.console.is_terminal else 0)
    return outputs


def cards(batch: Mapping[str, Ask], outputs: Outputs, console: Console) -> Group:
    """Return the pictures side by side, each above its question and its answers; then the texts."""
    seen = [rid for rid, ask in batch.items() if ask.file]
    columns = min(console.width // max(len(seen), 1) - 2, MOST_COLUMNS)
    pictures = Table.grid(*(Column(width=columns) for _ in seen), padding=(0, 2, 0, 0))
    pictures.add_row(*(shown(batch[rid].frames, batch[rid].words, console, columns) for rid in seen))
    pictures.add_row(*(card(rid, batch[rid], outputs) for rid in seen))
    return Group(pictures, *(card(rid, batch[rid], outputs) for rid in batch if rid not in seen))


def card(rid: str, ask: Ask, outputs: Outputs) -> Text:
    """Return a question, without the middle of a long one, and the answers to it."""
    line = " ".join(ask.question.split())
    words = line if len(line) < 72 else f"{line[:28]} ... {line[-36:]}"
    answers = [" ".join(answer.text.split()) for answer in outputs[rid].outputs] if rid in outputs else []
    return Text.assemble((f"{rid}: {words}\n", "bold"), ("\n".join(answers), "green"), "\n")


def show_positions(tour: Tour, view: PositionsView) -> None:
    """Draw the positions of the first picture and of the clip.

    Every token has three positions: in time, in height and in width. A text counts up on all three alike. The tokens of
    a picture share the time, and have the row and the column of their patch. The frames of a clip are encoded in pairs,
    each behind its time as a text: a later pair has a later position.
    """
    tour.headline("2. Where the tokens stand", show_positions)
    for rid in ("req-0", "req-3"):
        assigned = view.assigned[rid]
        end = assigned.num_tokens + assigned.delta
        tour.console.print(Text(f"{rid}: {assigned.num_tokens} tokens, {end} positions ({KEY})", style="bold"))
        tour.console.print(view.draw(rid, tour.console.width))


def show_again(tour: Tour, engine: LLMEngine, answer: str) -> None:
    """Ask about the second picture again, and about one that differs in a colour; print the work for each.

    The KV of a picture depends on all tokens before it, its embeddings on the picture alone. So the next question in a
    conversation finds the KV. Another conversation, with other words before the picture, finds the embeddings. A
    picture whose star has another colour is a new one.
    """
    tour.headline("3. The same picture again", show_again)
    told, question = {"role": "assistant", "content": answer}, {"role": "user", "content": NEXT.question}
    conversations = {
        "next question": [SEEN[1].message(), told, question],
        "other conversation": [NEXT.message(question_first=True)],
        "other star": [OTHER.message()],
    }
    columns = [Column(name, no_wrap=True) for name in ("", "prompt", "KV found", "embeddings", "first token")]
    table = Table(*columns, "answer", box=None, padding=(0, 2, 0, 0))
    for name, messages in conversations.items():
        prompt, before = engine.chat_prompt(messages), cast(EngineStats, engine.stats())
        output = checked(engine.generate(prompt, replace(tour.params, n=1), **tour.options_of(prompt)))
        after = cast(EngineStats, engine.stats())
        made = after.num_encoded_tokens - before.num_encoded_tokens
        found = after.num_encoder_hits - before.num_encoder_hits
        embeddings = f"{made} made" if made else "found" if found else "not read"
        counts = f"{len(prompt)} tokens", str(output.metrics.cached_tokens)
        ttft = f"{(output.metrics.time_to_first_token or 0.0) * 1e3:.1f} ms"
        table.add_row(name, *counts, embeddings, ttft, Text(output.text, style="green"))
    tour.console.print(table)
