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
from tests.engine_contract.crowd import Answers, MakeEngine, run
from tests.engine_contract.variants import VARIANTS, Variant
from tests.support.engines import greedy

pytestmark = pytest.mark.sample(3)

Lie = Callable[[ModelRunnerOutput], Any]

PROMPTS = {"a": [31, 32, 33], "b": [41, 42, 43, 44, 45], "c": [51]}
NUM_TOKENS = 12
STEPS = pytest.mark.parametrize("step", [1, 3], ids=["prefill", "decode"])


@pytest.fixture(params=[variant for variant in VARIANTS if variant.milestone >= "m3"], ids=str)
def variant(request: pytest.FixtureRequest) -> Variant:
    """Every milestone whose runner returns tokens."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def expected(make_m1: Any) -> Answers:
    """The answers with a runner that does its work."""
    engine = make_m1()
    return {rid: engine.generate(prompt, greedy(NUM_TOKENS)).token_ids for rid, prompt in PROMPTS.items()}


def engine_of(variant: Variant, make_engine: MakeEngine, lie: Lie, steps: range) -> Any:
    """An engine with all prompts, whose runner changes its output in these steps."""
    base, count = variant.part("model_runner"), [0]

    class Lying(base):  # type: ignore[misc,valid-type]
        def execute_model(self, work: Any) -> Any:
            output = super().execute_model(work)
            count[0] += 1
            return lie(output) if count[0] in steps else output

    engine = make_engine({"model_runner": Lying, "executor": variant.package.PARTS["executor"]}, seats=3)
    for rid, prompt in PROMPTS.items():
        engine.add_request(prompt, greedy(NUM_TOKENS), request_id=rid)
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


@STEPS
@pytest.mark.parametrize(("lie", "message"), INVALID_ROWS.values(), ids=INVALID_ROWS)
def test_an_invalid_row_ends_its_request_alone(
    variant: Variant, make_engine: MakeEngine, expected: Answers, lie: Lie, message: str, step: int
) -> None:
    second: list[str] = []

    def noted(output: ModelRunnerOutput) -> Any:
        second.append(output.req_ids[1])
        return lie(output)

    outputs = run(variant, engine_of(variant, make_engine, noted, range(step, step + 1)))
    (victim,) = second
    failed = outputs.pop(victim)
    assert isinstance(failed.error, PartError) and "model runner" in str(failed.error)
    assert message.format(rid=repr(victim)) in str(failed.error)
    assert failed.token_ids == expected[victim][: len(failed.token_ids)]
    assert {rid: output.token_ids for rid, output in outputs.items()} == {
        rid: tokens for rid, tokens in expected.items() if rid != victim
    }


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


@STEPS
@pytest.mark.parametrize(("lie", "message"), INVALID_OUTPUTS.values(), ids=INVALID_OUTPUTS)
def test_rows_without_a_request_end_their_step(
    variant: Variant, make_engine: MakeEngine, expected: Answers, lie: Lie, message: str, step: int
) -> None:
    engine = engine_of(variant, make_engine, lie, range(step, step + 1))
    for rid, output in run(variant, engine).items():
        assert isinstance(output.error, PartError) and message in str(output.error)
        assert len(output.token_ids) >= step - 1
        assert output.token_ids == expected[rid][: len(output.token_ids)]
    assert engine.generate(PROMPTS["b"], greedy(NUM_TOKENS)).token_ids == expected["b"]


def test_rows_may_come_in_any_order(variant: Variant, make_engine: MakeEngine, expected: Answers) -> None:
    def reversed_rows(output: ModelRunnerOutput) -> ModelRunnerOutput:
        return rows(output, list(range(len(output.req_ids)))[::-1])

    outputs = run(variant, engine_of(variant, make_engine, reversed_rows, range(100)))
    assert {rid: output.token_ids for rid, output in outputs.items()} == expected
