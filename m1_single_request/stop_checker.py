"""One place decides whether a request ends: stop strings, stop ids, length limits.

The scheduler asks before it commits anything, because what comes after a stop must enter neither the output nor a
cache. Several tokens may arrive at once (from m5 on); the earliest stop among them wins, and at one token a string wins
over an id, an id over a length. vLLM splits this between `check_stop` and the detokenizer; SGLang has
`Req.check_finished`.
"""

from collections.abc import Iterable, Sequence as SequenceOf
from dataclasses import dataclass

from m1_single_request.request import (
    BaseFinishReason,
    FinishLength,
    FinishMatchedStr,
    FinishMatchedToken,
    Sequence,
)

NO_IDS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StopVerdict:
    """What the checker found in a run of new tokens."""

    num_accepted: int
    """How many of the new tokens belong to the output; the rest lies behind the stop."""
    finish_reason: BaseFinishReason | None = None
    text_end: int | None = None
    """Where a stop string cuts the text; None: nowhere."""


class StopChecker:
    """Knows the model's end-of-sequence ids and its length limit; keeps no state of its own."""

    def __init__(self, *, eos_token_ids: Iterable[int], max_model_len: int) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len

    def stop_ids(self, sequence: Sequence) -> frozenset[int]:
        """Every id that ends this sequence: its own, and the model's unless they are ignored."""
        params = sequence.sampling_params
        models = NO_IDS if params.ignore_eos else self.eos_token_ids
        return models.union(params.stop_token_ids) if params.stop_token_ids else models

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        """Judge `new_token_ids`, which the sequence does not hold yet.

        Afterwards the sequence's detokenizer holds exactly the accepted tokens, less a stop token whose text is not to
        be shown. Text is asked for only where there are stop strings to look for.
        """
        params, detokenizer = sequence.sampling_params, sequence.detokenizer
        stop_ids, num_output = self.stop_ids(sequence), sequence.get_output_len()
        for accepted, token_id in enumerate(new_token_ids, start=1):
            num_output += 1
            may_stop = num_output >= params.min_tokens
            already = len(detokenizer.text) if params.stop and may_stop else 0
            before = detokenizer.mark()
            detokenizer.push(token_id)
            if may_stop:
                if params.stop and (match := _first_match(detokenizer.text, already, params.stop)):
                    string, end = match
                    cut = end if params.include_stop_str_in_output else end - len(string)
                    return StopVerdict(accepted, FinishMatchedStr(string), cut)
                if token_id in stop_ids:
                    if not params.include_stop_str_in_output:
                        detokenizer.rewind(before)
                    return StopVerdict(accepted, FinishMatchedToken(token_id, self._is_eos(sequence, token_id)))
            if num_output >= params.max_tokens:
                return StopVerdict(accepted, FinishLength("max_tokens", params.max_tokens))
            if sequence.get_prompt_len() + num_output >= self.max_model_len:
                return StopVerdict(accepted, FinishLength("max_model_len", self.max_model_len))
        return StopVerdict(len(new_token_ids))

    def _is_eos(self, sequence: Sequence, token_id: int) -> bool:
        return token_id in self.eos_token_ids and token_id not in sequence.sampling_params.stop_token_ids


def _first_match(text: str, already: int, stops: SequenceOf[str]) -> tuple[str, int] | None:
    """The stop string that is complete first in `text`, given that none ended within the first `already` characters.

    Returns it with the position behind it. Earliest end first, so that the answer does not depend on how the text was
    cut into tokens; of two that end together the longer wins.
    """
    found = []
    for stop in stops:
        start = text.find(stop, max(0, already - len(stop) + 1))
        if start >= 0:
            found.append((start + len(stop), -len(stop), stop))
    if not found:
        return None
    end, _, stop = min(found)
    return stop, end


def held_back(text: str, stops: SequenceOf[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(len(stop) > size and stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
