"""StopChecker: where an output ends and why, the same whether tokens come one by one or several at once."""

from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.request import BaseFinishReason, FinishLength, FinishMatchedStr, FinishMatchedToken, Sequence
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.stop_checker import StopChecker, StopVerdict, held_back
from tests.m1_single_request.helpers import PieceTokenizer, sequence_of
from tests.support.amounts import examples

EOS, OTHER_EOS = 90, 91
LETTERS = {i: bytes([97 + i]) for i in range(26)}  # token 0 is "a", 1 is "b", ...
SPECIAL = {EOS: b"<end>", OTHER_EOS: b"<over>"}
NUMBERED = {i: f"<{i}>".encode() for i in range(90)} | SPECIAL


def checker(max_model_len: int = 1000) -> StopChecker:
    return StopChecker(eos_token_ids=[EOS, OTHER_EOS], max_model_len=max_model_len)


def judge(
    pieces: dict[int, bytes], new: SequenceOf[int], *, max_model_len: int = 1000, **settings: Any
) -> tuple[StopVerdict, Sequence]:
    """The verdict on `new` tokens, and the sequence they were judged for."""
    sequence = sequence_of(pieces | SPECIAL, special=SPECIAL, **settings)
    return checker(max_model_len).check(sequence, new), sequence


def judge_text(*texts: str, **settings: Any) -> tuple[StopVerdict, str]:
    """The verdict on tokens with these texts, and the text that is left of the output."""
    verdict, sequence = judge(dict(enumerate(text.encode() for text in texts)), range(len(texts)), **settings)
    return verdict, sequence.detokenizer.text[: verdict.text_end]


def ended_by(verdict: StopVerdict) -> int | str | None:
    assert verdict.finish_reason is not None
    return verdict.finish_reason.stop_reason


# --- ids --------------------------------------------------------------------------------------------------------------


def test_without_a_stop_all_tokens_are_accepted() -> None:
    verdict, sequence = judge(NUMBERED, [1, 2, 3])
    assert verdict == StopVerdict(3)
    assert sequence.detokenizer.text == "<1><2><3>"


def test_no_new_token_is_no_stop() -> None:
    assert judge(NUMBERED, [])[0] == StopVerdict(0)


def test_a_stop_inside_an_accepted_run_ends_it_and_counts_as_output() -> None:
    verdict, sequence = judge(NUMBERED, [10, 11, 12, 20], stop_token_ids=[12])
    assert verdict == StopVerdict(3, FinishMatchedToken(12, is_eos=False))
    assert ended_by(verdict) == 12
    assert sequence.detokenizer.text == "<10><11>", "the stop token's own text is not shown"


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_every_end_of_sequence_id_stops_and_names_no_stop_reason(eos: int) -> None:
    verdict, _ = judge(NUMBERED, [1, eos, 2])
    assert verdict == StopVerdict(2, FinishMatchedToken(eos, is_eos=True))
    assert ended_by(verdict) is None
    assert verdict.finish_reason is not None and verdict.finish_reason.reason == "stop"


def test_the_earliest_of_several_stop_ids_wins() -> None:
    assert judge(NUMBERED, [1, OTHER_EOS, EOS])[0].finish_reason == FinishMatchedToken(OTHER_EOS, is_eos=True)
    assert judge(NUMBERED, [1, 7, EOS, 8], stop_token_ids=[8, 7])[0] == StopVerdict(
        2, FinishMatchedToken(7, is_eos=False)
    )


def test_ignore_eos_goes_on_past_every_end_of_sequence_id() -> None:
    assert judge(NUMBERED, [EOS, 1, OTHER_EOS, 2], ignore_eos=True)[0] == StopVerdict(4)


def test_stop_token_ids_stop_even_where_end_of_sequence_is_ignored() -> None:
    assert judge(NUMBERED, [EOS, 1, 7, 2], ignore_eos=True, stop_token_ids=[7])[0].num_accepted == 3
    verdict, _ = judge(NUMBERED, [OTHER_EOS, 1, EOS, 2], ignore_eos=True, stop_token_ids=[EOS])
    assert verdict.num_accepted == 3 and ended_by(verdict) == EOS


def test_stop_ids_are_the_union_of_the_request_and_the_model() -> None:
    assert checker().stop_ids(sequence_of({}, stop_token_ids=[5])) == {5, EOS, OTHER_EOS}
    assert checker().stop_ids(sequence_of({}, stop_token_ids=[5], ignore_eos=True)) == {5}
    assert checker().stop_ids(sequence_of({})) == {EOS, OTHER_EOS}


def test_a_stop_id_as_the_very_first_token_ends_an_empty_text() -> None:
    verdict, sequence = judge(NUMBERED, [EOS])
    assert verdict.num_accepted == 1 and sequence.detokenizer.text == ""


@pytest.mark.parametrize(("include", "text"), [(False, "<1>"), (True, "<1><7>")])
def test_the_text_of_a_stop_token_is_shown_only_on_request(include: bool, text: str) -> None:
    _, sequence = judge(NUMBERED, [1, 7, 2], stop_token_ids=[7], include_stop_str_in_output=include)
    assert sequence.detokenizer.text + sequence.detokenizer.tail() == text


@pytest.mark.parametrize(
    ("include", "skip", "text"),
    [(False, False, "<1>"), (True, False, "<1><end>"), (False, True, "<1>"), (True, True, "<1>")],
)
def test_the_text_of_a_special_stop_token_is_shown_only_where_special_tokens_are(
    include: bool, skip: bool, text: str
) -> None:
    _, sequence = judge(NUMBERED, [1, EOS], include_stop_str_in_output=include, skip_special_tokens=skip)
    assert sequence.detokenizer.text + sequence.detokenizer.tail() == text


@pytest.mark.parametrize("include", [False, True])
def test_half_a_character_before_a_stop_token_stays_broken_bytes(include: bool) -> None:
    pieces = {0: b"a", 1: "é".encode()[:1], 2: "é".encode()[1:]}
    _, sequence = judge(pieces, [0, 1, EOS], include_stop_str_in_output=include, skip_special_tokens=False)
    assert sequence.detokenizer.text + sequence.detokenizer.tail() == ("a\ufffd<end>" if include else "a\ufffd")
    _, sequence = judge(pieces, [0, 1, 2, EOS], stop_token_ids=[2])
    assert sequence.detokenizer.text + sequence.detokenizer.tail() == "a\ufffd", (
        "the other half is the stop token itself"
    )


# --- strings ----------------------------------------------------------------------------------------------------------


def test_a_stop_string_is_cut_off() -> None:
    verdict, text = judge_text("one ", "END", " two", stop="END")
    assert verdict == StopVerdict(2, FinishMatchedStr("END"), 4)
    assert (text, ended_by(verdict)) == ("one ", "END")


def test_a_stop_string_is_kept_on_request_and_nothing_behind_it() -> None:
    verdict, text = judge_text("one ", "EN", "Dless", stop="END", include_stop_str_in_output=True)
    assert verdict.num_accepted == 3 and text == "one END"


def test_a_stop_string_is_found_across_tokens() -> None:
    verdict, text = judge_text("x E", "N", "D y", "z", stop="END")
    assert verdict.num_accepted == 3 and text == "x "


def test_a_stop_string_is_found_across_steps() -> None:
    sequence = sequence_of({0: b"x E", 1: b"N", 2: b"D y"}, stop="END")
    for token_id in (0, 1):
        assert checker().check(sequence, [token_id]) == StopVerdict(1)
        sequence.add_token_id(token_id)
    assert checker().check(sequence, [2]) == StopVerdict(1, FinishMatchedStr("END"), 2)


def test_a_stop_string_at_the_very_first_token_leaves_no_text() -> None:
    verdict, text = judge_text("END", "more", stop="END")
    assert verdict == StopVerdict(1, FinishMatchedStr("END"), 0) and text == ""


def test_a_stop_string_inside_one_token_cuts_it() -> None:
    assert judge_text("abENDcd", stop="END")[1] == "ab"
    assert judge_text("abENDcd", stop="END", include_stop_str_in_output=True)[1] == "abEND"


def test_the_first_of_two_occurrences_counts() -> None:
    assert judge_text("aXbXc", stop="X")[1] == "a"


def test_of_two_strings_in_one_token_the_one_that_ends_first_wins() -> None:
    for stops in (["cde", "b"], ["b", "cde"]):
        verdict, text = judge_text("abcdef", stop=stops)
        assert (ended_by(verdict), text) == ("b", "a")
    verdict, text = judge_text("abcdef", stop=["bcde", "cd"])
    assert (ended_by(verdict), text) == ("cd", "ab"), "the longer one begins earlier, but is complete later"


def test_of_two_strings_that_end_together_the_longer_wins() -> None:
    for stops in (["cd", "abcd", "bcd"], ["abcd", "bcd", "cd"]):
        verdict, text = judge_text("xxab", "cd", stop=stops)
        assert (ended_by(verdict), text) == ("abcd", "xx")


def test_of_two_strings_the_one_of_the_earlier_token_wins() -> None:
    verdict, _ = judge_text("a", "bb", "a", "a", stop=["aa", "bb"])
    assert (verdict.num_accepted, ended_by(verdict)) == (2, "bb")


def test_a_stop_string_in_a_character_that_came_in_pieces() -> None:
    emoji = "🙂".encode()
    pieces = {0: b"a", 1: emoji[:2], 2: emoji[2:3], 3: emoji[3:], 4: b"b"}
    verdict, sequence = judge(pieces, [0, 1, 2, 3, 4], stop="🙂")
    assert verdict == StopVerdict(4, FinishMatchedStr("🙂"), 1)
    assert sequence.detokenizer.text[: verdict.text_end] == "a"


def test_text_of_skipped_special_tokens_matches_no_stop_string() -> None:
    assert judge(LETTERS, [0, EOS, 1], stop="<end>", ignore_eos=True)[0] == StopVerdict(3)
    shown, _ = judge(LETTERS, [0, EOS, 1], stop="<end>", ignore_eos=True, skip_special_tokens=False)
    assert shown == StopVerdict(2, FinishMatchedStr("<end>"), 1)


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_max_tokens_ends_the_run_and_counts_what_was_there_before() -> None:
    assert judge(LETTERS, [1, 2, 3, 4], max_tokens=3)[0] == StopVerdict(3, FinishLength("max_tokens", 3))
    assert judge(LETTERS, [1, 2, 3], max_tokens=3, output=[0, 0])[0] == StopVerdict(1, FinishLength("max_tokens", 3))
    assert judge(LETTERS, [1, 2], max_tokens=3)[0] == StopVerdict(2)


def test_max_model_len_counts_prompt_and_output_together() -> None:
    limit = FinishLength("max_model_len", 8)
    assert judge(LETTERS, [1, 2, 3, 4], prompt_len=5, max_model_len=8)[0] == StopVerdict(3, limit)
    assert judge(LETTERS, [1, 2], prompt_len=5, output=[0, 0], max_model_len=8)[0] == StopVerdict(1, limit)
    assert judge(LETTERS, [1, 2], prompt_len=5, max_model_len=8)[0] == StopVerdict(2)


def test_a_prompt_one_short_of_max_model_len_yields_one_token() -> None:
    assert judge(LETTERS, [1], prompt_len=7, max_model_len=8)[0] == StopVerdict(1, FinishLength("max_model_len", 8))


def test_the_limit_that_comes_first_is_named_and_a_length_has_no_stop_reason() -> None:
    shorter, _ = judge(LETTERS, [1] * 9, prompt_len=3, max_tokens=4, max_model_len=8)
    assert (shorter.num_accepted, shorter.finish_reason) == (4, FinishLength("max_tokens", 4))
    longer, _ = judge(LETTERS, [1] * 9, prompt_len=3, max_tokens=6, max_model_len=8)
    assert (longer.num_accepted, longer.finish_reason) == (5, FinishLength("max_model_len", 8))
    assert ended_by(shorter) is None and ended_by(longer) is None
    assert longer.finish_reason is not None and longer.finish_reason.reason == "length"


# --- several at once --------------------------------------------------------------------------------------------------


def test_at_one_token_a_string_wins_over_an_id_and_an_id_over_a_length() -> None:
    everything: dict[str, Any] = {"stop_token_ids": [2], "max_tokens": 3}
    assert judge(LETTERS, [0, 1, 2], stop="bc", **everything)[0] == StopVerdict(3, FinishMatchedStr("bc"), 1)
    assert judge(LETTERS, [0, 1, 2], **everything)[0] == StopVerdict(3, FinishMatchedToken(2, is_eos=False))
    assert judge(LETTERS, [0, 1, 3], **everything)[0] == StopVerdict(3, FinishLength("max_tokens", 3))


def test_the_earlier_token_wins_whatever_kind_of_stop_it_is() -> None:
    assert judge(LETTERS, [0, 2, 1, 3], stop="bd", stop_token_ids=[2])[0].finish_reason == FinishMatchedToken(
        2, is_eos=False
    )
    assert judge(LETTERS, [0, 1, 2, 3], stop="cd", max_tokens=2)[0].finish_reason == FinishLength("max_tokens", 2)
    assert judge(LETTERS, [0, 1, EOS, 2], stop="b", max_tokens=3)[0] == StopVerdict(2, FinishMatchedStr("b"), 1)


def test_a_stop_string_made_of_the_text_of_end_of_sequence_wins_over_its_id() -> None:
    verdict, _ = judge(LETTERS, [0, EOS], stop="<end>", skip_special_tokens=False)
    assert verdict == StopVerdict(2, FinishMatchedStr("<end>"), 1)


# --- min_tokens -------------------------------------------------------------------------------------------------------


def test_before_min_tokens_neither_id_nor_string_ends_the_request() -> None:
    verdict, sequence = judge(LETTERS, [EOS, 5, 1, 2, 5, 7], stop="bc", stop_token_ids=[5], min_tokens=5)
    assert verdict == StopVerdict(5, FinishMatchedToken(5, is_eos=False))
    assert sequence.detokenizer.text == "fbc"


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4])
def test_the_token_that_makes_min_tokens_may_stop(min_tokens: int) -> None:
    by_id, _ = judge(LETTERS, [5, 5, 5, 5], stop_token_ids=[5], min_tokens=min_tokens)
    by_string, _ = judge(LETTERS, [5, 5, 5, 5], stop="f", min_tokens=min_tokens)
    assert by_id.num_accepted == by_string.num_accepted == max(1, min_tokens)


def test_min_tokens_counts_the_output_that_was_there_before() -> None:
    assert judge(LETTERS, [5], stop_token_ids=[5], min_tokens=3, output=[0])[0] == StopVerdict(1)
    assert judge(LETTERS, [5], stop_token_ids=[5], min_tokens=3, output=[0, 0])[0].finish_reason is not None


def test_a_stop_string_that_was_complete_before_min_tokens_does_not_count_later() -> None:
    verdict, text = judge_text("a", "bc", "x", "y", "bc", stop="bc", min_tokens=3)
    assert verdict.num_accepted == 5 and text == "abcxy"


def test_a_stop_string_may_begin_before_min_tokens_and_end_after() -> None:
    verdict, text = judge_text("a", "b", "c", stop="bc", min_tokens=3)
    assert verdict.num_accepted == 3 and text == "a"


def test_lengths_end_the_request_at_min_tokens_too() -> None:
    assert judge(LETTERS, [1, 2, 3], min_tokens=2, max_tokens=2)[0] == StopVerdict(2, FinishLength("max_tokens", 2))
    assert judge(LETTERS, [1, 2, 3], min_tokens=50, prompt_len=3, max_model_len=5)[0].num_accepted == 2


# --- the detokenizer afterwards ---------------------------------------------------------------------------------------


def test_what_lies_behind_a_stop_is_not_read() -> None:
    assert judge(LETTERS, [0, 1, 2], stop="b")[1].detokenizer.text == "ab"
    assert judge(LETTERS, [0, 1, 2], stop_token_ids=[1])[1].detokenizer.text == "a"
    assert judge(LETTERS, [0, 1, 2], max_tokens=2)[1].detokenizer.text == "ab"


class CountingTokenizer(PieceTokenizer):
    """Counts how often it is asked."""

    num_calls = 0

    def decode(self, ids: SequenceOf[int], **settings: Any) -> str:
        self.num_calls += 1
        return super().decode(ids, **settings)


def counted(**settings: Any) -> tuple[Sequence, CountingTokenizer]:
    """A sequence without output, and its tokenizer, which counts."""
    tokenizer = CountingTokenizer(LETTERS | SPECIAL, SPECIAL)
    detokenizer = IncrementalDetokenizer(tokenizer)  # type: ignore[arg-type]
    return Sequence("req", [0, 1, 2], SamplingParams(**settings), detokenizer), tokenizer


@pytest.mark.parametrize("last", [1, 7, EOS])
def test_without_stop_strings_nothing_is_decoded_until_somebody_asks(last: int) -> None:
    sequence, tokenizer = counted(stop_token_ids=[7], max_tokens=3)
    for token_id in (1, 2, last):
        verdict = checker().check(sequence, [token_id])
        sequence.add_token_id(token_id)
    assert verdict.finish_reason is not None and tokenizer.num_calls == 0
    assert sequence.detokenizer.text == ("bcb" if last == 1 else "bc") and tokenizer.num_calls > 0


def test_stop_strings_are_looked_for_only_where_they_may_stop() -> None:
    sequence, tokenizer = counted(stop="de", min_tokens=3)
    assert checker().check(sequence, [1, 2]) == StopVerdict(2) and tokenizer.num_calls == 0
    for token_id in (1, 2):
        sequence.add_token_id(token_id)
    assert checker().check(sequence, [3, 4]) == StopVerdict(2, FinishMatchedStr("de"), 2)


def test_the_checker_adds_no_token_to_the_sequence() -> None:
    """It judges; committing is the scheduler's."""
    _, sequence = judge(LETTERS, [0, 1, EOS])
    assert sequence.get_output_len() == 0


# --- against a brute-force oracle -------------------------------------------------------------------------------------

SINGLE_BYTES = {i: bytes([byte]) for i, byte in enumerate([*b"abc", *"é".encode(), *"🙂".encode()])}
PIECES = SINGLE_BYTES | {20: b"ab", 21: b"ca", 22: b"bca", 23: "é".encode(), 24: b"aab"}
stop_strings = st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3)
token_ids = st.lists(st.sampled_from([*PIECES, *SPECIAL]), min_size=1, max_size=12)
stop_settings = st.fixed_dictionaries(
    {"stop": stop_strings},
    optional={
        "stop_token_ids": st.lists(st.sampled_from(list(PIECES)), max_size=2),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 6),
        "max_tokens": st.integers(6, 10),
        "skip_special_tokens": st.booleans(),
    },
)


def brute_force(sequence: Sequence, ids: list[int], prompt_len: int, max_model_len: int) -> tuple[StopVerdict, str]:
    """The verdict and the final text, by looking at everything again for every token."""
    params, decode = sequence.sampling_params, PieceTokenizer(PIECES | SPECIAL, SPECIAL).decode
    stop_ids = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS, OTHER_EOS})

    def text_of(num: int) -> str:
        return decode(ids[:num], skip_special_tokens=params.skip_special_tokens)

    reason: BaseFinishReason
    for num in range(1, len(ids) + 1):
        old, new = text_of(num - 1).rstrip("\ufffd"), text_of(num).rstrip("\ufffd")
        ends = [
            (end, -len(s), s) for s in params.stop for end in range(len(old) + 1, len(new) + 1) if new[:end].endswith(s)
        ]
        if num >= params.min_tokens and ends:
            end, _, string = min(ends)
            cut = end if params.include_stop_str_in_output else end - len(string)
            return StopVerdict(num, FinishMatchedStr(string), cut), new[:cut]
        if num >= params.min_tokens and ids[num - 1] in stop_ids:
            is_eos = ids[num - 1] in (EOS, OTHER_EOS) and ids[num - 1] not in params.stop_token_ids
            reason = FinishMatchedToken(ids[num - 1], is_eos)
            return StopVerdict(num, reason), text_of(num if params.include_stop_str_in_output else num - 1)
        if num >= params.max_tokens or prompt_len + num >= max_model_len:
            reason = FinishLength("max_tokens", params.max_tokens)
            if num < params.max_tokens:
                reason = FinishLength("max_model_len", max_model_len)
            return StopVerdict(num, reason), text_of(num)
    return StopVerdict(len(ids)), text_of(len(ids))


@settings(max_examples=examples(300))
@given(ids=token_ids, wanted=stop_settings, prompt_len=st.integers(1, 5), cut=st.integers(0, 12))
def test_any_run_of_tokens_ends_where_the_oracle_says_however_it_is_cut(
    ids: list[int], wanted: dict[str, Any], prompt_len: int, cut: int
) -> None:
    def fresh() -> Sequence:
        return sequence_of(PIECES | SPECIAL, special=SPECIAL, prompt_len=prompt_len, **wanted)

    expected, text = brute_force(fresh(), ids, prompt_len, max_model_len=12)

    sequence = fresh()
    verdict = checker(12).check(sequence, ids)
    assert verdict == expected
    whole = sequence.detokenizer.text + sequence.detokenizer.tail()
    assert (whole if verdict.text_end is None else sequence.detokenizer.text[: verdict.text_end]) == text

    sequence, accepted = fresh(), 0
    for run in (ids[:cut], ids[cut:]):  # the same in two steps
        step = checker(12).check(sequence, run)
        for token_id in run[: step.num_accepted]:
            sequence.add_token_id(token_id)
        accepted += step.num_accepted
        if step.finish_reason is not None:
            break
    assert (accepted, step.finish_reason, step.text_end) == (
        expected.num_accepted,
        expected.finish_reason,
        expected.text_end,
    )


# --- held-back text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        ("", ["END"], 0),
        ("abc", [], 0),
        ("abc", ["x"], 0),
        ("abE", ["END"], 1),
        ("abEN", ["END"], 2),
        ("abENx", ["END"], 0),
        ("EEN", ["END"], 2),
        ("aaa", ["aaab"], 3),
        ("aaaa", ["aaab"], 3),
        ("xab", ["abc", "bcd"], 2),
        ("xb", ["abc", "bcd"], 1),
        ("x", ["x"], 0),
        ("ab", ["ab", "wxyz"], 0),
    ],
)
def test_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str], held: int) -> None:
    assert held_back(text, stops) == held


@settings(max_examples=examples(300))
@given(text=st.text("abcé", max_size=12), stops=stop_strings)
def test_held_back_is_the_longest_end_that_is_the_beginning_of_a_longer_stop_string(
    text: str, stops: list[str]
) -> None:
    lengths = [n for n in range(len(text) + 1) for s in stops if n < len(s) and text.endswith(s[:n])]
    assert held_back(text, stops) == max(lengths, default=0)


@settings(max_examples=examples(300))
@given(ids=token_ids, wanted=stop_settings)
def test_a_stream_that_holds_text_back_never_shows_what_is_cut_later(ids: list[int], wanted: dict[str, Any]) -> None:
    sequence = sequence_of(PIECES | SPECIAL, special=SPECIAL, **wanted)
    shown, final = [], None
    for token_id in ids:
        verdict, text = checker().check(sequence, [token_id]), sequence.detokenizer.text
        sequence.add_token_id(token_id)
        if verdict.finish_reason is not None:
            final = text + sequence.detokenizer.tail() if verdict.text_end is None else text[: verdict.text_end]
            break
        shown.append(text[: len(text) - held_back(text, sequence.sampling_params.stop)])
    final = sequence.detokenizer.text + sequence.detokenizer.tail() if final is None else final
    assert all(final.startswith(part) for part in shown)
    assert shown == sorted(shown, key=len), "what was shown is never taken back"
