"""Every milestone gives the tokens that transformers gives, however it is asked.

The suite is parametrised over `MILESTONES` in `harness.py`; what "the same tokens" means stands there too.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

from tests.equivalence.harness import MILESTONES, WAYS, Prompt, Reference, ReferenceModel, compare, make_engine
from tests.equivalence.models import MODELS
from tests.equivalence.prompts import MAX_TOKENS

References = Callable[[str], tuple[list[Prompt], list[Reference]]]


@pytest.fixture(scope="module", params=[(m, name) for m in MILESTONES for name in MODELS], ids="-".join)
def case(request: pytest.FixtureRequest, reference_model: Callable[[str], ReferenceModel]) -> Iterator[tuple[Any, ...]]:
    """A milestone's package, its engine on one of the models, and that model's name."""
    milestone, name = request.param
    with make_engine(milestone, reference_model(name).directory) as engine:
        yield import_module(milestone), engine, name


@pytest.mark.parametrize("way", WAYS)
def test_greedy_answers_are_those_of_transformers(
    case: tuple[Any, ...], way: str, references: References, reference_model: Callable[[str], ReferenceModel]
) -> None:
    package, engine, name = case
    model = reference_model(name)
    prompts, expected = references(name)
    assert len(prompts) == 20
    if way != "generate":
        prompts, expected = prompts[::2], expected[::2]  # enough to see that it is another way to the same answers
    outputs = WAYS[way](engine, prompts, package.SamplingParams(max_tokens=MAX_TOKENS))
    seen = compare(expected, [output.token_ids for output in outputs])
    assert seen.num_prompts == len(prompts)
    for output, reference in zip(outputs, expected, strict=True):
        assert output.finished and output.error is None
        assert output.prompt_token_ids == reference.prompt_token_ids
        ended = output.token_ids[-1] in model.eos_token_ids
        assert output.finish_reason == ("stop" if ended else "length")
        assert output.text == model.decode(output.token_ids[:-1] if ended else output.token_ids)
    assert not engine.has_unfinished_requests()
    assert engine.stats().kv_tokens == 0


def test_logprobs_are_those_of_transformers(
    case: tuple[Any, ...], references: References, reference_model: Callable[[str], ReferenceModel]
) -> None:
    package, engine, name = case
    prompts, _ = references(name)
    for prompt in prompts[::4]:
        output = engine.generate(prompt, package.SamplingParams(max_tokens=8, logprobs=3, prompt_logprobs=2))
        token_ids = [*output.prompt_token_ids, *output.token_ids]
        expected = reference_model(name).logprobs(token_ids)
        rows = [*output.prompt_logprobs, *output.outputs[0].logprobs]
        assert len(rows) == len(token_ids) and rows[0] is None
        for position, row in enumerate(rows[1:], start=1):
            num_best = 2 if position < len(output.prompt_token_ids) else 3
            before = expected[position - 1]
            assert token_ids[position] in row
            assert num_best <= len(row) <= num_best + 1
            for token_id, logprob in row.items():
                assert logprob.logprob == pytest.approx(before[token_id].item(), abs=1e-4)
            assert max(entry.logprob for entry in row.values()) == pytest.approx(before.max().item(), abs=1e-4)
        own = [row[token].logprob for row, token in zip(output.outputs[0].logprobs, output.token_ids, strict=True)]
        assert output.outputs[0].cumulative_logprob == pytest.approx(sum(own))
