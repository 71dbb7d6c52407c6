"""StopChecker: where an output ends and why, the same whether tokens come one by one or several at once."""

from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.request import BaseFinishReason, FinishLength, FinishMatchedStr, FinishMatchedToken, Sequence
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.stop_checker import StopChecker, StopVerdict, held_back
from tests.m1_single_request.helpers import PieceTokenizer, sequence_of
from tests.support.amounts import examples

EOS, OTHER_EOS = 90, 91
SPECIAL = {EOS: b"<end>", OTHER_EOS: b"<over>"}
LETTERS = {0: b"a", 1: b"b", 2: b"c", 3: b"d", 4: b"x"} | SPECIAL


def checker(max_model_len: int = 1000) -> StopChecker:
    return StopChecker(eos_token_ids=[EOS, OTHER_EOS], max_model_len=max_model_len)


def final_text(sequence: Sequence, verdict: StopVerdict) -> str:
    """The text of a sequence that ends with this verdict."""
    detokenizer = sequence.detokenizer
    if verdict.text_end is not None:
        return detokenizer.text[: verdict.text_end]
    return detokenizer.text + detokenizer.tail()


def judge(sequence: Sequence, runs: SequenceOf[SequenceOf[int]], max_model_len: int) -> tuple[int, Any, str]:
    """How many tokens are accepted if they come in these runs, what ends the sequence, and its text."""
    accepted, verdict = 0, StopVerdict(0)
    for run in runs:
        verdict = checker(max_model_len).check(sequence, run)
        for token_id in run[: verdict.num_accepted]:
            sequence.add_token_id(token_id)
        accepted += verdict.num_accepted
        if verdict.finish_reason is not None:
            break
    return accepted, verdict.finish_reason, final_text(sequence, verdict)


# --- by example -------------------------------------------------------------------------------------------------------


def test_only_a_stop_token_and_a_stop_string_are_named_as_stop_reason() -> None:
    token, eos = FinishMatchedToken(7, is_eos=False), FinishMatchedToken(EOS, is_eos=True)
    reasons = [token, eos, FinishMatchedStr("END"), FinishLength("max_tokens", 3)]
    assert [reason.stop_reason for reason in reasons] == [7, None, "END", None]
    assert [reason.reason for reason in reasons] == ["stop", "stop", "stop", "length"]


def test_stop_ids_are_the_union_of_the_request_and_the_model() -> None:
    assert checker().stop_ids(sequence_of({}, stop_token_ids=[5])) == {5, EOS, OTHER_EOS}
    assert checker().stop_ids(sequence_of({}, stop_token_ids=[5], ignore_eos=True)) == {5}
    assert checker().stop_ids(sequence_of({})) == {EOS, OTHER_EOS}


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"stop": "b"}, "ab"), ({"stop_token_ids": [1]}, "a"), ({"max_tokens": 2}, "ab")],
    ids=["string", "token", "length"],
)
def test_what_lies_behind_a_stop_is_neither_read_nor_committed(settings: dict[str, Any], text: str) -> None:
    sequence = sequence_of(LETTERS, special=SPECIAL, **settings)
    checker().check(sequence, [0, 1, 2])
    assert sequence.detokenizer.text == text
    assert sequence.get_output_len() == 0, "committing is the scheduler's"


class CountingTokenizer(PieceTokenizer):
    """Counts how often it is called."""

    num_calls = 0

    def decode(self, ids: SequenceOf[int], **settings: Any) -> str:
        self.num_calls += 1
        return super().decode(ids, **settings)


def counted(**settings: Any) -> tuple[Sequence, CountingTokenizer]:
    """A sequence without output, and its tokenizer, which counts."""
    tokenizer = CountingTokenizer(LETTERS, SPECIAL)
    detokenizer = IncrementalDetokenizer(tokenizer)  # type: ignore[arg-type]
    return Sequence("req", [0, 1, 2], SamplingParams(**settings), detokenizer), tokenizer


@pytest.mark.parametrize("last", [1, 4, EOS])
def test_without_stop_strings_nothing_is_decoded_until_the_text_is_read(last: int) -> None:
    sequence, tokenizer = counted(stop_token_ids=[4], max_tokens=3)
    for token_id in (1, 2, last):
        verdict = checker().check(sequence, [token_id])
        sequence.add_token_id(token_id)
    assert verdict.finish_reason is not None and tokenizer.num_calls == 0
    assert final_text(sequence, verdict) == ("bcb" if last == 1 else "bc") and tokenizer.num_calls > 0


def test_stop_strings_are_looked_for_only_where_they_may_stop() -> None:
    sequence, tokenizer = counted(stop="cd", min_tokens=3)
    assert checker().check(sequence, [0, 1]) == StopVerdict(2) and tokenizer.num_calls == 0
    for token_id in (0, 1):
        sequence.add_token_id(token_id)
    assert checker().check(sequence, [2, 3]) == StopVerdict(2, FinishMatchedStr("cd"), 2)


# --- against a brute-force oracle -------------------------------------------------------------------------------------

SINGLE_BYTES = {i: bytes([byte]) for i, byte in enumerate([*b"abc", *"é".encode(), *"🙂".encode()])}
PIECES = SINGLE_BYTES | {20: b"ab", 21: b"ca", 22: b"bca", 23: "é".encode(), 24: b"aab"}
stop_strings = st.lists(st.text("abcé", min_size=1, max_size=4) | st.just("<end>"), max_size=3)
token_ids = st.lists(st.sampled_from([*PIECES, *SPECIAL]), min_size=1, max_size=12)
stop_settings = st.fixed_dictionaries(
    {"stop": stop_strings},
    optional={
        "stop_token_ids": st.lists(st.sampled_from([*PIECES, *SPECIAL]), max_size=2),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 6),
        "max_tokens": st.integers(6, 10),
        "skip_special_tokens": st.booleans(),
    },
)


def brute_force(
    sequence: Sequence, ids: list[int], prompt_len: int, max_model_len: int
) -> tuple[int, BaseFinishReason | None, str]:
    """The same as `judge`, by looking at everything again for every token."""
    params, decode = sequence.sampling_params, PieceTokenizer(PIECES | SPECIAL, SPECIAL).decode
    stop_ids = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS, OTHER_EOS})

    def text_of(num: int) -> str:
        return decode(ids[:num], skip_special_tokens=params.skip_special_tokens)

    for num in range(1, len(ids) + 1):
        old, new = text_of(num - 1).rstrip("\ufffd"), text_of(num).rstrip("\ufffd")
        ends = [
            (end, -len(s), s) for s in params.stop for end in range(len(old) + 1, len(new) + 1) if new[:end].endswith(s)
        ]
        if num >= params.min_tokens and ends:
            end, _, string = min(ends)
            cut = end if params.include_stop_str_in_output else end - len(string)
            return num, FinishMatchedStr(string), new[:cut]
        if num >= params.min_tokens and ids[num - 1] in stop_ids:
            is_eos = ids[num - 1] in (EOS, OTHER_EOS) and ids[num - 1] not in params.stop_token_ids
            shown = num if params.include_stop_str_in_output else num - 1
            return num, FinishMatchedToken(ids[num - 1], is_eos), text_of(shown)
        if num >= params.max_tokens:
            return num, FinishLength("max_tokens", params.max_tokens), text_of(num)
        if prompt_len + num >= max_model_len:
            return num, FinishLength("max_model_len", max_model_len), text_of(num)
    return len(ids), None, text_of(len(ids))


@settings(max_examples=examples(1500))
@given(ids=token_ids, wanted=stop_settings, prompt_len=st.integers(1, 5), cut=st.integers(0, 12))
@example(ids=[22], wanted={"stop": ["ca", "bca"]}, prompt_len=1, cut=0)  # of two that end together the longer wins
@example(ids=[0] * 9, wanted={"stop": []}, prompt_len=5, cut=3)  # the model's length counts the prompt
def test_any_run_of_tokens_ends_where_the_oracle_says_however_it_is_cut(
    ids: list[int], wanted: dict[str, Any], prompt_len: int, cut: int
) -> None:
    def fresh() -> Sequence:
        return sequence_of(PIECES | SPECIAL, special=SPECIAL, prompt_len=prompt_len, **wanted)

    expected = brute_force(fresh(), ids, prompt_len, max_model_len=12)
    for runs in ([ids], [ids[:cut], ids[cut:]], [[token_id] for token_id in ids]):
        assert judge(fresh(), runs, 12) == expected


# --- held-back text ---------------------------------------------------------------------------------------------------


@settings(max_examples=examples(300))
@given(text=st.text("abcé", max_size=12), stops=stop_strings)
@example(text="aaaa", stops=["aaab"])
def test_held_back_is_the_longest_end_that_is_the_beginning_of_a_longer_stop_string(
    text: str, stops: list[str]
) -> None:
    lengths = [n for n in range(len(text) + 1) for s in stops if n < len(s) and text.endswith(s[:n])]
    assert held_back(text, stops) == max(lengths, default=0)


@settings(max_examples=examples(300))
@given(ids=token_ids, wanted=stop_settings)
def test_a_stream_that_holds_text_back_never_shows_what_is_cut_later(ids: list[int], wanted: dict[str, Any]) -> None:
    sequence = sequence_of(PIECES | SPECIAL, special=SPECIAL, **wanted)
    shown, verdict = [""], StopVerdict(0)
    for token_id in ids:
        verdict = checker().check(sequence, [token_id])
        sequence.add_token_id(token_id)
        if verdict.finish_reason is not None:
            break
        text = sequence.detokenizer.text
        shown.append(text[: len(text) - held_back(text, sequence.sampling_params.stop)])
    final = final_text(sequence, verdict)
    assert all(final.startswith(part) for part in shown)
    assert shown == sorted(shown, key=len), "what was shown is never taken back"
