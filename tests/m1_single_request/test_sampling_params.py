"""SamplingParams: every bad value is refused with the value in the message, and what was accepted never changes."""

import copy
import dataclasses
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from m1_single_request import EngineError, InvalidParamsError, InvalidRequestError, SamplingParams

NAN, INF = math.nan, math.inf

REFUSED_INTEGERS: dict[str, list[Any]] = {
    "max_tokens": [0, -1, None, True, 1.0, "8", NAN, 2**63],
    "min_tokens": [-1, None, True, 0.0, "0", 129],  # 129 is more than the default max_tokens
    "top_k": [0, -2, None, True, 5.0, "5", NAN, 2**63],
    "seed": [True, 1.5, "7", NAN, 2**63, -(2**63) - 1],
    "logprobs": [-1, True, 2.0, "2", 2**63],
    "prompt_logprobs": [-1, False, 2.0, "2", 2**63],
    "n": [0, -1, None, True, 1.0, "1", 2**63],
}

REFUSED_NUMBERS: dict[str, list[Any]] = {
    "temperature": [-0.1, -1, NAN, INF, -INF, True, "1", None, Fraction(1, 2), 10**400],
    "top_p": [0, 0.0, -0.5, 1.01, 2, NAN, INF, True, "0.5", None],
    "min_p": [-0.01, 1.01, NAN, INF, False, "0.1", None],
    "presence_penalty": [-2.01, 2.01, NAN, INF, -INF, True, "1", None],
    "frequency_penalty": [-2.01, 2.01, NAN, INF, -INF, True, "1", None],
    "repetition_penalty": [0, 0.0, -1.0, 2.01, NAN, INF, True, "1", None],
}

REFUSED_FLAGS: dict[str, list[Any]] = {
    name: [0, 1, None, "yes", 1.0] for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
}

REFUSED_STOPS: list[Any] = [
    "", ["a", ""], ("",), [1], ["a", None], None, 5, b"end", [b"end"], {"a"}, {"a": 1}, object,
    "x" * 10**6, ["a", "\ud800"],
]  # fmt: skip

REFUSED_STOP_TOKEN_IDS: list[Any] = [
    None, 5, "5", b"ab", bytearray(b"ab"), [-1], [1, -7], [True], [1.0], ["5"], [None], {5}, {5: 1},
    [2**63], range(10**9),
]  # fmt: skip

REFUSED_LOGIT_BIAS: list[Any] = [
    5, "5", [5], [(5, 1.0)],
    {-1: 1.0}, {True: 1.0}, {1.0: 1.0}, {"5": 1.0}, {None: 1.0}, {2**63: 1.0},
    {5: NAN}, {5: INF}, {5: -INF}, {5: True}, {5: "1"}, {5: None}, {5: 100.5}, {5: -101}, {5: 10**400},
]  # fmt: skip

BAD = [
    *(
        (name, value)
        for table in (REFUSED_INTEGERS, REFUSED_NUMBERS, REFUSED_FLAGS)
        for name in table
        for value in table[name]
    ),
    *(("stop", value) for value in REFUSED_STOPS),
    *(("stop_token_ids", value) for value in REFUSED_STOP_TOKEN_IDS),
    *(("logit_bias", value) for value in REFUSED_LOGIT_BIAS),
]


def short(part: Any) -> str:
    """A value as the name of its test."""
    return repr(part)[:30]


def shown(name: str, value: Any) -> str:
    """How the refused value appears in the message: a bias shows the entry that is wrong, a number as it is written."""
    return repr(value).strip("{}") if name == "logit_bias" else repr(value)


@pytest.mark.parametrize(("name", "value"), BAD, ids=short)
def test_a_bad_value_is_refused_with_its_name_and_the_value_in_the_message(name: str, value: Any) -> None:
    with pytest.raises(InvalidParamsError) as refused:
        SamplingParams(**{name: value})
    assert name in str(refused.value)
    assert shown(name, value)[: 20 if name == "logit_bias" else 60] in str(refused.value)


@pytest.mark.parametrize(
    "params",
    [{"logit_bias": {5: 10**5000}}, {"stop_token_ids": [-(10**5000)]}, {"seed": [10**5000]}, {"ignore_eos": 10**5000}],
    ids=lambda params: next(iter(params)),
)
def test_a_number_that_python_does_not_write_is_refused_in_words(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidParamsError, match="thousands of digits"):
        SamplingParams(**params)


def test_a_refusal_is_a_request_error_and_a_value_error() -> None:
    assert issubclass(InvalidParamsError, InvalidRequestError)
    assert issubclass(InvalidParamsError, EngineError)
    assert issubclass(InvalidParamsError, ValueError)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "min_p"])
@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["large", "small"])
def test_a_whole_number_too_large_for_a_float_is_refused_like_any_other(name: str, value: Any) -> None:
    with pytest.raises(InvalidParamsError, match=name):
        SamplingParams(**{name: value})


def test_a_refusal_names_the_other_limit_or_what_to_use_instead() -> None:
    with pytest.raises(InvalidParamsError, match=r"min_tokens=9 .*max_tokens.*8"):
        SamplingParams(max_tokens=8, min_tokens=9)
    with pytest.raises(InvalidParamsError, match=r"top_k=0.*-1"):
        SamplingParams(top_k=0)


def test_unknown_parameters_and_positional_ones_are_errors() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(16)  # type: ignore[call-arg]


BOUNDARIES: dict[str, list[Any]] = {
    "max_tokens": [1, 2**63 - 1],
    "min_tokens": [0, 1, 128],
    "temperature": [0, 0.0, 1, 1e-9, 1e-5, 2.5, 1000, int(1e300), 10**22, np.float64(0.5)],
    "top_k": [-1, 1, 2**63 - 1],
    "top_p": [1, 1.0, 1e-9, 0.5],
    "min_p": [0, 0.0, 1, 1.0],
    "presence_penalty": [-2, -2.0, 0, 2, 2.0],
    "frequency_penalty": [-2, -2.0, 0, 2, 2.0],
    "repetition_penalty": [0.01, 1, 2, 2.0],
    "logit_bias": [None, {0: -100}, {0: 100.0, 5: 0}],
    "seed": [None, 0, -1, 2**63 - 1, -(2**63)],
    "logprobs": [None, 0, 1, 20],
    "prompt_logprobs": [None, 0, 1, 20],
    "n": [1, 2, 16],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BOUNDARIES.items() for v in values], ids=short)
def test_the_ends_of_every_range_are_accepted(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_the_defaults_are_plain_greedy() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.min_tokens, params.n) == (128, 0, 1)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, -1, 1.0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), None)
    assert (params.seed, params.logprobs, params.prompt_logprobs) == (None, None, None)
    assert (params.include_stop_str_in_output, params.ignore_eos, params.skip_special_tokens) == (False, False, True)
    assert params.is_greedy and not params.has_penalties and params.describe() == ""


@pytest.mark.parametrize("stop", ["END", ["END"], ("END",), ["END", "END"]])
def test_stop_may_be_one_string_or_several(stop: Any) -> None:
    assert SamplingParams(stop=stop).stop == ("END",)


def test_stop_keeps_the_order_in_which_it_was_given() -> None:
    assert SamplingParams(stop=["b", "a", "b", "c"]).stop == ("b", "a", "c")
    assert SamplingParams(stop="ab").stop == ("ab",), "one string is not a list of letters"
    assert SamplingParams(stop=[]).stop == ()


def test_stop_token_ids_may_be_any_sequence_of_ids() -> None:
    assert SamplingParams(stop_token_ids=[3, 1, 3]).stop_token_ids == (3, 1)
    assert SamplingParams(stop_token_ids=range(2)).stop_token_ids == (0, 1)


def test_an_empty_bias_is_no_bias() -> None:
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert SamplingParams(logit_bias={7: -3, 0: 2.5}).logit_bias == {7: -3, 0: 2.5}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(SamplingParams)])
def test_no_field_can_be_changed(field: str) -> None:
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(params, field, getattr(params, field))


def test_changing_what_was_passed_in_changes_nothing() -> None:
    stop, ids, bias = ["a"], [1], {1: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b")
    ids.append(2)
    bias[2] = 2.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), {1: 1.0})


def test_a_copy_with_a_change_is_checked_again() -> None:
    params = SamplingParams(max_tokens=8, stop="x", logit_bias={1: 1.0})
    changed = dataclasses.replace(params, max_tokens=9)
    assert (changed.max_tokens, changed.stop, changed.logit_bias) == (9, ("x",), {1: 1.0})
    with pytest.raises(InvalidParamsError):
        dataclasses.replace(params, min_tokens=9)


def test_equal_values_make_equal_parameters_and_copies_are_equal() -> None:
    settings: dict[str, Any] = {"temperature": 0.5, "stop": ["a"], "logit_bias": {1: 2.0}, "seed": 3}
    params = SamplingParams(**settings)
    assert params == SamplingParams(**settings) != SamplingParams(**settings | {"seed": 4})
    assert copy.deepcopy(params) == params == pickle.loads(pickle.dumps(params))


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9.9e-6, True), (1e-5, False), (0.1, False)])
def test_greedy_is_a_temperature_below_one_in_a_hundred_thousand(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy
    assert SamplingParams(temperature=temperature, top_p=0.5, top_k=3).is_greedy is greedy


@pytest.mark.parametrize(
    ("settings", "has_penalties"),
    [
        ({}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"temperature": 1.0, "logit_bias": {1: 1.0}}, False),
    ],
)
def test_penalties_are_noticed(settings: dict[str, Any], has_penalties: bool) -> None:
    assert SamplingParams(**settings).has_penalties is has_penalties


def test_the_description_names_what_acts_in_the_order_in_which_it_acts() -> None:
    params = SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, presence_penalty=0.2, frequency_penalty=0.3,
        repetition_penalty=1.1, min_tokens=2, logit_bias={4: 1.0},
    )  # fmt: skip
    description = params.describe()
    order = [
        "min_tokens 2", "logit_bias", "repetition_penalty 1.1", "frequency_penalty 0.3", "presence_penalty 0.2",
        "temperature 0.7", "min_p 0.1", "top_k 5", "top_p 0.9",
    ]  # fmt: skip
    places = [description.index(part) for part in order]
    assert places == sorted(places)


def test_the_description_of_a_greedy_choice_leaves_out_what_does_not_act() -> None:
    assert SamplingParams(top_k=5, top_p=0.5, min_p=0.5).describe() == ""
    assert SamplingParams(repetition_penalty=1.2, top_p=0.5).describe() == "repetition_penalty 1.2"
