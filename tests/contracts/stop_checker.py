"""Contract of the stop checker of m1: where an output ends, and why."""

from collections.abc import Sequence as SequenceOf
from random import Random
from typing import Any

from m1_single_request.detokenizer import IncrementalDetokenizer
from m1_single_request.request import BaseFinishReason, FinishLength, FinishMatchedStr, FinishMatchedToken, Sequence
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.stop_checker import StopVerdict
from tests.contracts.part import Part, same
from tests.m1_single_request.helpers import PieceTokenizer

PART = Part(
    name="stop_checker",
    target="m1_single_request.stop_checker:StopChecker",
    lesson="docs/m1_single_request.md#stopchecker-does-it-end-here",
    starter="MyStopChecker",
    role="stop_checker",
    variant="m1_single_request",
)

HALVES = {"é1": b"\xc3", "é2": b"\xa9"}
"""The character é comes as two tokens."""
PIECES = {text: text.encode() for text in ("a", "b", "c", "x", "ab", "bc", "ca", "bca", "<end>", "<over>")} | HALVES
IDS = {text: number for number, text in enumerate(PIECES)}
END, OVER = IDS["<end>"], IDS["<over>"]  # with which the model ends an answer
SPECIAL = {END, OVER}


class CountingTokenizer(PieceTokenizer):
    """Each id is a piece of text. It counts how often it is asked."""

    num_calls = 0

    def decode(self, ids: SequenceOf[int], *, skip_special_tokens: bool = False, **_: object) -> str:
        self.num_calls += 1
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


def tokenizer() -> CountingTokenizer:
    return CountingTokenizer(dict(enumerate(PIECES.values())), SPECIAL)


def sequence_of(prompt_len: int = 3, output: str = "", decoder: Any = None, **settings: Any) -> Sequence:
    """A sequence whose `output` so far are these pieces, with a space between two."""
    params = SamplingParams(**settings)
    skips = params.skip_special_tokens
    detokenizer = IncrementalDetokenizer(decoder or tokenizer(), skip_special_tokens=skips)
    sequence = Sequence("r", list(range(prompt_len)), params, detokenizer)
    for piece in output.split():
        detokenizer.push(IDS[piece])
        sequence.add_token_id(IDS[piece])
    return sequence


def checker(part: Any, max_model_len: int = 100) -> Any:
    return part(eos_token_ids=[END, OVER], max_model_len=max_model_len)


def ids(pieces: str) -> list[int]:
    return [IDS[piece] for piece in pieces.split()]


def shown(settings: dict[str, Any]) -> str:
    """Settings as a learner reads them: each stop token with its text, and nothing that changes nothing."""
    names, told = list(PIECES), dict(settings)
    if stops := told.get("stop_token_ids"):
        told["stop_token_ids"] = f"[{', '.join(f'{i} `{names[i]}`' for i in stops)}]"
    as_default = {"min_tokens": 0, "skip_special_tokens": True}
    told = {name: value for name, value in told.items() if value not in ([], False, as_default.get(name))}
    told |= {name: value for name, value in settings.items() if name == "skip_special_tokens" and not value}
    return ", ".join(f"{name}={value}" for name, value in told.items()) or "no settings"


def check(part: Any, new: str, expected: StopVerdict, hint: str = "", *, prompt_len: int = 3, **settings: Any) -> None:
    """Compare the verdict about these new pieces. `settings` are those of `SamplingParams`, and `output`."""
    limit = 12
    sequence = sequence_of(prompt_len, **settings)
    got = checker(part, limit).check(sequence, ids(new))
    known = shown({name: value for name, value in settings.items() if name != "output"})
    before = f"after the output `{settings['output']}`, " if settings.get("output") else ""
    model = f"a prompt of {prompt_len} tokens, max_model_len={limit}, " if prompt_len > 3 else ""
    same(got, expected, on=f"{known}; {model}{before}the new tokens `{new}`", hint=hint)


def test_without_a_stop_all_tokens_are_accepted(part: Any) -> None:
    """Without a stop all new tokens are accepted."""
    check(part, "a b", StopVerdict(2))
    check(part, "a", StopVerdict(1), stop=["b"], output="a a")


def test_stop_ids_are_those_of_request_and_model(part: Any) -> None:
    """`stop_ids` are the request's own and the model's, without the model's if the request ignores them."""
    stops = checker(part)
    same(stops.stop_ids(sequence_of()), {END, OVER}, on="stop_ids of a request without settings")
    same(stops.stop_ids(sequence_of(stop_token_ids=[5])), {5, END, OVER}, on="stop_token_ids=[5]")
    same(stops.stop_ids(sequence_of(stop_token_ids=[5], ignore_eos=True)), {5}, on="stop_token_ids=[5], ignore_eos")


def test_a_stop_token_ends_the_output(part: Any) -> None:
    """A stop token ends the output and belongs to it; what comes after it does not."""
    hint = "num_accepted counts the stop token, and nothing behind it."
    check(part, "a <end> b", StopVerdict(2, FinishMatchedToken(END, is_eos=True)), hint)
    check(part, "c b", StopVerdict(1, FinishMatchedToken(IDS["c"], is_eos=False)), hint, stop_token_ids=[IDS["c"]])
    hint = "An id that the request names itself is not reported as the model's end, also if it is one."
    check(part, "<end>", StopVerdict(1, FinishMatchedToken(END, is_eos=False)), hint, stop_token_ids=[END])
    check(part, "<end> a", StopVerdict(2), "The request ignores the model's ids.", ignore_eos=True)


def test_an_output_has_at_most_max_tokens(part: Any) -> None:
    """The output ends with its `max_tokens`-th token, those of earlier steps included."""
    hint = "Count the tokens that are in the output already."
    check(part, "a b c", StopVerdict(2, FinishLength("max_tokens", 2)), hint, max_tokens=2)
    check(part, "a b c", StopVerdict(1, FinishLength("max_tokens", 3)), hint, max_tokens=3, output="b b")
    check(part, "a", StopVerdict(1), "One more token fits.", max_tokens=4, output="b b")


def test_a_sequence_has_at_most_max_model_len_tokens(part: Any) -> None:
    """The output ends when prompt and output together have `max_model_len` tokens."""
    hint = "The limit of the model is for prompt and output together."
    check(part, "a b c", StopVerdict(2, FinishLength("max_model_len", 12)), hint, prompt_len=10)
    check(part, "a b c", StopVerdict(1, FinishLength("max_model_len", 12)), hint, prompt_len=9, output="b b")
    hint = "If both lengths are reached by the same token, max_tokens is reported."
    check(part, "a b", StopVerdict(2, FinishLength("max_tokens", 2)), hint, prompt_len=10, max_tokens=2)


def test_a_stop_string_ends_the_output(part: Any) -> None:
    """A stop string ends the output at the token that completes it; its index in the text is where it begins."""
    hint = "`text_end` is where the string begins, or ends with include_stop_str_in_output."
    check(part, "a bca x", StopVerdict(2, FinishMatchedStr("ca"), 2), hint, stop=["ca"])
    expected = StopVerdict(2, FinishMatchedStr("c"), 3)
    check(part, "a bca x", expected, hint, stop=["c"], include_stop_str_in_output=True)


def test_a_stop_string_may_be_split(part: Any) -> None:
    """A stop string may begin in an earlier token, and in an earlier step."""
    hint = "Search the text, not the token: the string begins in the text of earlier tokens."
    check(part, "x ca b", StopVerdict(3, FinishMatchedStr("ab"), 2), hint, stop=["ab"])
    check(part, "b x", StopVerdict(1, FinishMatchedStr("cab"), 1), hint, stop=["cab"], output="x ca")
    hint = "A character of several tokens is in the text when its last token comes."
    check(part, "é1 é2 x", StopVerdict(2, FinishMatchedStr("aé"), 0), hint, stop=["aé"], output="a")


def test_of_several_strings_the_one_that_ends_first_counts(part: Any) -> None:
    """Of several stop strings in one token the one that ends first counts; of those that end together the longest."""
    hint = "Not the order of `stop` decides, and not where a string begins, but where it ends."
    check(part, "bca", StopVerdict(1, FinishMatchedStr("c"), 1), hint, stop=["a", "c"])
    check(part, "bca", StopVerdict(1, FinishMatchedStr("c"), 1), hint, stop=["bca", "c"])
    hint = "`ca` and `bca` end at the same place: the longest counts, so that nothing of it is shown."
    check(part, "bca", StopVerdict(1, FinishMatchedStr("bca"), 0), hint, stop=["ca", "bca"])


def test_a_string_goes_before_a_token_and_a_token_before_a_length(part: Any) -> None:
    """The earliest token decides; at one token a string has priority over a stop token, and that over a length."""
    hint = "The order at one token: string, stop token, length."
    everything: dict[str, Any] = {"stop": ["b"], "stop_token_ids": [IDS["b"]], "max_tokens": 2}
    check(part, "a b c", StopVerdict(2, FinishMatchedStr("b"), 1), hint, **everything)
    expected = StopVerdict(2, FinishMatchedToken(IDS["b"], is_eos=False))
    check(part, "a b c", expected, hint, stop_token_ids=[IDS["b"]], max_tokens=2)
    hint = "Take the tokens one after the other: the first that ends the output counts, whatever the reason."
    check(part, "c <end> b", StopVerdict(2, FinishMatchedToken(END, is_eos=True)), hint, stop=["b"], max_tokens=3)
    check(part, "c b <end>", StopVerdict(1, FinishLength("max_tokens", 1)), hint, stop=["b"], max_tokens=1)


def test_before_min_tokens_only_a_length_stops(part: Any) -> None:
    """Before `min_tokens` tokens neither a string nor a stop token ends the output."""
    hint = "The output has fewer than min_tokens tokens, this one included, so nothing but a length may end it."
    check(part, "<end> a", StopVerdict(2), hint, min_tokens=3)
    check(part, "b a", StopVerdict(2), hint, stop=["b"], min_tokens=3)
    check(part, "a <end>", StopVerdict(2, FinishMatchedToken(END, is_eos=True)), "min_tokens is reached.", min_tokens=2)
    check(part, "a b c", StopVerdict(2, FinishLength("max_model_len", 12)), hint, prompt_len=10, min_tokens=5)
    hint = "The string was complete before min_tokens was reached: it must end in the text that the new token adds."
    check(part, "a x c", StopVerdict(3), hint, stop=["b"], min_tokens=3, output="b")
    hint = "The string ends where the text of the new token begins, so it was complete before: search one further on."
    check(part, "a", StopVerdict(1), hint, stop=["b"], min_tokens=2, output="b")
    expected = StopVerdict(2, FinishMatchedStr("ab"), 1)
    check(part, "a b", expected, "It ends in time, so it counts.", stop=["ab"], min_tokens=3, output="b")


def test_the_text_is_that_of_the_accepted_tokens(part: Any) -> None:
    """Afterwards the detokenizer has the accepted tokens, but no stop token that is not to be shown."""
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"max_tokens": 2}, "ab", "Tokens behind the stop must not be pushed, or must be removed again."),
        ({"stop": ["b"]}, "ab", "The tokens of a stop string stay: only `text_end` cuts it."),
        ({"stop_token_ids": [IDS["b"]]}, "a", "A stop token is removed from the text: mark() before it, and rewind()."),
        ({"stop_token_ids": [IDS["b"]], "include_stop_str_in_output": True}, "ab", "This request wants to see it."),
        ({}, "abc", "All tokens are accepted."),
    ]
    for settings, text, hint in cases:
        sequence = sequence_of(**settings)
        checker(part).check(sequence, ids("a b c"))
        known = shown(settings)
        same(sequence.detokenizer.text, text, on=f"{known}; the new tokens `a b c`; the text afterwards", hint=hint)
        hint = "The scheduler commits the tokens, after the check."
        same(sequence.output_token_ids, [], on=f"{known}; the new tokens `a b c`; the sequence's output", hint=hint)


def test_text_is_read_only_for_stop_strings(part: Any) -> None:
    """Nothing is decoded for a request without stop strings, and nothing before `min_tokens`."""
    hint = "To read `text` decodes. Without a stop string that could end here the text is not needed."
    for settings in ({"stop_token_ids": [IDS["c"]]}, {"stop": ["c"], "min_tokens": 3}):
        decoder = tokenizer()
        sequence = sequence_of(decoder=decoder, **settings)
        for piece in ("a", "b"):
            checker(part).check(sequence, ids(piece))
            sequence.add_token_id(IDS[piece])
        same(decoder.num_calls, 0, on=f"{shown(settings)}; `a`, then `b`; how often the tokenizer decodes", hint=hint)


def test_one_checker_serves_many_requests(part: Any) -> None:
    """One checker serves requests with different settings in turn."""
    stops = checker(part)
    first, second = sequence_of(stop=["ab"], stop_token_ids=[IDS["c"]]), sequence_of(max_tokens=2)
    ends = []
    for sequence, pieces in ((first, "a"), (second, "a"), (first, "x"), (second, "c"), (first, "ab")):
        ends.append(stops.check(sequence, ids(pieces)).finish_reason)
        for token_id in ids(pieces):
            sequence.add_token_id(token_id)
    expected = [None, None, None, FinishLength("max_tokens", 2), FinishMatchedStr("ab")]
    turns = "r1 `a`, r2 `a`, r1 `x`, r2 `c`, r1 `ab`"
    on = f"r1 (stop=['ab'], stop_token_ids=[`c`]) and r2 (max_tokens=2) in turn: {turns}; why they end"
    hint = "A checker stores nothing about a request: all that it needs is in the sequence."
    same(ends, expected, on=on, hint=hint)


def by_brute_force(
    sequence: Sequence, new: SequenceOf[int], max_model_len: int
) -> tuple[int, BaseFinishReason | None, str]:
    """What `new` does to a sequence without output: how many tokens are accepted, the reason, and the text at the end.

    It looks at everything again for every token.
    """
    params, pieces = sequence.sampling_params, list(PIECES.values())
    stop_ids = {*params.stop_token_ids} | (set() if params.ignore_eos else SPECIAL)

    def text_of(num: int) -> str:
        kept = [pieces[i] for i in new[:num] if not (params.skip_special_tokens and i in SPECIAL)]
        return b"".join(kept).decode(errors="replace")

    for num, token_id in enumerate(new, start=1):
        old, text = text_of(num - 1).rstrip("\ufffd"), text_of(num).rstrip("\ufffd")
        ends = range(len(old) + 1, len(text) + 1)
        found = [(end, -len(stop), stop) for stop in params.stop for end in ends if text[:end].endswith(stop)]
        if num >= params.min_tokens and found:
            end, _, string = min(found)
            return num, FinishMatchedStr(string), text[: end - len(string) * (not params.include_stop_str_in_output)]
        if num >= params.min_tokens and token_id in stop_ids:
            is_eos = token_id in SPECIAL and token_id not in params.stop_token_ids
            return num, FinishMatchedToken(token_id, is_eos), text_of(num - (not params.include_stop_str_in_output))
        if num >= params.max_tokens:
            return num, FinishLength("max_tokens", params.max_tokens), text_of(num)
        if len(sequence.prompt_token_ids) + num >= max_model_len:
            return num, FinishLength("max_model_len", max_model_len), text_of(num)
    return len(new), None, text_of(len(new))


def in_runs(part: Any, sequence: Sequence, runs: SequenceOf[SequenceOf[int]], max_model_len: int) -> tuple[Any, ...]:
    """The same as `by_brute_force`, if the tokens come in these runs."""
    verdict, stops = StopVerdict(0), checker(part, max_model_len)
    for run in runs:
        verdict = stops.check(sequence, run)
        for token_id in run[: verdict.num_accepted]:
            sequence.add_token_id(token_id)
        if verdict.finish_reason is not None:
            break
    detokenizer = sequence.detokenizer
    text = detokenizer.text + detokenizer.tail() if verdict.text_end is None else detokenizer.text[: verdict.text_end]
    return sequence.get_output_len(), verdict.finish_reason, text


def test_any_tokens_end_where_the_rules_say(part: Any) -> None:
    """Any tokens end at the same place for the same reason and with the same text, one by one or several at once."""
    rng, names = Random(1), list(PIECES)
    for _ in range(300):
        settings: dict[str, Any] = {
            "stop": [
                "".join(rng.choices(["a", "b", "c", "é"], k=rng.randrange(1, 4))) for _ in range(rng.randrange(4))
            ],
            "stop_token_ids": rng.sample(range(len(names)), rng.randrange(2)),
            "include_stop_str_in_output": rng.random() < 0.3,
            "ignore_eos": rng.random() < 0.3,
            "min_tokens": rng.choice((0, 0, 2, 4)),
            "max_tokens": rng.randrange(4, 9),
            "skip_special_tokens": rng.random() < 0.7,
        }
        pieces = rng.choices([*names, "é1 é2"], k=rng.randrange(1, 9))
        new, cut = ids(" ".join(pieces)), rng.randrange(9)
        expected = by_brute_force(sequence_of(**settings), new, max_model_len=10)
        for runs in ([new], [new[:cut], new[cut:]], [[token_id] for token_id in new]):
            steps = "; ".join(" ".join(names[i] for i in run) for run in runs)
            got = in_runs(part, sequence_of(**settings), runs, max_model_len=10)
            on = f"{shown(settings)}, a prompt of 3 tokens, max_model_len=10; the new tokens, with `;` between steps: "
            on = f"{on}`{steps}`; how many are accepted, the reason, the text that is shown"
            same(got, expected, on=on, hint=advice(got, expected, settings, steps))


def advice(got: tuple[Any, ...], expected: tuple[Any, ...], settings: dict[str, Any], steps: str) -> str:
    """What may be wrong, and how to read the pieces."""
    if got[:2] != expected[:2]:
        words = "Go through the tokens by hand: the first at which a string, a stop token or a length ends the output."
    elif isinstance(expected[1], FinishMatchedStr):
        words = "The right end; `text_end` is not."
    else:
        words = "The right end; the detokenizer has too many tokens or too few."
    words += " `é1` and `é2` are the two bytes of `é`: one alone is no character." if "é" in steps else ""
    is_special = settings["skip_special_tokens"] and "<" in steps
    return words + is_special * " The detokenizer leaves `<end>` and `<over>` out of the text itself."
