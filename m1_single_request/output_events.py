"""Events of m1's trace about tokens and text: token sampled, result committed, text held back, request finished.

`Result`, `TextHeld` and `Finish` are built after the commit; `Sampled` before it, from logits that are not kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from m1_single_request.detokenizer import Reading
from m1_single_request.request import (
    BaseFinishReason,
    FinishError,
    FinishLength,
    FinishMatchedStr,
    FinishMatchedToken,
    Request,
)
from m1_single_request.sampler import SamplerOutput
from m1_single_request.sampling_metadata import SamplingMetadata
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.stop_checker import held_back
from m1_single_request.trace_event import Event, some, volatile

NUM_CANDIDATES = 4
"""Number of the model's best tokens in a `Sampled` event."""


@dataclass(frozen=True, kw_only=True)
class Sampled(Event):
    """A token was chosen for a request."""

    style: ClassVar[str] = "yellow"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    position: int
    """Index among the output tokens."""
    token_id: int
    """The chosen token."""
    text: str
    """The chosen token alone as text."""
    greedy: bool
    """True if the best token was taken, without a draw."""
    settings: str
    """The sampling parameters that act on this row, in the order in which they act; empty for plain greedy."""
    uniform: float | None
    """Random number of the row, a function of seed and position only; None without a draw."""
    candidates: tuple[tuple[str, float], ...] = volatile()
    """The model's best tokens and their probabilities before any setting acts."""

    @classmethod
    def of(
        cls,
        request_id: str,
        params: SamplingParams,
        position: int,
        logits: Tensor,
        metadata: SamplingMetadata,
        chosen: SamplerOutput,
        row: int,
        text: Callable[[int], str],
    ) -> Self:
        """Build the event for one row of `logits` `[rows, vocab]`. `text` decodes one token."""
        best, ids = logits[row].float().softmax(-1).topk(min(NUM_CANDIDATES, logits.shape[-1]))
        draws = None if params.is_greedy else metadata.uniforms
        return cls(
            rid=request_id,
            position=position,
            token_id=chosen.token_ids[row],
            text=text(chosen.token_ids[row]),
            greedy=params.is_greedy,
            settings=params.describe(),
            uniform=None if draws is None else float(draws[row]),
            candidates=tuple((text(i), p) for i, p in zip(ids.tolist(), best.tolist(), strict=True)),
        )

    def explain(self) -> str:
        likely = [f"{text!r} {probability:.1%}" for text, probability in self.candidates if probability >= 0.001]
        best = ", ".join(likely) + (", nothing else above 0.1%" if len(likely) < len(self.candidates) else "")
        chosen = f"{self.text!r} (token {self.token_id})"
        if self.greedy:
            how = f"greedy{f' after {self.settings}' if self.settings else ''} takes {chosen}"
        else:
            how = (
                f"{self.settings}: the number {self.uniform:.4f}, fixed by the seed and the place in the answer, falls "
                f"on {chosen}"
            )
        return f"The model's favourites for {self.rid}: {best}. For output {self.position + 1}, {how}."


@dataclass(frozen=True, kw_only=True)
class Result(Event):
    """New output tokens of a request were committed."""

    style: ClassVar[str] = "green"
    rid: str
    """Request id."""
    tokens: tuple[int, ...]
    """The new tokens that the stop checker accepted."""
    out_len: int
    """Output tokens so far."""
    max_tokens: int
    """Maximum number of output tokens."""
    new_text: str
    """Text that these tokens completed; joined over the request, it is the text so far."""

    @classmethod
    def of(cls, request: Request, num_tokens: int, before: Reading | None = None) -> Self:
        """Build the event for the newest `num_tokens` tokens. `before`: the text before, if it was read since."""
        sequence = request.sequence
        num_output, detokenizer = sequence.get_output_len(), sequence.detokenizer
        shown = len((before or detokenizer.reading).text)
        return cls(
            rid=request.request_id,
            tokens=tuple(sequence.output_token_ids[num_output - num_tokens :]),
            out_len=num_output,
            max_tokens=request.sampling_params.max_tokens,
            new_text=detokenizer.text[shown:],
        )

    def explain(self) -> str:
        grows = f"grows by {self.new_text!r}" if self.new_text else "does not grow"
        most = some(self.max_tokens, "output token")
        return f"{self.rid} has {self.out_len} of at most {most}; its text {grows}."

    def brief(self) -> str:
        return f"{self.rid} #{self.out_len} {self.new_text!r}"


@dataclass(frozen=True, kw_only=True)
class TextHeld(Event):
    """The end of the text is held back: a stop string may begin there, or a character is incomplete."""

    style: ClassVar[str] = "yellow"
    detail: ClassVar[bool] = True
    rid: str
    """Request id."""
    text: str
    """The text that is held back."""
    stops: tuple[str, ...]
    """The stop strings that may begin; empty if it is an incomplete character."""

    @classmethod
    def of(cls, request: Request) -> Self | None:
        """Build the event for a running request; None if all of its text is shown."""
        detokenizer, stops = request.sequence.detokenizer, request.sampling_params.stop
        text, tail = detokenizer.text, detokenizer.tail()
        held = text[len(text) - held_back(text, stops) :]
        if request.to_finish is not None or not held + tail:
            return None
        begun = tuple(stop for stop in stops if held_back(text, [stop]))
        return cls(rid=request.request_id, text=held + tail, stops=begun)

    def brief(self) -> str:
        return f"{self.rid} holds {self.text!r}"

    def explain(self) -> str:
        if not self.stops:
            return f"The last bytes of {self.rid} are half a character: they are held back until the rest of it comes."
        stops = " or ".join(repr(stop) for stop in self.stops)
        where = f"the stream of {self.rid}"
        return f"{self.text!r} is held back from {where}: it may be the beginning of the stop string {stops}."


@dataclass(frozen=True, kw_only=True)
class Finish(Event):
    """A request ended."""

    style: ClassVar[str] = "bold green"
    rid: str
    """Request id."""
    reason: str
    """`stop`, `length`, `abort` or `error`."""
    matched: int | str | None
    """The stop token's id, the stop string, or the name of the limit."""
    why: str
    """The reason, as a clause."""
    out_len: int
    """Number of output tokens."""

    @classmethod
    def of(cls, request: Request, reason: BaseFinishReason) -> Self:
        """Build the event for a request that ended with `reason`."""
        matched, why = _cause(reason, request)
        out_len = request.sequence.get_output_len()
        return cls(rid=request.request_id, reason=reason.reason, matched=matched, why=why, out_len=out_len)

    def explain(self) -> str:
        return f"{self.rid} ends after {some(self.out_len, 'output token')} ({self.reason}): {self.why}."

    def brief(self) -> str:
        return f"{self.rid} ends: {self.reason}"


def _cause(reason: BaseFinishReason, request: Request) -> tuple[int | str | None, str]:
    """Return the token, string or limit that ended a request, or None, and the reason as a clause."""
    if isinstance(reason, FinishMatchedToken):
        kind = "the end-of-sequence token" if reason.is_eos else "the stop token"
        text = request.sequence.detokenizer.token_text(reason.token_id)
        return reason.token_id, f"{kind} {reason.token_id} ({text!r}) came"
    if isinstance(reason, FinishMatchedStr):
        return reason.text, f"the stop string {reason.text!r} appeared"
    if isinstance(reason, FinishLength):
        return reason.limit, f"{reason.limit} = {reason.value} is reached"
    if isinstance(reason, FinishError):
        return None, f"{type(reason.error).__name__}: {reason.error}"
    return None, "the caller gave it up"
