"""What the demo remembers of the trace: what each step was filled with, and where each token came from.

Part of `python -m m5_chunked_prefill_spec.demo`; nothing in the engine depends on it.
"""

from collections import defaultdict
from typing import Any, NamedTuple

from rich.text import Text

from m1_single_request.output_events import Result
from m1_single_request.tracer import TraceRecord
from m5_chunked_prefill_spec.events import Batch, ChunkCut, Verified

STYLES = {"accepted": "green", "corrected": "bold red", "bonus": "bold cyan", "own": "default"}
MARKS = {"accepted": ("[", "]"), "corrected": ("{", "}"), "bonus": ("<", ">"), "own": ("", "")}
"""Around runs of tokens where a console shows no colours."""


class Token(NamedTuple):
    """One token of an answer."""

    token_id: int
    origin: str
    """As `Verified.origin` says; `own`: without any guess."""


class Notes:
    """A trace reader for the tour."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, Batch]] = []
        self.cuts: list[tuple[int, ChunkCut]] = []
        self.tokens: dict[str, list[Token]] = defaultdict(list)
        self._verified: dict[str, Verified] = {}

    def read(self, record: TraceRecord) -> None:
        """Keep what is of interest."""
        event: Any = record.event
        if isinstance(event, Batch):
            self.batches.append((record.step, event))
        elif isinstance(event, ChunkCut):
            self.cuts.append((record.step, event))
        elif isinstance(event, Verified):
            self._verified[event.rid] = event
        elif isinstance(event, Result):
            self._note_tokens(event)

    def close(self) -> None:
        """Nothing to do."""

    def _note_tokens(self, result: Result) -> None:
        verified = self._verified.pop(result.rid, None)
        for place, token_id in enumerate(result.tokens):
            self.tokens[result.rid].append(Token(token_id, "own" if verified is None else verified.origin(place)))


def coloured(tokens: list[Token], text_of: Any, *, with_marks: bool) -> Text:
    """An answer, each token in the colour of its origin; and in brackets, where there are no colours.

    `text_of(token_ids)` decodes a run of tokens.
    """
    text, start = Text(), 0
    while start < len(tokens):
        origin = tokens[start].origin
        end = start
        while end < len(tokens) and tokens[end].origin == origin:
            end += 1
        said = text_of([token.token_id for token in tokens[start:end]])
        opening, closing = MARKS[origin] if with_marks and said else ("", "")
        text.append(opening + said.replace("\n", " ") + closing, style=STYLES[origin])
        start = end
    return text


def legend(*, with_marks: bool) -> Text:
    """What the colours mean."""
    meanings = {
        "accepted": "guessed and right",
        "corrected": "in the place of a wrong guess",
        "bonus": "on top of guesses that were all right",
        "own": "without a guess",
    }
    text = Text("tokens: ", style="dim")
    for origin, meaning in meanings.items():
        opening, closing = MARKS[origin] if with_marks else ("", "")
        text.append(f"{opening}{meaning}{closing}", style=STYLES[origin]).append(" · " * (origin != "own"), style="dim")
    return text


def bar(batch: Batch, width: int) -> Text:
    """What a step was filled with, as a share of its budget."""
    decodes = len(batch.rids) - batch.num_prompts
    parts = ((decodes, "D", "green"), (batch.num_draft_tokens, "?", "yellow"), (batch.num_prompt_tokens, "#", "blue"))
    text, drawn, used = Text("|", style="dim"), 0, 0
    for count, letter, style in parts:
        used += count
        until = round(width * min(used, batch.budget) / batch.budget)
        until = max(until, drawn + 1) if count else drawn  # what is there is seen
        text.append(letter * (until - drawn), style=style)
        drawn = until
    return text.append(" " * max(width - drawn, 0)).append("|", style="dim")
