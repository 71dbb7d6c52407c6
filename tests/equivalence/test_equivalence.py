"""Every milestone gives the tokens that transformers gives, however it is configured and asked.

The suite is parametrised over `VARIANTS` in `harness.py`; what "the same tokens" means stands there too.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.equivalence.harness import VARIANTS, WAYS, Prompt, Reference, ReferenceModel, Variant, compare
from tests.equivalence.models import EXPERTS, MODELS
from tests.equivalence.prompts import MAX_TOKENS

References = Callable[[str], tuple[list[Prompt], list[Reference]]]


class Case(NamedTuple):
    """A variant's engine on one of the models, with nothing in its cache."""

    variant: Variant
    engine: Any
    model: str


CASES = [(variant, name) for name in MODELS for variant in VARIANTS if name in (variant.models or MODELS)]
CASES += [(each, name) for name in EXPERTS for each in VARIANTS if each.milestone >= "m3" and not each.models]
ASKED = [(case, way) for case in CASES for way in case[0].ways]


def id_of(case: tuple[Variant, str]) -> str:
    return "-".join(map(str, case))


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, reference_model: Callable[[str], ReferenceModel]) -> Iterator[Case]:
    """What `CASES` names: one engine for all tests that ask it."""
    variant, name = request.param
    if obstacle := variant.obstacle():
        pytest.skip(obstacle)
    with variant.make_engine(reference_model(name).directory) as engine:
        yield Case(variant, engine, name)


@pytest.fixture
def case(made: Case) -> Case:
    """The same, as empty as it was made: what one test left in the cache is not there for the next one."""
    if made.variant.milestone >= "m4":
        assert made.engine.flush_cache()
    return made


def every_variant(made: tuple[Variant, str], way: str) -> set[Any]:
    """Of the full matrix: each variant, and with each milestone all models and all ways of asking."""
    variant, model = made
    return {variant, (variant.milestone, model), (variant.milestone, way)}


def every_kind(made: tuple[Variant, str]) -> set[Any]:
    """Less: each milestone, each model, all kernels."""
    variant, model = made
    return {variant.milestone, model, variant.backend}


@pytest.mark.sample(of=every_variant)
@pytest.mark.parametrize(
    ("made", "way"),
    ASKED,
    indirect=["made"],
    scope="module",  # or else there would be an engine for each way
    ids=[f"{id_of(case)}-{way}" for case, way in ASKED],
)
def test_greedy_answers_are_those_of_transformers(
    case: Case, way: str, references: References, reference_model: Callable[[str], ReferenceModel]
) -> None:
    variant, engine, name = case
    model = reference_model(name)
    prompts, expected = references(name)
    assert len(prompts) == 20
    share = variant.ways[way]  # fewer are enough to see that it is another way to the same answers
    prompts, expected = prompts[::share], expected[::share]
    preempted, evicted = variant.num_preemptions(engine), variant.num_evicted_tokens(engine)
    outputs = WAYS[way](engine, prompts, variant.package.SamplingParams(max_tokens=MAX_TOKENS))
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
    assert not variant.preempts or variant.num_preemptions(engine) > preempted
    assert not variant.evicts or variant.num_evicted_tokens(engine) > evicted


SHARING = [case for case in CASES if case[0].shares]


@pytest.mark.sample(of=every_kind)
@pytest.mark.parametrize("made", SHARING, indirect=True, ids=map(id_of, SHARING))
def test_what_is_asked_again_is_found_and_answered_alike(case: Case, references: References) -> None:
    """Whatever the cache has of it: the whole prompt, or of a longer one its beginning."""
    variant, engine, name = case
    prompts, expected = references(name)
    params = variant.package.SamplingParams(max_tokens=MAX_TOKENS)
    for _ in range(2):
        outputs = list(engine.generate_batch(prompts[3::4], params).values())
        compare(expected[3::4], [output.token_ids for output in outputs])
    assert all(output.metrics.cached_tokens > 0 for output in outputs)


@pytest.mark.sample(of=every_kind)
@pytest.mark.parametrize("made", CASES, indirect=True, ids=id_of)
def test_logprobs_are_those_of_transformers(
    case: Case, references: References, reference_model: Callable[[str], ReferenceModel]
) -> None:
    variant, engine, name = case
    prompts, _ = references(name)
    params = variant.package.SamplingParams(max_tokens=8, logprobs=3, prompt_logprobs=2)
    for output in engine.generate_batch(prompts[::4], params).values():
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
