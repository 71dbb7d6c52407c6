"""An engine with a learner's part answers the prompts of the equivalence suite as transformers does."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.contracts.part import Broken, Part
from tests.equivalence.harness import VARIANTS, Variant, compare
from tests.equivalence.prompts import MAX_TOKENS
from tests.support.engines import check_invariants


def variant_of(part: Part, solution: Any) -> Variant:
    """The engine that runs a solution."""
    variant = next(each for each in VARIANTS if str(each) == part.variant)
    configs: dict[str, Mapping[str, Any]] = {
        keyword: {**variant.configs.get(keyword, {}), **part.changes.get(keyword, {})}
        for keyword in {*variant.configs, *part.changes}
    }
    parts = {**variant.parts(), **({part.role: solution} if part.role else {})}
    return replace(variant, configs=configs, parts=lambda: parts)


def answer(part: Part, solution: Any, references: Any, reference_model: Any, every: int = 1) -> None:
    """Ask an engine that has a solution each `every`-th prompt. Raises `Broken` for another answer."""
    prompts, expected = references("embedded")
    variant = variant_of(part, solution)
    with variant.make_engine(reference_model("embedded").directory) as engine:
        params = variant.package.SamplingParams(max_tokens=MAX_TOKENS)
        for _ in range(2 if variant.shares else 1):
            outputs = list(engine.generate_batch(prompts[::every], params).values())
            failed = next((output for output in outputs if output.error is not None), None)
            if failed is not None:
                raise failed.error
            try:
                compare(expected[::every], [output.token_ids for output in outputs])
            except AssertionError as error:
                raise Broken(
                    f"{len(outputs)} prompts at once, {variant}",
                    "the tokens of transformers",
                    str(error),
                    "The contract is kept, so it may be state that remains from one request to the next.",
                ) from error
        check_invariants(engine.engine_core)


def test_the_engine_answers_as_before(chosen: tuple[Part, Any], references: Any, reference_model: Any) -> None:
    """An engine with this part gives the tokens that it gave before."""
    part, solution = chosen
    if not part.variant:
        pytest.skip("this part runs in no engine of the equivalence suite")
    answer(part, solution, references, reference_model)
