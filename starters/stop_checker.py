"""Build the stop checker of m1: where does an output end, and why?

An output ends at a stop string, at a stop token, or at a length. Strings are the hard ones: one may be split over
several tokens, or begin in the middle of one, so only the text shows it. Several tokens may come in one step, and what
comes after the stop must enter neither the output nor the text.

Explained in docs/m1_single_request.md#stopchecker-does-it-end-here.

    cp starters/stop_checker.py my_stops.py
    pytest --part stop_checker=my_stops.py:MyStopChecker

The results are the engine's own: the reasons of `m1_single_request/request.py`, and
`StopVerdict(num_accepted: int, finish_reason: BaseFinishReason | None = None, text_end: int | None = None)`. The names
of settings in the docstrings are those of `sequence.sampling_params`; `stop` and `stop_token_ids` are tuples there,
also if the user gave one string or none.
"""

from collections.abc import Iterable, Sequence as SequenceOf

from m1_single_request.request import FinishLength, FinishMatchedStr, FinishMatchedToken, Sequence  # noqa: F401
from m1_single_request.stop_checker import StopVerdict


class MyStopChecker:
    """Checks sequences against their own limits and the model's. One checker serves all requests, in any order: it
    stores nothing about any of them."""

    def __init__(self, *, eos_token_ids: Iterable[int], max_model_len: int) -> None:
        """Given. `eos_token_ids`: the ids with which the model ends an answer."""
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len

    def stop_ids(self, sequence: Sequence) -> frozenset[int]:
        """Return all ids that end this sequence: its `stop_token_ids`, and the model's unless `ignore_eos`."""
        raise NotImplementedError

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        """Return where and why these new tokens end the sequence. They are not in `sequence.output_token_ids` yet, and
        you do not add them: only their text is yours.

        Take the tokens one after the other. Push each one into `sequence.detokenizer`, and ask whether it ends the
        output, in this order:

        1. A stop string, one of `stop`: `FinishMatchedStr(string)`. It may have begun in earlier tokens, also in those
           of an earlier call, but it must end in the text that this token adds. If several do, the one that ends first
           counts; of those that end at the same place, the longest.
        2. A stop token, one of `stop_ids`: `FinishMatchedToken(token_id, is_eos)`. `is_eos` is True if the id is one of
           the model's and the request does not name it in `stop_token_ids`.
        3. A length: `FinishLength("max_tokens", max_tokens)` if the output has so many tokens, this one included; or
           `FinishLength("max_model_len", max_model_len)` if prompt and output together have as many as the model takes.

        While the output has fewer than `min_tokens` tokens, this one included, only a length ends it.

        `StopVerdict.num_accepted` is the number of new tokens up to the end, the last of them included: also a stop
        token belongs to the output. Without a stop it is the number of all, and `finish_reason` is None.

        `StopVerdict.text_end` is None, except for a stop string: the index in `detokenizer.text` at which the string
        begins, or, with `include_stop_str_in_output`, the index after it.

        Afterwards the detokenizer has the accepted tokens and no others. The stop token that ended the output is left
        out, too, unless `include_stop_str_in_output`: its text is not shown.

        The detokenizer has `push(token_id)`; `text`, its complete characters so far; `mark()`, and `rewind(mark)`,
        which removes all tokens since then. To read `text` is slow, because it decodes. So read it only if the request
        has stop strings, and `min_tokens` is reached.
        """
        raise NotImplementedError
