"""Typical mistakes in a stop checker, each with the hint that it must get."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from m1_single_request.request import FinishLength, FinishMatchedStr, FinishMatchedToken, Sequence
from m1_single_request.stop_checker import StopChecker, StopVerdict


class LooksAtTheToken(StopChecker):
    """A stop string must be in the text of one token."""

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        verdict = super().check(sequence, new_token_ids)
        reason = verdict.finish_reason
        if isinstance(reason, FinishMatchedStr):
            last = sequence.detokenizer.token_text(new_token_ids[verdict.num_accepted - 1])
            return verdict if reason.text in last else StopVerdict(len(new_token_ids))
        return verdict


class FindsOldStrings(StopChecker):
    """A stop string ends the output wherever it is in the text."""

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        verdict, params = super().check(sequence, new_token_ids), sequence.sampling_params
        text = sequence.detokenizer.text if params.stop else ""
        found = next((stop for stop in params.stop if stop in text), None)
        num_output = len(sequence.output_token_ids) + verdict.num_accepted
        if verdict.finish_reason is None and found and num_output >= params.min_tokens:
            return StopVerdict(verdict.num_accepted, FinishMatchedStr(found), text.index(found))
        return verdict


class SearchesOneTooEarly(StopChecker):
    """A stop string is also found if it ends where the new text begins."""

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        params = sequence.sampling_params
        may_stop = params.stop and len(sequence.output_token_ids) + 1 >= params.min_tokens
        old = sequence.detokenizer.text if may_stop else ""
        found = next((stop for stop in params.stop if old.endswith(stop)), None)
        verdict = super().check(sequence, new_token_ids)
        return verdict if found is None else StopVerdict(1, FinishMatchedStr(found), len(old) - len(found))


class FirstOfTheList(StopChecker):
    """The first stop string of the list that is in the text counts."""

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        verdict, params = super().check(sequence, new_token_ids), sequence.sampling_params
        if not isinstance(verdict.finish_reason, FinishMatchedStr):
            return verdict
        text = sequence.detokenizer.text
        found = next(stop for stop in params.stop if stop in text)
        end = text.index(found) + len(found) * params.include_stop_str_in_output
        return StopVerdict(verdict.num_accepted, FinishMatchedStr(found), end)


class PushesAll(StopChecker):
    """The tokens behind the stop are in the detokenizer, too."""

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        verdict = super().check(sequence, new_token_ids)
        for token_id in new_token_ids[verdict.num_accepted :]:
            sequence.detokenizer.push(token_id)
        return verdict


class ShowsTheStopToken(StopChecker):
    """A stop token stays in the text."""

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        verdict = super().check(sequence, new_token_ids)
        is_hidden = not sequence.sampling_params.include_stop_str_in_output
        if isinstance(verdict.finish_reason, FinishMatchedToken) and is_hidden:
            sequence.detokenizer.push(verdict.finish_reason.token_id)
        return verdict


class LengthFirst(StopChecker):
    """A length has priority over everything else."""

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        verdict, limit = super().check(sequence, new_token_ids), sequence.sampling_params.max_tokens
        if len(sequence.output_token_ids) + verdict.num_accepted >= limit:
            return StopVerdict(verdict.num_accepted, FinishLength("max_tokens", limit))
        return verdict


class CountsTheOutputOnly(StopChecker):
    """The prompt does not count for the length of the model."""

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        longer = StopChecker(
            eos_token_ids=self.eos_token_ids, max_model_len=self.max_model_len + sequence.get_prompt_len()
        )
        return longer.check(sequence, new_token_ids)


class ForgetsMinTokens(StopChecker):
    """`min_tokens` is ignored."""

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        params = sequence.sampling_params
        sequence.sampling_params = replace(params, min_tokens=0)
        try:
            return super().check(sequence, new_token_ids)
        finally:
            sequence.sampling_params = params


class ReadsAlways(StopChecker):
    """The text is read at every token."""

    def check(self, sequence: Sequence, new_token_ids: SequenceOf[int]) -> StopVerdict:
        assert sequence.detokenizer.text is not None
        return super().check(sequence, new_token_ids)


class RemembersStopIds(StopChecker):
    """The stop ids of the first request are those of all."""

    known: frozenset[int] | None = None

    def stop_ids(self, sequence: Sequence) -> frozenset[int]:
        self.known = self.known or super().stop_ids(sequence)
        return self.known


WRONG = [
    (LooksAtTheToken, "Search the text, not the token"),
    (FindsOldStrings, "The string was complete before min_tokens was reached"),
    (SearchesOneTooEarly, "so it was complete before"),
    (FirstOfTheList, "Not the order of `stop` decides"),
    (PushesAll, "Tokens behind the stop must not be pushed"),
    (ShowsTheStopToken, "A stop token is removed from the text"),
    (LengthFirst, "The order at one token"),
    (CountsTheOutputOnly, "for prompt and output together"),
    (ForgetsMinTokens, "nothing but a length may end it"),
    (ReadsAlways, "the text is not needed"),
    (RemembersStopIds, "A checker stores nothing about a request"),
]
