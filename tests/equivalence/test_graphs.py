"""With its steps in CUDA graphs, m6 gives the tokens that transformers gives, in each of its variants.

The graphs are recorded and replayed on the CPU (`tests/m6_multimodal_pd/recorded_graphs.py`); natively they are part of
`test_gpu.py`.
"""

from collections.abc import Callable

import pytest

from tests.equivalence.harness import VARIANTS, Prompt, Reference, ReferenceModel, Variant, compare
from tests.equivalence.models import EXPERTS, MODELS
from tests.equivalence.prompts import MAX_TOKENS
from tests.m6_multimodal_pd.engines import runner_of
from tests.m6_multimodal_pd.recorded_graphs import (
    RecordedGraph,
    graphs_of_engines as graphs_of_engines,
    recorded_graphs as recorded_graphs,
    wanted_graphs as wanted_graphs,
)

CASES = [
    pytest.param(variant, model, id=f"{variant}-{model}")
    for variant in VARIANTS
    if variant.milestone == "m6_multimodal_pd" and variant.backend == "torch"
    for model in (variant.models or [*MODELS, *EXPERTS])
    if model != "embedded"  # its requests may be so long that kernels which always read all of a block table are slow
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("variant", "model"), CASES)
def test_answers_in_graphs_are_those_of_transformers(
    variant: Variant,
    model: str,
    references: Callable[[str], tuple[list[Prompt], list[Reference]]],
    reference_model: Callable[[str], ReferenceModel],
    graphs_of_engines: list[RecordedGraph],
) -> None:
    prompts, expected = references(model)
    params = variant.package.SamplingParams(max_tokens=MAX_TOKENS)
    with variant.make_engine(reference_model(model).directory) as engine:
        assert runner_of(engine).kv.step is not None
        for _ in range(2):  # what the first round has left is found by the second
            outputs = list(engine.generate_batch(prompts, params).values())
            assert [output.error for output in outputs] == [None] * len(prompts)
            compare(expected, [output.token_ids for output in outputs])
        assert engine.stats().kv_tokens == 0
        assert sum(graph.num_replays for graph in graphs_of_engines) > MAX_TOKENS / 2
