"""The output of a model runner is checked before its tokens are committed.

A row that is missing, doubled or no token ends its request; rows of which no request can be named end their step. The
other requests get their tokens, and nothing is leaked.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from m1_single_request import PartError
from m3_paged_attention.outputs import ModelRunnerOutput
from tests.engine_contract.crowd import SEATS, Answers, MakeEngine, check_the_rest, run, submit
from tests.engine_contract.variants import VARIANTS, Variant, each_of

pytestmark = pytest.mark.sample(3)

Lie = Callable[[ModelRunnerOutput], Any]


variant = each_of([variant for variant in VARIANTS if variant.milestone >= "m3"])
"""Every milestone whose runner returns tokens."""


def engine_of(variant: Variant, make_engine: MakeEngine, lie: Lie, steps: range) -> Any:
    """An engine with the crowd, of which three run, whose runner changes its output in these steps."""
    base, count = variant.part("model_runner"), [0]

    class Lying(base):  # type: ignore[misc,valid-type]
        def execute_model(self, work: Any) -> Any:
            output = super().execute_model(work)
            count[0] += 1
            return lie(output) if count[0] in steps else output

    engine = make_engine({"model_runner": Lying, "executor": variant.package.PARTS["executor"]}, seats=SEATS)
    submit(engine)
    return engine


def rows(output: ModelRunnerOutput, order: list[int]) -> ModelRunnerOutput:
    """The same with these rows only, in this order."""
    return replace(
        output,
        req_ids=[output.req_ids[i] for i in order],
        sampled_token_ids=[output.sampled_token_ids[i] for i in order],
        logprobs=[output.logprobs[i] for i in order],
    )


def with_tokens(output: ModelRunnerOutput, tokens: Any) -> ModelRunnerOutput:
    """The same with other tokens in the second row, and as many logprobs."""
    sampled, logprobs = list(output.sampled_token_ids), list(output.logprobs)
    sampled[1], logprobs[1] = tokens, [None] * len(tokens or ())
    return replace(output, sampled_token_ids=sampled, logprobs=logprobs)


INVALID_ROWS: dict[str, tuple[Lie, str]] = {
    "missing": (lambda output: rows(output, [0, 2]), "returned 0 rows for request {rid}"),
    "twice": (lambda output: rows(output, [0, 1, 1, 2]), "returned 2 rows for request {rid}"),
    "missing, an error for a stranger": (
        lambda output: replace(rows(output, [0, 2]), errors={"stranger": ValueError()}),
        "returned 0 rows for request {rid}",
    ),
    "empty": (lambda output: with_tokens(output, []), "returned [] for request {rid} in place of"),
    "too many": (lambda output: with_tokens(output, [5] * 5), "returned [5, 5, 5, 5, 5] for request {rid}"),
    "None": (lambda output: with_tokens(output, [None]), "returned [None] for request {rid} in place of"),
    "a float": (lambda output: with_tokens(output, [2.5]), "returned [2.5] for request {rid} in place of"),
    "negative": (lambda output: with_tokens(output, [-1]), "returned [-1] for request {rid} in place of"),
    "no list": (lambda output: with_tokens(output, None), "returned None for request {rid} in place of"),
}


@pytest.mark.parametrize("step", [1, 2], ids=["prefill", "decode"])
@pytest.mark.parametrize(("lie", "message"), INVALID_ROWS.values(), ids=INVALID_ROWS)
def test_an_invalid_row_ends_its_request_alone(
    variant: Variant, make_engine: MakeEngine, expected: Answers, lie: Lie, message: str, step: int
) -> None:
    second: list[str] = []

    def noted(output: ModelRunnerOutput) -> Any:
        second.append(output.req_ids[1])
        return lie(output)

    engine = engine_of(variant, make_engine, noted, range(step, step + 1))
    last = run(variant, engine)
    (victim,) = second
    error = str(last[victim].error)
    assert message.format(rid=repr(victim)) in error and "model runner" in error
    check_the_rest(variant, engine, last, expected, {victim: step - 1}, PartError)


INVALID_OUTPUTS: dict[str, tuple[Lie, str]] = {
    "nothing": (lambda output: None, "returned None, which is not a ModelRunnerOutput"),
    "a stranger": (
        lambda output: replace(output, req_ids=["stranger", *output.req_ids[1:]]),
        "a row for 'stranger', which is not in",
    ),
    "an id too few": (
        lambda output: replace(output, req_ids=output.req_ids[:-1]),
        "2 ids, 3 rows of tokens and 3 of logprobs",
    ),
    "no logprobs": (lambda output: replace(output, logprobs=[]), "3 ids, 3 rows of tokens and 0 of logprobs"),
    "no prompt logprobs": (
        lambda output: replace(output, prompt_logprobs=None),
        "prompt_logprobs that are not a mapping",
    ),
    "no errors": (lambda output: replace(output, errors=[]), "that are not a mapping"),
}


@pytest.mark.parametrize("step", [1, 2], ids=["prefill", "decode"])
@pytest.mark.parametrize(("lie", "message"), INVALID_OUTPUTS.values(), ids=INVALID_OUTPUTS)
def test_rows_without_a_request_end_their_step(
    variant: Variant, make_engine: MakeEngine, expected: Answers, lie: Lie, message: str, step: int
) -> None:
    engine = engine_of(variant, make_engine, lie, range(step, step + 1))
    last = run(variant, engine)
    failed = dict.fromkeys("abc", step - 1)
    assert all(message in str(last[rid].error) for rid in failed)
    check_the_rest(variant, engine, last, expected, failed, PartError)


def test_rows_may_come_in_any_order(variant: Variant, make_engine: MakeEngine, expected: Answers) -> None:
    def reversed_rows(output: ModelRunnerOutput) -> ModelRunnerOutput:
        return rows(output, list(range(len(output.req_ids)))[::-1])

    engine = engine_of(variant, make_engine, reversed_rows, range(100))
    check_the_rest(variant, engine, run(variant, engine), expected, {})
