"""The tokens of answers, each in the colour of its origin: an accepted draft, a corrected one, or no draft.

    view = TokenOrigins()                                     # a reader of the trace: TraceConfig(readers=(view,))
    console.print(coloured(view.tokens["req-0"], tokenizer.decode, with_marks=False))

New in m5: before it, each token of an answer had a step of its own. vLLM and SGLang report counts of accepted drafts.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.text import Text

from m1_single_request.events import EngineStarted
from m1_single_request.output_events import Result
from m1_single_request.tracer import TraceReader, TraceRecord
from m5_chunked_prefill_spec.events import Verified

ORIGINS = {
    "accepted": ("green", "[]", "an accepted draft"),
    "corrected": ("bold red", "{}", "in the place of a wrong draft"),
    "bonus": ("bold cyan", "<>", "behind drafts that were all accepted"),
    "own": ("default", "", "without a draft"),
}
"""Colour, marks around a run of tokens where a console shows no colours, and meaning."""


class Token(NamedTuple):
    """One token of an answer."""

    token_id: int
    origin: str
    """As returned by `Verified.origin`; `own`: without any draft."""


class TokenOrigins(TraceReader):
    """Keeps the tokens of each request with their origins; of several engines in a trace, those of the last one."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[Token]] = defaultdict(list)
        """By request id."""
        self._verified: dict[str, Verified] = {}

    def read(self, record: TraceRecord) -> None:
        """Keep the tokens of a result; a verification of the same step comes before it."""
        match record.event:
            case EngineStarted():
                self.tokens.clear()
            case Verified() as event:
                self._verified[event.rid] = event
            case Result() as event:
                verified = self._verified.pop(event.rid, None)
                for place, token_id in enumerate(event.tokens):
                    self.tokens[event.rid].append(Token(token_id, verified.origin(place) if verified else "own"))


def coloured(tokens: Sequence[Token], text_of: Callable[[list[int]], str], *, with_marks: bool) -> Text:
    """Return an answer with each token in the colour of its origin; `with_marks`: also in brackets.

    `text_of(token_ids)` decodes a run of tokens.
    """
    runs = groupby(tokens, key=lambda token: token.origin)
    texts = ((origin, text_of([token.token_id for token in run]).replace("\n", " ")) for origin, run in runs)
    return Text().join(_marked(text, origin, with_marks) for origin, text in texts)


def legend(*, with_marks: bool) -> Text:
    """Return the meanings of the colours."""
    meanings = (_marked(meaning, origin, with_marks) for origin, (_, _, meaning) in ORIGINS.items())
    return Text(" · ", style="dim").join(meanings)


def _marked(text: str, origin: str, with_marks: bool) -> Text:
    style, marks, _ = ORIGINS[origin]
    return Text(f"{marks[:1]}{text}{marks[1:]}" if with_marks and text else text, style)
