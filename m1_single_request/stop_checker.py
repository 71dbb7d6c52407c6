"""Stop conditions of a request in one place: stop strings, stop ids, length limits.

The scheduler calls the checker before it commits new tokens: tokens after a stop must enter neither the output nor a
cache. The tokens of a stop string stay in `token_ids`; `OutputProcessor.visible_text` cuts the string from the text. A
step may give a request several tokens (from m5 on); the earliest stop among them applies. At the same token a string
has priority over an id, and an id over a length. vLLM splits this between `check_stop` and the detokenizer; SGLang has
`Req.check_finished`.
"""

from collections.abc import Iterable, Sequence as SequenceOf
from dataclasses import dataclass

from m1_single_request.request import BaseFinishReason, FinishLength, FinishMatchedStr, FinishMatchedToken, Sequence

NO_IDS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StopVerdict:
    """Result of `StopChecker.check` for the new tokens of a sequence."""

    num_accepted: int
    """Number of new tokens that belong to the output; the others come after the stop."""
    finish_reason: BaseFinishReason | None = None
    text_end: int | None = None
    """Index in the text at which a stop string cuts it, or None."""


class StopChecker:
    """Checks sequences against their own limits and the model's. Stores no state about any request."""

    def __init__(self, *, eos_token_ids: Iterable[int], max_model_len: int) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len

    def stop_ids(self, sequence: Sequence) -> frozenset[int]:
        """Return all ids that end this sequence: its own, and the model's unless `ignore_eos`."""
        params = sequence.sampling_params
        models = NO_IDS if params.ignore_eos else self.eos_token_ids
        return models.union(params.stop_token_ids) if params.stop_token_ids else models

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        """Push `new_token_ids`, which are not in the sequence yet, into its detokenizer, and check them for a stop.

        Afterwards the detokenizer holds exactly the accepted tokens, except a stop token that the output text excludes.
        Text is decoded only for requests with stop strings.
        """
        params, detokenizer = sequence.sampling_params, sequence.detokenizer
        stop_ids, num_output = self.stop_ids(sequence), len(sequence.output_token_ids)
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
            if len(sequence.prompt_token_ids) + num_output >= self.max_model_len:
                return StopVerdict(accepted, FinishLength("max_model_len", self.max_model_len))
        return StopVerdict(len(new_token_ids))

    def _is_eos(self, sequence: Sequence, token_id: int) -> bool:
        return token_id in self.eos_token_ids and token_id not in sequence.sampling_params.stop_token_ids


def _first_match(text: str, already: int, stops: SequenceOf[str]) -> tuple[str, int] | None:
    """Return the stop string that ends first in `text`, and the index after it; None if there is no match.

    No stop string ends within the first `already` characters. The earliest end is chosen, so the result does not depend
    on how the text is split into tokens; of two with the same end, the longer.
    """
    starts = {stop: text.find(stop, max(0, already - len(stop) + 1)) for stop in stops}
    found = [(start + len(stop), -len(stop), stop) for stop, start in starts.items() if start >= 0]
    end, _, stop = min(found, default=(0, 0, ""))
    return (stop, end) if stop else None


def held_back(text: str, stops: SequenceOf[str]) -> int:
    """Return the number of characters at the end of `text` that may be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=0)
    sizes = range(min(longest - 1, len(text)), 0, -1)
    return next((n for n in sizes if any(len(stop) > n and stop.startswith(text[-n:]) for stop in stops)), 0)
